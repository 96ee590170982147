"""What a measurement ran on: the machine, the versions, the revision. A figure without them is an anecdote."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.kernels import isa
from sparseflow.kernels.threads import default_threads
from sparseflow.memory import available_memory, total_memory
from sparseflow.memory_speed import last_level_cache_bytes

_CHECKOUT = Path(__file__).parent.parent
_PROCESSORS = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, Any]:
    """Processor, memory and kernel, by name; sizes in bytes, None for what the system does not tell."""
    return {
        "processor": _processor(),
        "processors": default_threads(),
        "isa": isa.active(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": total_memory(),
        "available_bytes": available_memory(),
        "system": f"{platform.system()} {platform.release()}",
    }


def describe_versions() -> dict[str, Any]:
    """Versions of SparseFlow and of what it runs on; `revision` is git's, None for an installed package."""
    return {
        "sparseflow": version("sparseflow"),
        "revision": _revision(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _processor() -> str | None:
    try:
        for line in _PROCESSORS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return None
    return None


def _revision() -> str | None:
    # Only of our own checkout: an installed package may well lie inside somebody else's.
    if not (_CHECKOUT / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "-C", os.fspath(_CHECKOUT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
