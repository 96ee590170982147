from collections.abc import Sequence

from numpy import float32, int32, uint64
from numpy.typing import NDArray

from sparseflow.kernels.linear import Quantized
from sparseflow.layout import ExpertLayout

def route(logits: NDArray[float32], top_k: int, threads: int = 1) -> tuple[NDArray[int32], NDArray[float32]]: ...
def route_given(
    logits: NDArray[float32], given: NDArray[int32], ranked: bool = False, threads: int = 1
) -> tuple[NDArray[int32], NDArray[float32]]: ...

class ExpertBatch:
    experts: NDArray[int32]
    out: NDArray[float32]
    def __init__(
        self,
        x: NDArray[float32],
        quantized: Quantized | None,
        top_k: int,
        num_experts: int,
        intermediate: int,
        layout: ExpertLayout,
    ) -> None: ...
    def choose(self, ids: NDArray[int32]) -> None: ...
    def compute(self, which: NDArray[int32], addresses: NDArray[uint64], threads: int = 1) -> None: ...

def compute_together(
    batches: Sequence[tuple[ExpertBatch, NDArray[int32], NDArray[uint64]]], threads: int = 1
) -> None: ...
def combine(
    residual: NDArray[float32],
    out: NDArray[float32],
    weights: NDArray[float32],
    shared: NDArray[float32],
    shared_gate: NDArray[float32],
    threads: int = 1,
) -> None: ...
