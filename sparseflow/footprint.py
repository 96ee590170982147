"""What a packed model takes: bytes on disk, bytes resident, bytes that one token touches. Arithmetic on the manifest alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sparseflow.errors import CapacityError, OptionError
from sparseflow.memory import available_memory, cache_for
from sparseflow.packfile import DENSE_FILE, EMBED_FILE, EXPERTS_FILE, NAME_OF_BITS, Manifest
from sparseflow.sizes import format_bytes, parse_size
from sparseflow.state import state_bytes

AUTO_CONTEXT = 4096
"""Positions of KV cache that cache="auto" leaves room for, at most."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of one packed model, all in bytes.

    Attributes:
        experts_file_bytes, dense_file_bytes, embed_file_bytes: the three weight files.
        dense_bytes: the dense core, which is resident and read in full for every token.
        expert_bytes: one routed expert, the unit of the cache (`stride` of the format).
        num_experts: routed experts of all layers; experts_per_token: how many of them one token asks for.
        kv_bytes_per_token: what each token adds to a session; state_bytes: what a session holds besides.
    """

    experts_file_bytes: int
    dense_file_bytes: int
    embed_file_bytes: int
    dense_bytes: int
    expert_bytes: int
    num_experts: int
    experts_per_token: int
    smallest_cache_slots: int
    kv_bytes_per_token: int
    state_bytes: int
    expert_type: str
    dense_type: str

    @classmethod
    def of(cls, manifest: Manifest) -> Footprint:
        """The footprint of an opened manifest; nothing is read."""
        geometry = manifest.geometry
        size = {name: manifest.raw["files"][name]["bytes"] for name in (EXPERTS_FILE, DENSE_FILE, EMBED_FILE)}
        full_attention = geometry.layer_types.count("full_attention")
        return cls(
            experts_file_bytes=size[EXPERTS_FILE],
            dense_file_bytes=size[DENSE_FILE],
            embed_file_bytes=size[EMBED_FILE],
            dense_bytes=sum(entry.bytes for entry in manifest.tensors.values()),
            expert_bytes=manifest.stride,
            num_experts=geometry.num_hidden_layers * geometry.num_experts,
            experts_per_token=geometry.num_hidden_layers * geometry.num_experts_per_tok,
            smallest_cache_slots=geometry.num_experts_per_tok,
            kv_bytes_per_token=full_attention * 2 * geometry.kv_dim * 4,
            state_bytes=state_bytes(geometry, 0),
            expert_type=NAME_OF_BITS[manifest.expert_bits],
            dense_type=NAME_OF_BITS[manifest.dense_bits],
        )

    @property
    def all_experts_bytes(self) -> int:
        """A cache that holds every routed expert."""
        return self.num_experts * self.expert_bytes

    @property
    def smallest_cache_bytes(self) -> int:
        """The smallest cache that works: the experts of one token in one layer."""
        return self.smallest_cache_slots * self.expert_bytes

    @property
    def experts_bytes_per_token(self) -> int:
        """Expert bytes one token asks for, in memory or not."""
        return self.experts_per_token * self.expert_bytes

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes one token reads from memory: over its bandwidth, this is the fastest decode could be."""
        return self.dense_bytes + self.experts_bytes_per_token

    def slots(self, cache_bytes: int) -> int:
        """Experts that a cache of that size holds."""
        return min(cache_bytes // self.expert_bytes, self.num_experts)

    def cache_slots(self, cache: str | int, context: int) -> int:
        """Experts held with a `cache` argument of `sparseflow.load`: a size, "resident", or "auto" for this machine's memory.

        Raises OptionError when it is none of these, CapacityError when it is below the smallest.
        """
        if cache == "resident":
            return self.num_experts
        if cache == "auto":
            resident = self.run_bytes(0, min(context, AUTO_CONTEXT))
            size = cache_for(available_memory(), resident, self.all_experts_bytes, self.smallest_cache_bytes)
        elif isinstance(cache, str):
            size = parse_size(cache)
        elif isinstance(cache, int) and not isinstance(cache, bool):
            size = cache
        else:
            raise OptionError(f"cache is {cache!r}: give a size such as '4GiB', 'resident' or 'auto'")
        if size < self.smallest_cache_bytes:
            raise CapacityError(
                f"a cache of {format_bytes(size)} is too small: a token uses {self.smallest_cache_slots} experts of a layer at once, "
                f"so the smallest is {self.smallest_cache_bytes} bytes ({format_bytes(self.smallest_cache_bytes)})")
        return self.slots(size)

    def run_bytes(self, cache_bytes: int, context: int) -> int:
        """Memory of a run: dense core, cache, and one session with a full context."""
        cache = min(cache_bytes, self.all_experts_bytes)
        return self.dense_bytes + cache + self.state_bytes + context * self.kv_bytes_per_token

    def to_json(self) -> dict[str, Any]:
        """All of it, by name."""
        derived = ("all_experts_bytes", "smallest_cache_bytes", "experts_bytes_per_token", "bytes_per_token")
        return asdict(self) | {name: getattr(self, name) for name in derived}
