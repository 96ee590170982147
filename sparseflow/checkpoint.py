"""A Hugging Face checkpoint as canonical names over byte ranges: prefixes, fused or split experts, what is left out, and why.

Opening reads the configuration and the shards' headers only, and checks that every tensor the model needs is there, with the
right shape and a dtype we can round; so all but NaN and infinite weights is found before anything is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from sparseflow.config import Geometry
from sparseflow.errors import CheckpointError
from sparseflow.shards import DTYPES, Rows, Shard, ShardReader, SourceTensor, read_header, read_json, whole

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
EMBEDDING = "embed_tokens.weight"
LEFT_OUT = {"visual.": "vision", "mtp.": "mtp"}

_PREFIXES = ("model.language_model.", "model.")

# expert -> (gate [I, H], up [I, H], down [H, I])
ExpertRows = Callable[[int], tuple[Rows, Rows, Rows]]
# (canonical name, shape) -> the tensor, once
Take = Callable[[str, tuple[int, ...]], SourceTensor]


class Checkpoint:
    """An opened checkpoint folder, validated against its configuration.

    Attributes: folder, config (decoded config.json), geometry, shards (name -> Shard), dense (canonical name -> SourceTensor,
    without the embedding), embedding (SourceTensor), left_out ("vision" | "mtp" -> list of SourceTensor).

    Raises CheckpointError on opening for anything that would stop the packing later, except NaN and infinite weights.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        _require_checkpoint_folder(self.folder)
        self.config: dict[str, Any] = read_json(self.folder / "config.json")
        self.geometry = Geometry.from_config(self.config, str(self.folder / "config.json"))
        index = _read_index(self.folder)
        self.shards: dict[str, Shard] = {}
        for shard in sorted(set(index.values()) or {SINGLE_FILE}):
            self.shards[shard] = read_header(self.folder, shard)
        for name, shard in index.items():
            if name not in self.shards[shard].tensors:
                raise CheckpointError(f"{self.folder / shard}: tensor {name} is missing, {INDEX_FILE} places it in this shard")
        self.left_out: dict[str, list[SourceTensor]] = {kind: [] for kind in LEFT_OUT.values()}
        self.dense: dict[str, SourceTensor] = {}
        self._experts: list[ExpertRows] = []
        self._place(self._by_canonical_name())
        self._reader = ShardReader(self.folder)

    def expert(self, layer: int, expert: int) -> tuple[Rows, Rows, Rows]:
        """(gate [I, H], up [I, H], down [H, I]) of one routed expert."""
        return self._experts[layer](expert)

    def expert_tensors(self) -> list[SourceTensor]:
        """All tensors that hold routed experts."""
        tensors: dict[SourceTensor, None] = {}
        for layer in self._experts:
            for expert in range(self.geometry.num_experts):
                tensors |= dict.fromkeys(rows.tensor for rows in layer(expert))
        return list(tensors)

    def read(self, rows: Rows) -> NDArray[Any]:
        """The rows as stored: uint16 bits for BF16, float16 or float32 otherwise. Raises as `ShardReader.read`."""
        return self._reader.read(rows)

    def close(self) -> None:
        """Close the shards that were read."""
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _by_canonical_name(self) -> dict[str, SourceTensor]:
        """Canonical name -> tensor, over all shards; those that are left out go to `left_out`."""
        found: dict[str, SourceTensor] = {}
        for shard in self.shards.values():
            for tensor in shard.tensors.values():
                name = canonical(tensor.name)
                kind = LEFT_OUT.get(name[: name.find(".") + 1])
                if kind is not None:
                    self.left_out[kind].append(tensor)
                elif name in found:
                    raise CheckpointError(
                        f"{self.folder / tensor.shard}: tensor {tensor.name} is there twice, "
                        f"also as {found[name].name} in {found[name].shard}: one of them must go"
                    )
                else:
                    found[name] = tensor
        return found

    def _place(self, rest: dict[str, SourceTensor]) -> None:
        """Give every tensor its place in the model. Raises for one that is missing, has a wrong shape or dtype, or no place."""
        g = self.geometry

        def take(name: str, shape: tuple[int, ...]) -> SourceTensor:
            tensor = rest.pop(name, None)
            if tensor is None:
                raise CheckpointError(f"{self.folder}: tensor {name} is missing, the checkpoint is incomplete")
            where = f"{self.folder / tensor.shard}: tensor {tensor.name}"
            if tensor.shape != shape:
                raise CheckpointError(f"{where}: shape is {list(tensor.shape)}, the configuration gives {list(shape)}")
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{where}: dtype {tensor.dtype} is not supported, only {', '.join(DTYPES)}")
            return tensor

        self.embedding = take(EMBEDDING, (g.vocab_size, g.hidden_size))
        for name, shape in g.dense_shapes().items():
            # A head that is stored although it is tied counts, as it does for transformers.
            tied = name == "lm_head.weight" and g.tie_word_embeddings and name not in rest
            self.dense[name] = self.embedding if tied else take(name, shape)
        self._experts = [self._place_experts(layer, rest, take) for layer in range(g.num_hidden_layers)]
        if rest:
            tensor = min(rest.values(), key=lambda tensor: tensor.name)
            raise CheckpointError(
                f"{self.folder / tensor.shard}: tensor {tensor.name} {list(tensor.shape)} has no place in this model "
                f"({len(rest)} such): the configuration and the weights do not belong together"
            )

    def _place_experts(self, layer: int, rest: dict[str, SourceTensor], take: Take) -> ExpertRows:
        """A function from expert to its three matrices, over the fused or the split form of this layer."""
        experts, inner, hidden = self.geometry.num_experts, self.geometry.moe_intermediate_size, self.geometry.hidden_size
        at = f"layers.{layer}.mlp.experts."
        if at + "gate_up_proj" in rest or at + "down_proj" in rest:
            gate_up = take(at + "gate_up_proj", (experts, 2 * inner, hidden))
            down = take(at + "down_proj", (experts, hidden, inner))

            def fused(expert: int) -> tuple[Rows, Rows, Rows]:
                first = 2 * inner * expert
                return (
                    Rows(gate_up, first, first + inner),
                    Rows(gate_up, first + inner, first + 2 * inner),
                    Rows(down, hidden * expert, hidden * (expert + 1)),
                )

            return fused
        matrices = [
            (
                whole(take(f"{at}{expert}.gate_proj.weight", (inner, hidden))),
                whole(take(f"{at}{expert}.up_proj.weight", (inner, hidden))),
                whole(take(f"{at}{expert}.down_proj.weight", (hidden, inner))),
            )
            for expert in range(experts)
        ]
        return matrices.__getitem__


def family(name: str) -> str:
    """A stored name without its prefix, with stars for layer and expert numbers: for reports."""
    return re.sub(r"\.\d+\.", ".*.", canonical(name))


def canonical(name: str) -> str:
    """A stored name without its prefix."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _require_checkpoint_folder(folder: Path) -> None:
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder, give the path of a downloaded checkpoint")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file, give the folder that holds config.json and the safetensors files")
    if (folder / "experts.sfx").exists() or (folder / "manifest.json").exists():
        raise CheckpointError(f"{folder}: is a packed model already, give the checkpoint it was made from")


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard, from the index; empty for a checkpoint of a single file."""
    if (folder / SINGLE_FILE).exists():
        return {}
    if not (folder / INDEX_FILE).exists():
        raise CheckpointError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}, only safetensors checkpoints can be packed")
    index = read_json(folder / INDEX_FILE)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(shard, str) for shard in names.values()):
        raise CheckpointError(f"{folder / INDEX_FILE}: holds no weight_map of tensor names to shards")
    for shard in sorted(set(names.values())):
        if not os.path.isfile(folder / shard):  # which takes any name
            raise CheckpointError(f"{folder / shard}: shard is missing, {INDEX_FILE} names it: download it again")
    return names
