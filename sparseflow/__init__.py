"""SparseFlow: large Mixture-of-Experts models on a CPU with less memory than the model.

    import sparseflow

    with sparseflow.load("demo", cache="1MiB", threads=2) as model:
        for piece in model.generate("The red fox", max_new_tokens=64):
            print(piece, end="", flush=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparseflow.conversation import Conversation
    from sparseflow.errors import (
        CapacityError,
        CheckpointError,
        NonFiniteError,
        OptionError,
        PackedModelError,
        SparseFlowError,
        StorageError,
    )
    from sparseflow.generate import Generation
    from sparseflow.model import Model, load
    from sparseflow.pack import pack_checkpoint
    from sparseflow.replay import RouteReplay
    from sparseflow.sampling import SamplingOptions
    from sparseflow.session import Session
    from sparseflow.trace import RouteTrace
    from sparseflow.verify import Verification, verify_model

    __version__: str
else:

    def __getattr__(name: str) -> Any:
        """A module is loaded when a name of its is first used, so that the commands have begun before anything slow is imported."""
        if name == "__version__":
            value = import_module("importlib.metadata").version("sparseflow")
        elif name in __all__:
            value = getattr(import_module(f"sparseflow.{_HOMES.get(name, 'errors')}"), name)
        else:
            raise AttributeError(f"module 'sparseflow' has no attribute {name!r}")
        globals()[name] = value
        return value


__all__ = [
    "CapacityError",
    "CheckpointError",
    "Conversation",
    "Generation",
    "Model",
    "NonFiniteError",
    "OptionError",
    "PackedModelError",
    "RouteReplay",
    "RouteTrace",
    "SamplingOptions",
    "Session",
    "SparseFlowError",
    "StorageError",
    "Verification",
    "load",
    "pack_checkpoint",
    "verify_model",
]

_HOMES = {
    "Conversation": "conversation", "Generation": "generate", "Model": "model", "load": "model", "pack_checkpoint": "pack",
    "RouteReplay": "replay", "SamplingOptions": "sampling", "Session": "session", "RouteTrace": "trace", "Verification": "verify",
    "verify_model": "verify",
}  # fmt: skip
