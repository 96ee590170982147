"""Choice of the instruction set: the environment variable, its refusal, and what the binary holds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparseflow.errors import OptionError
from sparseflow.kernels import isa


def active_in_subprocess(value: str) -> subprocess.CompletedProcess[str]:
    code = "from sparseflow.kernels import isa; print(isa.active())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env={**os.environ, "SPARSEFLOW_ISA": value}, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", isa.available())
def test_the_environment_chooses(name: str) -> None:
    assert active_in_subprocess(name).stdout.strip() == name


def test_an_empty_variable_means_the_best() -> None:
    assert active_in_subprocess("").stdout.strip() == isa.available()[-1]


def test_an_unknown_name_is_an_error_never_a_default() -> None:
    result = active_in_subprocess("sse9")
    assert result.returncode != 0
    assert "SPARSEFLOW_ISA may be one of generic" in result.stderr


def test_select_refuses_what_cannot_run() -> None:
    with pytest.raises(OptionError, match="'mmx'"):
        isa.select("mmx")
