from numpy import float64, int32, void
from numpy.typing import NDArray

SAMPLE_SECONDS: float
LAYER_VALUES: tuple[str, ...]
FORWARD_VALUES: tuple[str, ...]
FORWARDS_AT_ONCE: int

class RouteRecord:
    tokens: int
    forwards: int
    capacity: int
    rows: NDArray[void]
    of_forwards: NDArray[float64]
    sample_seconds: float
    def __init__(self, layers: int, num_experts: int, top_k: int, tokens: int, capacity: int, all_resident: bool) -> None: ...
    def begin(self, disk_bytes: int | None) -> None: ...
    def share_out(self, layer: int, expert_ids: NDArray[int32], /) -> None: ...
    def end(self, disk_bytes: int | None, /) -> None: ...

class RouteRecorder:
    records: list[RouteRecord]
    def __init__(self, num_layers: int, num_experts: int, top_k: int, all_resident: bool) -> None: ...
    def begin_forward(self, tokens: int, disk_bytes: int | None, /) -> RouteRecord: ...
    def forget(self) -> None: ...
