"""INT8 packs against the float64 reference, which reads the packed bytes itself and applies the same rounding rule.

A float32 engine cannot agree with float64 on an activation that lies within float32's own error of a rounding tie; the other
code is as right, and moves the logits by 1e-3 to 1e-1 of their size. `reference.agreement` therefore looks for the few
near-ties that explain a difference, and accepts nothing else. Measured with this reference in float32 in place of an engine,
its sums in two orders, over 3,120 positions of all cases: activations differ by 6e-6 quanta in the median and 1e-4 at the
99th percentile; 86 % of the positions or more of a case, with all before them, agree without a flip, the others with one or
two; the farthest tie that was taken the other way lay 1.8e-4 quanta away; positions agree to 2.4e-6 of the largest logit.
The engine: 8e-5 quanta, 9e-7. So NEAR = 5e-4 quanta and TOLERANCE = 1e-5.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import sparseflow
from outliers import write_outlier_checkpoint
from packed_cases import BY_NAME, DEMO, NAMES, PackedCases, forward
from reference import ops
from reference.agreement import Agreement, agree
from reference.checkpoint import CheckpointTensors
from reference.decoder import Reference
from reference.packed import Int8Matrix, PackedTensors
from sparseflow.pack import pack_checkpoint

TOLERANCE = 1e-5  # of the largest logit
LENGTHS = [1, 1, 1, 1, 2, 2, 3, 4, 6, 12]
FLOAT_GAP = 5e-6  # a router's relative gap below this is float32's to decide; the seeds have none


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> PackedCases:
    return PackedCases(tmp_path_factory.mktemp("packs"))


def sequences(name: str, lengths: list[int], seed: int = 1) -> list[np.ndarray]:
    """Random token sequences of the given lengths."""
    vocab = BY_NAME[name].config["vocab_size"] if name in BY_NAME else 4096
    random = np.random.Generator(np.random.PCG64(seed))
    return [random.integers(0, vocab, length) for length in lengths]


def compare(folder: Path, reference: Reference, tokens: list[np.ndarray], passes: int = 150) -> Iterator[Agreement]:
    """Every sequence in a fresh session, in one chunk or token by token in turn, against the reference."""
    with sparseflow.load(folder, cache="resident", threads=2) as model:
        for i, ids in enumerate(tokens):
            logits = forward(model, ids, [len(ids)] if i % 2 else [1] * len(ids))
            yield agree(reference, ids, logits, TOLERANCE * np.abs(logits).max(), passes)


def agrees(agreement: Agreement) -> bool:
    """Whether every position is within the tolerance."""
    return bool((agreement.error <= TOLERANCE * np.abs(agreement.reference).max()).all())


def check(folder: Path, tokens: list[np.ndarray]) -> None:
    """All positions agree, most of them without a flip, and only a few activations are flipped."""
    agreements = list(compare(folder, Reference(PackedTensors(folder)), tokens))
    assert min(a.gap for a in agreements) > FLOAT_GAP
    for ids, agreement in zip(tokens, agreements, strict=True):
        assert agrees(agreement), (ids, agreement.error)
    positions = sum(map(len, tokens))
    assert sum(int(a.plain.sum()) for a in agreements) >= 0.6 * positions
    assert sum(len(a.flipped) for a in agreements) <= 0.1 * positions


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference(name: str, cases: PackedCases) -> None:
    check(cases.packed(name, "int8", "int8"), sequences(name, LENGTHS))


@pytest.mark.parametrize("experts, dense", [("int8", "bf16"), ("bf16", "int8")])
@pytest.mark.parametrize("name", ["interval4", "wide_experts"])
def test_mixed_packs_equal_the_reference(name: str, experts: str, dense: str, cases: PackedCases) -> None:
    check(cases.packed(name, experts, dense), sequences(name, LENGTHS, seed=2))


@pytest.mark.parametrize("experts, dense", [("int8", "int8"), ("int8", "bf16"), ("bf16", "int8")])
def test_packs_with_channels_evened_out_equal_the_reference(experts: str, dense: str, tmp_path: Path) -> None:
    pack_checkpoint(write_outlier_checkpoint(DEMO, tmp_path / "checkpoint"), tmp_path / "packed", experts=experts, dense=dense)
    check(tmp_path / "packed", sequences("demo", LENGTHS, seed=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_sequences_equal_the_reference(name: str, cases: PackedCases) -> None:
    check(cases.packed(name, "int8", "int8"), sequences(name, 8 * LENGTHS + [40], seed=3))


@pytest.mark.parametrize("name", NAMES)
def test_packed_weights_follow_the_rule(name: str, cases: PackedCases) -> None:
    source = CheckpointTensors.read(cases.checkpoint(name), np.float32)
    quantized = PackedTensors(cases.packed(name, "int8", "int8"))
    large = [tensor for tensor, entry in quantized.entries.items() if entry["kind"] == "int8"]
    pairs = [(quantized.stored(tensor), source.linear(tensor)) for tensor in large]
    for layer in range(source.config["num_hidden_layers"]):
        for expert in range(source.config["num_experts"]):
            pairs += zip(quantized.stored_expert(layer, expert), source.expert(layer, expert), strict=True)
    for stored, linear in pairs:
        assert isinstance(stored, Int8Matrix)
        codes, scales = ops.quantize_weights(linear.weight)
        assert np.array_equal(stored.codes, codes) and np.array_equal(stored.scales, scales)


@pytest.mark.parametrize("name", NAMES)
def test_unquantised_tensors_are_the_checkpoints(name: str, cases: PackedCases) -> None:
    source = CheckpointTensors.read(cases.checkpoint(name), np.float32)
    packed = PackedTensors(cases.packed(name, "bf16", "bf16"), np.float32)
    for tensor, entry in packed.entries.items():
        expected = source.array(tensor) if entry["kind"] == "f32" else source.linear(tensor).weight
        assert np.array_equal(packed.stored(tensor), expected)
    for layer in range(source.config["num_hidden_layers"]):
        for expert in range(source.config["num_experts"]):
            for stored, linear in zip(packed.stored_expert(layer, expert), source.expert(layer, expert), strict=True):
                assert np.array_equal(stored, linear.weight)
    every = np.arange(source.config["vocab_size"])
    assert np.array_equal(packed.embedding(every), source.embedding(every))


def one_code_up(data: bytearray, offset: int) -> None:
    """Add one to the first code that is neither padding nor at the limit."""
    while not 0 < data[offset] - 128 < 127:
        offset += 1
    data[offset] += 1


def code_pair_swapped(data: bytearray, offset: int) -> None:
    """Swap two codes of one row that lie in different groups of four k."""
    while data[offset] == data[offset + 64]:
        offset += 4
    data[offset], data[offset + 64] = data[offset + 64], data[offset]


def corrupted(folder: Path, copy: Path, change: Callable[[bytearray, int], None]) -> PackedTensors:
    """What the reference reads of a pack whose first shared expert was changed."""
    shutil.copytree(folder, copy)
    entry = PackedTensors(folder).entries["layers.0.mlp.shared_expert.down_proj.weight"]
    dense = bytearray((copy / "dense.sfx").read_bytes())
    change(dense, entry["offset"])
    (copy / "dense.sfx").write_bytes(dense)
    return PackedTensors(copy)


@pytest.mark.parametrize("change", [one_code_up, code_pair_swapped])
@pytest.mark.parametrize("name", ["interval4", "mqa_interval2", "demo"])
def test_one_wrong_code_is_found(name: str, change: Callable[[bytearray, int], None], cases: PackedCases, tmp_path: Path) -> None:
    folder = cases.packed(name, "int8", "int8")
    reference = Reference(corrupted(folder, tmp_path / "copy", change))
    assert not all(map(agrees, compare(folder, reference, sequences(name, [1] * 12), passes=10)))


@pytest.mark.parametrize("name", ["interval4", "mqa_interval2", "demo"])
def test_another_activation_group_is_found(name: str, cases: PackedCases) -> None:
    folder = cases.packed(name, "int8", "int8")
    for group in (16, 64, 128):
        reference = Reference(PackedTensors(folder, activation_group=group))
        assert not any(map(agrees, compare(folder, reference, sequences(name, [1]), passes=10)))
