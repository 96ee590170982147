from numpy import float32, int8, int32, uint8, uint16
from numpy.typing import NDArray

class Quantized:
    codes: NDArray[int8]
    scales: NDArray[float32]
    corrections: NDArray[int32]
    tokens: int
    columns: int

def quantize(x: NDArray[float32], threads: int = 1) -> Quantized: ...

class Matrix:
    rows: int
    columns: int
    bits: int
    tiles: NDArray[uint8] | NDArray[uint16]
    scales: NDArray[uint16]
    def __init__(
        self, tiles: NDArray[uint8] | NDArray[uint16], scales: NDArray[uint16], rows: int, columns: int
    ) -> None: ...
    def multiply(
        self,
        x: Quantized | NDArray[float32],
        threads: int = 1,
        onto: NDArray[float32] | None = None,
        joined: bool = False,
    ) -> NDArray[float32]: ...
