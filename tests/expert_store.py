"""A synthetic experts.sfx of any size: every page is full of noise and says which slice and page it is."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from sparseflow.packfile import HEADER_BYTES, KIND_EXPERTS, PAGE, Header, align


def write_expert_store(path: Path, num_layers: int, num_experts: int, slice_bytes: int, *, seed: int = 0) -> Path:
    """Write the file, flushed to the disk so that its page cache can be dropped.

    Each page of slice `layer * num_experts + expert` begins with two uint32: the slice and the page within it. The rest
    is one noise page for all: not zero, not sparse, and cheap to make.
    """
    stride = align(slice_bytes, PAGE)
    count = num_layers * num_experts
    header = Header(
        kind=KIND_EXPERTS,
        weight_bits=8,
        num_layers=num_layers,
        num_experts=num_experts,
        hidden_size=128,
        intermediate_size=64,
        stride=stride,
        slice_bytes=slice_bytes,
        file_bytes=HEADER_BYTES + count * stride,
    )
    noise = np.random.default_rng(seed).integers(1, 256, PAGE, dtype=np.uint8).view(np.uint32)
    pages = np.tile(noise, (stride // PAGE, 1))  # [pages of a slice, words of a page]
    pages[:, 1] = np.arange(stride // PAGE)
    with open(path, "wb") as file:
        file.write(header.pack())
        for slice_number in range(count):
            pages[:, 0] = slice_number
            file.write(pages)
        file.flush()
        os.fsync(file.fileno())
    return path


def marks(address: int, stride: int) -> np.ndarray:
    """The two words at the start of each page of a mapped slice: uint32 [pages, 2]. Reads every page."""
    import ctypes

    words = np.ctypeslib.as_array((ctypes.c_uint32 * (stride // 4)).from_address(address))
    return words.reshape(-1, PAGE // 4)[:, :2].copy()
