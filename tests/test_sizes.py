"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from sparseflow.errors import OptionError
from sparseflow.sizes import format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512 B", 512),
        ("1MiB", 1 << 20),
        ("4GiB", 4 << 30),
        ("512M", 512 << 20),
        (" 1.5 gib ", 3 << 29),
        ("0.1KiB", 102),
        ("2T", 2 << 40),
        ("1kb", 1000),
        ("3GB", 3 * 10**9),
    ],
)
def test_parse_size(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1,5G", "1e9", "4 GiBs", "4PiB", "inf", "nan", "0x10", "1 2", "999999999999GiB", "auto"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "n/a"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (3 << 20, "3.0 MiB"),
        (30 << 30, "30.0 GiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_format_bytes(count: int | None, text: str) -> None:
    assert format_bytes(count) == text
