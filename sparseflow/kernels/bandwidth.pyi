from numpy import uint8
from numpy.typing import NDArray

def read_once(buffer: NDArray[uint8], threads: int = 1) -> tuple[float, int]: ...
