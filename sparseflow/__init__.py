"""SparseFlow: large Mixture-of-Experts models on a CPU with less memory than the model.

    import sparseflow

    with sparseflow.load("demo", cache="1MiB", threads=2) as model:
        for piece in model.generate("The red fox", max_new_tokens=64):
            print(piece, end="", flush=True)
"""

from importlib.metadata import version

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

__version__ = version("sparseflow")

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
