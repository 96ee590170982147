"""The errors SparseFlow raises on purpose, and the exit status each one becomes on the command line.

Every message is one line: the file, tensor or option at fault, the value found, and the way out.
"""

from __future__ import annotations


class SparseFlowError(Exception):
    """Base of all errors raised on purpose. Exit status 1."""

    exit_status: int = 1


class OptionError(SparseFlowError, ValueError):
    """An argument or option has a value that cannot be used. Exit status 2, as for click's usage errors."""

    exit_status = 2


class CheckpointError(SparseFlowError):
    """The source checkpoint is incomplete, damaged, or of a form that cannot be packed. Exit status 3."""

    exit_status = 3


class PackedModelError(SparseFlowError):
    """A packed model folder is unfinished, truncated, damaged, or of a later format. Exit status 4."""

    exit_status = 4


class CapacityError(SparseFlowError):
    """The cache, the context or the memory of the machine is too small for what was asked. Exit status 5."""

    exit_status = 5


class StorageError(SparseFlowError):
    """The disk refused a read or a write, or has no room. Exit status 6."""

    exit_status = 6


class NonFiniteError(SparseFlowError):
    """NaN or infinity arose in a forward, so there is no answer. Exit status 7."""

    exit_status = 7
