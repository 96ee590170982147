"""Where a model lies: the kind of its file system, the room there, and whether its disk turns."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_MOUNTS = Path("/proc/self/mountinfo")
_BLOCK_DEVICES = Path("/sys/dev/block")

NETWORK = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "afs", "gfs2", "beegfs",
    "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone",
))
"""File systems whose bytes come over a network, by their name in mountinfo."""
IN_MEMORY = frozenset(("tmpfs", "ramfs"))


@dataclass(frozen=True, slots=True)
class FileSystem:
    """kind: as in mountinfo, None if unknown; free_bytes: for this user; rotational: None where the system does not tell, as
    for file systems that are no block device's."""

    kind: str | None
    free_bytes: int
    total_bytes: int
    rotational: bool | None

    @property
    def is_network(self) -> bool:
        """Whether the bytes come over a network."""
        return self.kind in NETWORK

    @property
    def is_memory(self) -> bool:
        """Whether files there live in memory."""
        return self.kind in IN_MEMORY

    def to_json(self) -> dict[str, Any]:
        """All attributes, by name."""
        return asdict(self)


def file_system(path: Path) -> FileSystem:
    """The file system that holds an existing path. Raises OSError when it cannot be asked."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    usage = shutil.disk_usage(path)
    kind, source = _mounted(number)
    return FileSystem(kind, usage.free, usage.total, _rotational(number, source))


def _mounted(number: str) -> tuple[str | None, str | None]:
    """Type and source of the file system with that device number."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return None, None
    for line in lines:
        mounted, _, system = line.partition(" - ")
        if mounted.split()[2] == number:
            kind, source = system.split()[:2]
            return kind, source
    return None, None


def _rotational(number: str, source: str | None) -> bool | None:
    """By sysfs: of the device, or of the whole disk for a partition; of the mounted device where the number is no disk's (btrfs)."""
    if source is not None and source.startswith("/dev/") and not (_BLOCK_DEVICES / number).exists():
        try:
            device = os.stat(source).st_rdev
        except OSError:
            return None
        number = f"{os.major(device)}:{os.minor(device)}"
    for queue in (_BLOCK_DEVICES / number / "queue", _BLOCK_DEVICES / number / ".." / "queue"):
        try:
            return (queue / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None
