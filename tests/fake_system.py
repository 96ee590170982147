"""A system of files as the kernel shows it, small enough to write down: /proc and cgroup hierarchies under a folder."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


class FakeSystem:
    """/proc and the cgroup mounts of one process; everything else of the machine stays as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").write_text("")
        (self.proc / "self/mountinfo").write_text("22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n")
        (self.proc / "self/status").write_text("Name:\tpython\nVmSize:\t 102400 kB\nVmData:\t 51200 kB\n")
        self.meminfo(total=1000 * MIB, available=800 * MIB)

    def meminfo(self, **sizes: int) -> None:
        """MemTotal and MemAvailable in bytes."""
        names = {"total": "MemTotal", "available": "MemAvailable"}
        (self.proc / "meminfo").write_text("".join(f"{names[name]}:  {size // 1024} kB\n" for name, size in sizes.items()))

    def mount(self, kind: str, options: str, *, root: str = "/", point: str = "cgroup") -> Path:
        """Mounts a cgroup hierarchy; the folder of the mount."""
        folder = self.folder / point
        folder.mkdir(parents=True)
        escaped = str(folder).replace(" ", "\\040")
        with open(self.proc / "self/mountinfo", "a") as file:
            file.write(f"31 22 0:27 {root} {escaped} rw,nosuid shared:9 - {kind} {kind} {options}\n")
        return folder

    def member(self, line: str) -> None:
        """A line of /proc/self/cgroup."""
        with open(self.proc / "self/cgroup", "a") as file:
            file.write(line + "\n")


def write(folder: Path, **files: object) -> None:
    """Files of a cgroup; a `__` in a name stands for its dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
