"""Where the commands begin: Ctrl-C while their modules are still being loaded ends them like any other Ctrl-C."""

from __future__ import annotations

import sys
from importlib import import_module

_INTERRUPTED = 130  # as sparseflow.cli.options has it, which takes a while to load


def sparseflow() -> None:
    """The command `sparseflow`."""
    _start("sparseflow.cli.main")


def sf_pack() -> None:
    """The command `sf-pack`."""
    _start("sparseflow.cli.pack")


def sf_bench() -> None:
    """The command `sf-bench`."""
    _start("sparseflow.cli.bench")


def _start(module: str) -> None:
    try:
        main = import_module(module).main
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    main()
