"""What a packed model takes: bytes on disk, bytes resident, bytes that one token touches. Arithmetic on the manifest alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sparseflow.activations import activation_bytes_per_token, recorded_bytes
from sparseflow.errors import CapacityError, OptionError
from sparseflow.kernels.attention import PAGE_POSITIONS
from sparseflow.memory import LEAST_CACHE, recommended_cache, spare_memory, tightest_limit
from sparseflow.packfile import DENSE_FILE, EMBED_FILE, EXPERTS_FILE, NAME_OF_BITS, Manifest
from sparseflow.sizes import format_bytes, parse_size
from sparseflow.state import state_bytes
from sparseflow.tokenizer import TOKENIZER_FILE

PREFILL_CHUNK = 512
"""Tokens of a prompt that are fed at once, unless asked otherwise."""

PLANNED_CONTEXT = 4096
"""Tokens of a session to plan memory for when no context is asked for: its keys and values grow only as they are used."""

# Measured as the growth of a run beyond all that can be counted: mostly pages of libraries that nothing touched before.
_CODE_BYTES = 6 << 20
_VOCABULARY_ENTRY_BYTES = 850


def planned_context(context: int | None, limit: int) -> int:
    """Tokens to plan memory for: those asked for, or PLANNED_CONTEXT as far as the model's limit allows."""
    return min(limit, PLANNED_CONTEXT) if context is None else context


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One part of what a run holds: its bytes, and the sum they come from, for people."""

    name: str
    bytes: int
    arithmetic: str


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of one packed model, all in bytes.

    Attributes:
        experts_file_bytes, dense_file_bytes, embed_file_bytes: the three weight files.
        dense_bytes: the dense core, which is resident and read in full for every token.
        expert_bytes: one routed expert, the unit of the cache (`stride` of the format).
        num_experts: routed experts of all layers; experts_per_token: how many of them one token asks for.
        kv_bytes_per_token: what each token adds to a session; state_bytes: what a session holds besides, arrays of one
            token's forward included.
        activation_bytes_per_token: arrays of a forward, for each token of it; logits_bytes: one row of logits.
        tokenizer_bytes: the vocabulary and its merges once text is used, 0 without a tokenizer. Measured with tokenizers 0.23 on
            248,000 entries: 837 bytes each at the peak of loading.
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
    activation_bytes_per_token: int
    logits_bytes: int
    tokenizer_bytes: int
    expert_type: str
    dense_type: str

    @classmethod
    def of(cls, manifest: Manifest) -> Footprint:
        """The footprint of an opened manifest; no weights are read."""
        geometry = manifest.geometry
        size = {name: manifest.raw["files"][name]["bytes"] for name in (EXPERTS_FILE, DENSE_FILE, EMBED_FILE)}
        full_attention = geometry.layer_types.count("full_attention")
        has_tokenizer = (manifest.folder / TOKENIZER_FILE).is_file()
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
            state_bytes=state_bytes(geometry, 0) + recorded_bytes(geometry, manifest.expert_bits, manifest.dense_bits),
            activation_bytes_per_token=activation_bytes_per_token(geometry, manifest.expert_bits, manifest.dense_bits),
            logits_bytes=geometry.vocab_size * 4,
            tokenizer_bytes=geometry.vocab_size * _VOCABULARY_ENTRY_BYTES if has_tokenizer else 0,
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

    def memory_items(self, slots: int, context: int, prefill_chunk: int = PREFILL_CHUNK) -> tuple[MemoryItem, ...]:
        """What a run takes at its peak beyond what its process holds before: `slots` experts, one session with a full context.

        Their sum is the predicted growth of the resident set. Experts are counted as memory that cannot give way.
        """
        pages = -(-context // PAGE_POSITIONS)
        chunk = min(prefill_chunk, context)
        size = format_bytes
        items = [
            MemoryItem("dense core", self.dense_bytes, f"all {self.dense_type} matrices and small tensors of {DENSE_FILE}"),
            MemoryItem("cache", slots * self.expert_bytes, f"{slots} experts x {size(self.expert_bytes)}"),
            MemoryItem(
                "KV cache", pages * PAGE_POSITIONS * self.kv_bytes_per_token,
                f"{context} tokens in {pages} pages of {PAGE_POSITIONS} x {size(self.kv_bytes_per_token)} a token"),
            MemoryItem("recurrent state", self.state_bytes, "and what decode works on: one session; chat holds up to three"),
            MemoryItem(
                "activations", chunk * self.activation_bytes_per_token + self.logits_bytes,
                f"{chunk} tokens at once x {size(self.activation_bytes_per_token)}, logits of one token {size(self.logits_bytes)}"),
            MemoryItem("tokenizer", self.tokenizer_bytes, f"{self.logits_bytes // 4} entries x {_VOCABULARY_ENTRY_BYTES} bytes"),
            MemoryItem("code", _CODE_BYTES, "program pages that a first forward touches, and small tables"),
        ]
        return tuple(item for item in items if item.bytes)

    def memory_bytes(self, slots: int, context: int, prefill_chunk: int = PREFILL_CHUNK) -> int:
        """The sum of `memory_items`."""
        return sum(item.bytes for item in self.memory_items(slots, context, prefill_chunk))

    @property
    def mapped_bytes(self) -> int:
        """Bytes of files that a run maps, whether it reads them or not: the experts' file is mapped whole."""
        return self.experts_file_bytes

    def recommended_slots(self, context: int, prefill_chunk: int = PREFILL_CHUNK) -> int:
        """Experts to hold in this machine's memory now. Raises CapacityError when there is too little of it, or it is unknown."""
        limit = tightest_limit(self.mapped_bytes)
        if limit is None:
            raise CapacityError("the system does not tell how much memory is available: give --cache SIZE")
        available = limit.room(self.mapped_bytes)
        rest = self.memory_bytes(0, context, prefill_chunk)
        cache = recommended_cache(available, rest, self.all_experts_bytes)
        if cache is None:
            least = min(LEAST_CACHE, self.all_experts_bytes)
            raise CapacityError(
                f"no cache can be recommended: all but the cache needs {format_bytes(rest)}, a useful cache {format_bytes(least)}, and "
                f"{format_bytes(spare_memory(available))} should stay free, but {limit.name} leaves {format_bytes(available)}: close "
                "other programs, use a smaller --context, or give --cache SIZE")
        return self.slots(cache)

    def cache_slots(self, cache: str | int, context: int, prefill_chunk: int = PREFILL_CHUNK) -> int:
        """Experts held with a `cache` argument of `sparseflow.load`: a size, "resident", or "auto" for what is recommended.

        Raises OptionError when it is none of these, CapacityError when it is below the smallest, or as `recommended_slots`.
        """
        if cache == "resident":
            return self.num_experts
        if cache == "auto":
            return self.recommended_slots(context, prefill_chunk)
        if isinstance(cache, str):
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

    def to_json(self) -> dict[str, Any]:
        """All of it, by name."""
        derived = ("all_experts_bytes", "smallest_cache_bytes", "experts_bytes_per_token", "bytes_per_token")
        return asdict(self) | {name: getattr(self, name) for name in derived}
