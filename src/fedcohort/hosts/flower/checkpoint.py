"""The model and the strategy's memory after a round: what a checkpoint of a Flower run holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord

from fedcohort.core.arrays import AnyArray
from fedcohort.hosts.checkpoint import CheckpointFiles
from fedcohort.hosts.flower.npy import as_numpy, to_array
from fedcohort.hosts.flower.wrapped_strategy import StrategyState

_FORMAT = "fedcohort-flower-2"
_OLDER = "fedcohort-flower-1"  # of 0.2: arrays without dimensions got one
_MODEL, _STRATEGY = "model/", "strategy/"


class Checkpoints(CheckpointFiles):
    """Checkpoints with Flower's records and the wrapped strategy's memory."""

    def save(self, rounds: int, arrays: ArrayRecord, memory: StrategyState, config: Mapping[str, Any]) -> str:
        """Write the checkpoint after ``rounds`` rounds and return its name; it is durable when this returns.

        ``config`` is what the strategy has written into the train config, as a schedule does.
        """
        plain, state = memory.save()
        tensors: dict[str, AnyArray] = {f"{_MODEL}{key}": as_numpy(array) for key, array in arrays.items()}
        tensors.update({f"{_STRATEGY}{key}": np.asarray(array, order="C") for key, array in state.items()})
        header = {
            "format": _FORMAT,
            # safetensors sorts its tensors; Flower's strategies and torch go by the order of the record.
            "model": json.dumps({key: array.dtype for key, array in arrays.items()}),
            "strategy": json.dumps(plain),
            "config": json.dumps({k: {"bytes": v.hex()} if isinstance(v, bytes) else v for k, v in config.items()}),
        }
        return self.write(rounds, tensors, header)

    def load(
        self,
        name: str,
        memory: StrategyState | None = None,
        config: ConfigRecord | None = None,
        like: ArrayRecord | None = None,
    ) -> ArrayRecord:
        """Return the model of a checkpoint; put the strategy's memory back, and what it wrote into the config.

        ``like`` is the model the run was started with, which tells arrays of one entry from those without dimensions
        in a checkpoint of version 0.2.
        """
        header, tensors = self.read(name, _FORMAT, _OLDER)
        if memory is not None:
            state = {key[len(_STRATEGY) :]: value for key, value in tensors.items() if key.startswith(_STRATEGY)}
            plain: dict[str, Any] = json.loads(header["strategy"])
            memory.restore(plain, state)
        if config is not None:
            written: dict[str, Any] = json.loads(header.get("config", "{}"))
            config.update({k: bytes.fromhex(v["bytes"]) if isinstance(v, dict) else v for k, v in written.items()})
        model: dict[str, str] | list[str] = json.loads(header["model"])
        if isinstance(model, dict):
            return ArrayRecord({key: to_array(tensors[f"{_MODEL}{key}"], dtype) for key, dtype in model.items()})
        flat = {key for key, array in (like or {}).items() if array.shape == ()}
        found = {key: tensors[f"{_MODEL}{key}"] for key in model}
        return ArrayRecord({key: Array(array.reshape(()) if key in flat else array) for key, array in found.items()})
