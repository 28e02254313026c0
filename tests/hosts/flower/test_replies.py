"""Replies are judged by their content, whatever their headers claim."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedcohort.core.protocol import Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flower.exchange import GridReply
from fedcohort.hosts.flower.npy import Layout, as_numpy
from fedcohort.hosts.flower.replies import CheckedMessage, Checker, measures_of, with_common_names
from fedcohort.hosts.wire import RECORD

SENT = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "seen": np.array(3)}


def record(**arrays: Any) -> ArrayRecord:
    found = {key: value if isinstance(value, Array) else Array(value) for key, value in {**SENT, **arrays}.items()}
    return ArrayRecord(found)


def reply(arrays: ArrayRecord, metrics: dict[str, Any] | None = None, **extra: Any) -> GridReply:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    question = Message(RecordDict(), dst_node_id=7, message_type="train")
    content = {"arrays": arrays, "metrics": MetricRecord(metrics or {"num-examples": 4}), **extra}
    return GridReply("anna", Message(RecordDict(content), reply_to=question), 0.5)


def checked(*replies: GridReply, **settings: Any) -> list[CheckedMessage]:
    return Checker(record(), "num-examples", settings.pop("required", ()), **settings).check_all(replies)


def told(dtype: str, shape: tuple[int, ...], array: Any) -> Array:
    """An array with a false description."""
    return Array(dtype, shape, "numpy.ndarray", Array(array).data)


def test_a_valid_reply_is_ok() -> None:
    ours = ConfigRecord({"version": 1, "name": "anna", "loss": 1.5, "duration": float("nan")})
    (found,) = checked(reply(record(weight=SENT["weight"] + 1), **{RECORD: ours}))
    assert (found.status, found.reason) == (Status.OK, "")
    assert found.values == {Signal.LOSS: 1.5, Signal.DURATION: 0.5}
    assert found.message is not None and list(found.message.content) == ["arrays", "metrics"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_one_entry_that_is_not_finite_is_found(bad: float, dtype: Any, order: Any) -> None:
    weight = np.ones((2, 3), dtype, order=order)
    weight[1, 2] = bad
    (found,) = checked(reply(record(weight=weight)))
    assert (found.status, found.reason) == (Status.INVALID, "the array 'weight' has NaN or infinite entries")


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.ones((3, 2), np.float32), r"has the shape \(3, 2\) instead of \(2, 3\)"),
        (np.ones(6, np.float32), r"has the shape \(6,\) instead of \(2, 3\)"),
        (told("float32", (2, 3), np.ones((3, 3), np.float32)), r"has the shape \(3, 3\) instead of \(2, 3\)"),
        (told("int32", (2, 3), np.full((2, 3), np.nan, np.float32)), "NaN or infinite"),
        (told("float32", (2, 3), np.full((2, 3), np.nan)), "NaN or infinite"),
        (Array("float32", (2, 3), "numpy.ndarray", b"torn"), "cannot be read"),
        (Array("float32", (2, 3), "numpy.ndarray", Array(SENT["weight"]).data[:-1]), "cannot be read"),
        (Array("float32", (2, 3), "zip", Array(SENT["weight"]).data), "cannot be read"),
    ],
)
def test_an_array_is_what_its_bytes_are(array: Any, reason: str) -> None:
    (found,) = checked(reply(record(weight=array)))
    assert found.status == Status.INVALID
    assert re.search(reason, found.reason)


def test_huge_but_finite_numbers_are_valid_and_nobody_is_warned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checked(
            reply(record(weight=np.full((2, 3), 3e38, np.float32))), reply(record(weight=np.full((2, 3), np.nan)))
        )
    assert [f.status for f in found] == [Status.OK, Status.INVALID]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"more": record()}, "exactly one ArrayRecord, not 2"),
        ({"more": MetricRecord({"x": 1})}, "exactly one MetricRecord, not 2"),
    ],
)
def test_records_are_counted(content: dict[str, Any], reason: str) -> None:
    (found,) = checked(reply(record(), **content))
    assert found.status == Status.INVALID and reason in found.reason


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), [1, 2]])
def test_a_weight_is_a_number_of_at_least_0(weight: Any) -> None:
    (found,) = checked(reply(record(), {"num-examples": weight}))
    assert found.status == Status.INVALID and "'num-examples' must be a number" in found.reason
    (found,) = checked(reply(record(), {"examples": 4}))
    assert found.status == Status.INVALID and "not None" in found.reason


def test_names_and_required_signals() -> None:
    (found,) = checked(reply(record(bias=np.ones(1))))
    assert found.status == Status.INVALID and "other names than the ones sent: 'bias'" in found.reason
    (found,) = checked(reply(record(bias=np.ones(1))), same_shapes=False)
    assert found.status == Status.OK
    (found,) = checked(reply(record()), required={Signal.LOSS})
    assert found.status == Status.INVALID and "no finite 'loss'" in found.reason


def test_only_replies_with_vectors_of_the_usual_size_are_averaged_together() -> None:
    def with_gradient(entries: int) -> GridReply:
        ours = ConfigRecord({"version": 1, "name": "anna", "gradient": np.zeros(entries, np.float32).tobytes()})
        return reply(record(), **{RECORD: ours})

    def judged(*sizes: int) -> list[CheckedMessage]:
        return with_common_names(checked(*map(with_gradient, sizes), required={Signal.GRADIENT_NORM}))

    assert [f.status for f in judged(5, 5)] == [Status.OK, Status.OK]
    assert [f.status for f in judged(5, 6)] == [Status.INVALID, Status.OK]  # as large as the model
    found = judged(6, 5, 5)
    assert [f.status for f in found] == [Status.INVALID, Status.OK, Status.OK]
    measures = measures_of(record(), found)
    assert (measures.ok.tolist(), measures.all_ok, measures.rows.tolist()) == ([False, True, True], False, [1, 2])
    np.testing.assert_array_equal(measures.column(Signal.DURATION), [np.nan, 0.5, 0.5])


@pytest.mark.parametrize(
    "value",
    [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(2.5), np.empty((0, 4))],
)
def test_views_equal_what_numpy_reads(value: Any) -> None:
    array = Array(value)
    np.testing.assert_array_equal(as_numpy(array), array.numpy())
    assert as_numpy(array).dtype == value.dtype and as_numpy(array).flags.c_contiguous
    layout = Layout.of(array)
    assert layout.entries(array) is not None
    assert layout.entries(Array(np.zeros(5, np.int8))) is None
    with pytest.raises(ValueError, match="npy"):
        Layout.of(Array("float32", (1,), "numpy.ndarray", b"torn"))


@pytest.mark.parametrize("shape", ["(02, 3)", "(2,3)", "(2, 3,)"])
def test_what_is_spelled_otherwise_is_written_anew(shape: str) -> None:
    """After the checks, no code needs to read headers that NumPy may not understand."""
    data = Array(SENT["weight"]).data
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + shape.encode() + b", }"
    header = header.ljust(117) + b"\n"
    odd = Array("float32", (2, 3), "numpy.ndarray", data[:8] + len(header).to_bytes(2, "little") + header + data[-24:])
    (found,) = checked(reply(record(weight=odd)))
    if found.status == Status.OK:
        assert np.array_equal(found.arrays["weight"].numpy(), SENT["weight"])
