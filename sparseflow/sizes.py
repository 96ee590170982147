"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from sparseflow.errors import OptionError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _FACTORS[_letter] = _FACTORS[f"{_letter}IB"] = 1024**_power
    _FACTORS[f"{_letter}B"] = 1000**_power
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*")
_LARGEST = 2**63 - 1


def format_bytes(count: int | None) -> str:
    """A size in binary units with one decimal: 512 B, 1.0 MiB, 29.9 GiB. None is "n/a": the system did not tell."""
    if count is None:
        return "n/a"
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in _UNITS:
        # Compared after rounding, so that nothing reads 1024.0 of one unit.
        if round(size, 1) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.1f} {unit}"


def parse_size(text: str) -> int:
    """Bytes of a size such as "1048576", "512M", "1.5 GiB". Upper and lower case mean the same.

    K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB are powers of 1000, as on a disk's label.
    Fractions of a byte are cut off. Raises OptionError for anything else.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise OptionError(f"{text!r} is not a size; write a number of bytes, or one such as 512MiB, 4GiB or 1.5G")
    count = int(Fraction(match[1]) * factor)
    if count > _LARGEST:
        raise OptionError(f"{text!r} is more bytes than a file or memory can have; write a size such as 4GiB")
    return count
