from numpy import float32
from numpy.typing import NDArray

def causal_conv(
    x: NDArray[float32], weight: NDArray[float32], state: NDArray[float32], threads: int = 1
) -> NDArray[float32]: ...
def gated_delta(
    qkv: NDArray[float32],
    a: NDArray[float32],
    b: NDArray[float32],
    decay_rate: NDArray[float32],
    dt_bias: NDArray[float32],
    state: NDArray[float32],
    key_heads: int,
    value_dim: int,
    threads: int = 1,
) -> NDArray[float32]: ...
