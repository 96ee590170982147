from numpy import float32
from numpy.typing import NDArray

def rms_norm(
    x: NDArray[float32],
    weight: NDArray[float32],
    eps: float,
    gate: NDArray[float32] | None = None,
    threads: int = 1,
) -> NDArray[float32]: ...
