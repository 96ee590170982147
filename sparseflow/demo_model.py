"""The demo model: a small trained checkpoint that comes with the package, packed on first use."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from sparseflow.errors import StorageError
from sparseflow.pack import pack_checkpoint
from sparseflow.packfile import FORMAT_VERSION, MANIFEST_FILE

_READ_BYTES = 1 << 18


def checkpoint_folder() -> Path:
    """Where the demo's checkpoint lies in the installed package."""
    return Path(str(resources.files("sparseflow.demo")))


def packed_folder() -> Path:
    """The packed demo in the user's cache directory (XDG_CACHE_HOME, else ~/.cache); packs it if it is not there yet.

    The name carries the format version and a digest of the checkpoint, so an update of either is packed anew. Raises StorageError
    when the directory cannot be written.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparseflow"
    except RuntimeError as error:
        raise StorageError("no home directory is known to pack the demo into: set XDG_CACHE_HOME to a directory") from error
    checkpoint = checkpoint_folder()
    digest = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            with open(path, "rb") as file:
                while part := file.read(_READ_BYTES):
                    digest.update(part)
    folder = cache / f"demo-v{FORMAT_VERSION}-{digest.hexdigest()[:12]}"
    if (folder / MANIFEST_FILE).is_file():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(prefix="demo-", dir=cache))
    except OSError as error:
        raise StorageError(
            f"{cache}: cannot be written ({error.strerror}), set XDG_CACHE_HOME to a directory for the packed demo"
        ) from error
    try:
        pack_checkpoint(checkpoint, workspace / "packed")
        try:
            os.rename(workspace / "packed", folder)  # whole or not at all, also when two processes are at it
        except OSError as error:
            if not (folder / MANIFEST_FILE).is_file():
                raise StorageError(f"{folder}: cannot be made ({error.strerror}), delete what is there") from error
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return folder
