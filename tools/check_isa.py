"""Checks that the built extension modules use wide instructions only where they were asked for.

    python tools/check_isa.py [MODULE.so ...]          default: the extension modules of the installed package

A binary runs on every x86-64 processor only if 512-bit and mask registers appear in functions named *_avx512vnni, and 256-bit
registers and fused multiply-adds in those and *_avx2. Needs objdump, and modules that are not stripped. Exit status 1 and a line
per function at fault.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SYMBOL = re.compile(r"^[0-9a-f]+ <(.+)>:$")
WIDE_512 = re.compile(r"%zmm|%k[0-7]\b")
WIDE_256 = re.compile(r"%ymm|\bvfn?m(?:add|sub)")


def faults(module: Path) -> Iterator[str]:
    """Functions of a module that hold instructions their name does not promise."""
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(module)], capture_output=True, text=True, check=True)
    function, told = "", set()
    for line in listing.stdout.splitlines():
        symbol = SYMBOL.match(line)
        if symbol:
            function = symbol[1]
            continue
        for pattern, suffixes in ((WIDE_512, ("_avx512vnni",)), (WIDE_256, ("_avx2", "_avx512vnni"))):
            if pattern.search(line) and not any(suffix in function for suffix in suffixes) and function not in told:
                told.add(function)
                yield f"{module.name}: {function}:{line}"


def main() -> int:
    modules = [Path(name) for name in sys.argv[1:]]
    if not modules:
        import sparseflow

        modules = sorted(Path(sparseflow.__file__).parent.rglob("*.so"))
    if not modules:
        print("no extension modules found: build the package first", file=sys.stderr)
        return 1
    found = [fault for module in modules for fault in faults(module)]
    for fault in found:
        print(fault, file=sys.stderr)
    print(f"{len(modules)} modules, {len(found)} functions at fault")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
