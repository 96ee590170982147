from numpy import bool_, float64, int16, int32
from numpy.typing import NDArray

SAMPLE_SECONDS: float
LAYER_VALUES: tuple[str, ...]

class RouteRecord:
    tokens: int
    forwards: int
    capacity: int
    expert_ids: NDArray[int16]
    hit: NDArray[bool_]
    of_layers: NDArray[float64]
    def __init__(self, layers: int, tokens: int, top_k: int, capacity: int) -> None: ...
    def begin(self, now: float, disk_bytes: int | None) -> None: ...
    def add_layer(
        self,
        layer: int,
        expert_ids: NDArray[int32],
        hit: NDArray[bool_],
        wait_seconds: float,
        bytes_asked: int,
        asked_at: float,
        arrived_at: float,
        now: float,
    ) -> None: ...
    def end(self) -> None: ...
    def clear(self) -> None: ...
