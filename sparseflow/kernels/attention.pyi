from numpy import float32, int64, uint64
from numpy.typing import NDArray

PAGE_POSITIONS: int

def gated_attention(
    q_gate: NDArray[float32],
    k: NDArray[float32],
    v: NDArray[float32],
    q_weight: NDArray[float32],
    k_weight: NDArray[float32],
    cosine: NDArray[float32],
    sine: NDArray[float32],
    key_pages: NDArray[uint64],
    value_pages: NDArray[uint64],
    position: NDArray[int64],
    eps: float,
    threads: int = 1,
) -> NDArray[float32]: ...
