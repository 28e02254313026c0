"""The files of a Flower run: the model and the strategy's memory after a round, and answers that wait for a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcohort.core.arrays import AnyArray
from fedcohort.core.protocol import Status
from fedcohort.hosts.checkpoint import CheckpointFiles
from fedcohort.hosts.flower.npy import as_numpy, to_array
from fedcohort.hosts.flower.replies import CheckedMessage
from fedcohort.hosts.flower.wrapped_strategy import StrategyState

_FORMAT = "fedcohort-flower-2"  # raise it whenever a released fedcohort could misread a checkpoint
_ANSWER = "fedcohort-flower-answer-1"
_MODEL, _STRATEGY = "model/", "strategy/"  # prefixes of tensors in the common file


class WaitingAnswer(NamedTuple):
    """A valid answer that waits for the next global model.

    Attributes
    ----------
    reply : CheckedMessage
        Its message holds only the model and the metrics.
    size : int or None
        The number of samples that the client had declared.
    times : float
        How often the selector counts it.
    """

    reply: CheckedMessage
    size: int | None
    times: float

    @classmethod
    def of(cls, reply: CheckedMessage, size: int | None, times: float) -> WaitingAnswer:
        """Return an answer with the parts of a reply that are needed later."""
        arrays_key, metrics_key = reply.records
        content = RecordDict({arrays_key: reply.arrays, metrics_key: reply.metrics})
        message = Message(content, dst_node_id=1, message_type="train")
        return cls(reply._replace(message=message, values={}, gradient=None), size, times)


class AnswerFiles(CheckpointFiles):
    """Answers that wait for the next global model, each in a file named by its ticket."""

    @staticmethod
    def name(rounds: int) -> str:
        """Return the file name of a ticket's answer."""
        return f"answer-{rounds:08d}.safetensors"

    def save(self, ticket: int, answer: WaitingAnswer) -> None:
        """Write an answer; it is durable when this returns."""
        reply = answer.reply
        header = {
            "format": _ANSWER,
            "client": reply.name,
            "records": json.dumps(reply.records),
            "widths": json.dumps(reply.widths),
            "model": _types(reply.arrays),
            "metrics": json.dumps(dict(reply.metrics)),
            "size": json.dumps(answer.size),
            "times": json.dumps(answer.times),
            "weight": json.dumps(reply.weight),
        }
        self.write(ticket, _tensors(reply.arrays), header)

    def load(self, ticket: int) -> WaitingAnswer:
        """Return a saved answer."""
        header, tensors = self.read(self.name(ticket), _ANSWER)
        reply = CheckedMessage(
            name=header["client"],
            status=Status.OK,
            arrays=_model(json.loads(header["model"]), tensors),
            metrics=MetricRecord(json.loads(header["metrics"])),
            records=tuple(json.loads(header["records"])),
            widths=tuple(json.loads(header["widths"])),
            weight=json.loads(header["weight"]),
        )
        return WaitingAnswer.of(reply, json.loads(header["size"]), json.loads(header["times"]))

    def keep_only(self, tickets: Iterable[int]) -> None:
        """Delete all other answers."""
        names = {self.name(ticket) for ticket in tickets}
        for file in self.folder.glob("answer-*.safetensors"):
            if file.name not in names:
                file.unlink(missing_ok=True)


def _types(arrays: ArrayRecord) -> str:
    # Keeps the order of the record, which Flower's strategies and torch need; safetensors sorts its tensors.
    return json.dumps({key: array.dtype for key, array in arrays.items()})


def _tensors(arrays: ArrayRecord) -> dict[str, AnyArray]:
    return {f"{_MODEL}{key}": as_numpy(array) for key, array in arrays.items()}


def _model(types: Mapping[str, str], tensors: Mapping[str, AnyArray]) -> ArrayRecord:
    return ArrayRecord({key: to_array(tensors[f"{_MODEL}{key}"], dtype) for key, dtype in types.items()})


class Checkpoints(CheckpointFiles):
    """Checkpoints with Flower's records and the wrapped strategy's memory."""

    def save(self, rounds: int, arrays: ArrayRecord, memory: StrategyState, config: Mapping[str, Any]) -> str:
        """Write the checkpoint after ``rounds`` rounds and return its name; it is durable when this returns.

        ``config`` is what the strategy has written into the train config, such as a schedule.
        """
        plain, state = memory.save()
        tensors = _tensors(arrays)
        tensors.update({f"{_STRATEGY}{key}": np.asarray(array, order="C") for key, array in state.items()})
        header = {
            "format": _FORMAT,
            "model": _types(arrays),
            "strategy": json.dumps(plain),
            "config": json.dumps({k: {"bytes": v.hex()} if isinstance(v, bytes) else v for k, v in config.items()}),
        }
        return self.write(rounds, tensors, header)

    def load(self, name: str, memory: StrategyState | None = None, config: ConfigRecord | None = None) -> ArrayRecord:
        """Return the model of a checkpoint, and restore the strategy's memory and what it wrote into the config."""
        header, tensors = self.read(name, _FORMAT)
        if memory is not None:
            state = {key[len(_STRATEGY) :]: value for key, value in tensors.items() if key.startswith(_STRATEGY)}
            plain: dict[str, Any] = json.loads(header["strategy"])
            memory.restore(plain, state)
        if config is not None:
            written: dict[str, Any] = json.loads(header["config"])
            config.update({k: bytes.fromhex(v["bytes"]) if isinstance(v, dict) else v for k, v in written.items()})
        return _model(json.loads(header["model"]), tensors)
