"""The training engine: many models over one shared set of samples, batched, on all cores or on CUDA."""

from fedcohort.simulate.engine.engine import Engine, choose_device, choose_engine
from fedcohort.simulate.engine.plain import train_plain
from fedcohort.simulate.engine.types import ClientData, HeldOut, Jobs, TrainingResult

__all__ = [
    "ClientData",
    "Engine",
    "HeldOut",
    "Jobs",
    "TrainingResult",
    "choose_device",
    "choose_engine",
    "train_plain",
]
