from numpy import float32, int8, int32, uint8, uint16
from numpy.typing import NDArray

class Quantized:
    codes: NDArray[int8]
    scales: NDArray[float32]
    corrections: NDArray[int32]
    tokens: int
    columns: int

def quantize(x: NDArray[float32], threads: int = 1) -> Quantized: ...
def matmul_int8(
    x: Quantized,
    tiles: NDArray[uint8],
    scales: NDArray[uint16],
    rows: int,
    threads: int = 1,
    onto: NDArray[float32] | None = None,
    joined: bool = False,
) -> NDArray[float32]: ...
def matmul_bf16(
    x: NDArray[float32],
    tiles: NDArray[uint16],
    rows: int,
    threads: int = 1,
    onto: NDArray[float32] | None = None,
    joined: bool = False,
) -> NDArray[float32]: ...
