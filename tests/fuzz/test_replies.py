"""What Flower clients send: whatever it is, the reply is judged by itself and the others are not touched by it."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.core.protocol import Status
from fedcohort.core.signals import SIGNALS, Signal, VectorOf

from .budget import tried, tries
from .odd import damaged

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedcohort.hosts.flower.exchange import GridReply
from fedcohort.hosts.flower.replies import Checker, measures_of, weighted_average, with_common_names
from fedcohort.hosts.wire import RECORD, Description, report

LOT = st.integers(0, 2**31 - 1)
CLASSES = 3
SENT = {"weight": np.ones((2, CLASSES), np.float32), "bias": np.zeros(CLASSES, np.float32), "seen": np.array(3)}
DTYPES = ["f2", "f4", ">f4", "f8", "i1", "i8", "u8", "?", "c8", "U3", "S2", "M8[s]", "O"]
NUMBERS = [0, 1, -1, 5, 2**53, 2**62, 10**18, 0.5, -1e30, 1e30, 1e300, float("nan"), float("inf"), True]
REPORTED = sorted(s for s in SIGNALS if isinstance(s.how, VectorOf) or s.sent_by_clients or s == Signal.DURATION)


def model() -> ArrayRecord:
    return ArrayRecord({key: Array(value) for key, value in SENT.items()})


def odd_array(r: Random) -> Array:
    valid = Array(r.choice(list(SENT.values())))
    match r.randrange(5):
        case 0:
            shape = tuple(r.choice([0, 1, 2, 3, 5]) for _ in range(r.randrange(4)))
            values = np.array([r.choice(NUMBERS[:8]) for _ in range(math.prod(shape))] or 0, "f8")
            with np.errstate(all="ignore"):
                return Array(np.resize(values, shape).astype(r.choice(DTYPES[:8])))
        case 1:
            return Array(valid.dtype, valid.shape, valid.stype, damaged(r, valid.data))
        case 2:
            return Array(
                r.choice(DTYPES), (r.choice([-1, 0, 3, 10**12]),), r.choice(["numpy.ndarray", "torch", ""]), valid.data
            )
        case 3:
            value, dtype = r.choice(
                [(np.nan, "f4"), (np.inf, "f4"), (1e38, "f4"), (np.nan, "f8"), (1e300, "f8"), (0, "f8")]
            )
            return Array(np.full((2, CLASSES), value, dtype))
        case _:
            return Array("float32", (2, CLASSES), "numpy.ndarray", r.randbytes(r.randrange(200)))


def odd_config(r: Random):
    """Return a value that a ConfigRecord can hold."""
    return r.choice([
        r.choice(NUMBERS), "", "x", "\x00", "\u202e" * 3, "a" * 1000, b"", r.randbytes(30), [], [1],
        [r.choice(NUMBERS[:6])] * 3, [1.0, float("nan"), 2.0], ["a", "b"], [b"x"], [True, False], [0.5] * CLASSES,
        [0.5] * 64,
    ])  # fmt: skip


def ours(r: Random) -> ConfigRecord:
    values = {s: 0.5 if s.width is None else np.ones(s.numbers(CLASSES)) for s in REPORTED}
    return ConfigRecord(report("anna", values, seconds=1.0, gradient=np.ones(9)))


def message(r: Random, change: bool) -> Message:
    arrays, metrics, record = model(), MetricRecord({"num-examples": 4, "loss": 0.5}), ours(r)
    content = {"arrays": arrays, "metrics": metrics, RECORD: record}
    if change:
        for _ in range(r.choice([1, 1, 2, 3])):
            match r.randrange(8):
                case 0 | 1:
                    arrays[r.choice([*SENT, "more"])] = odd_array(r)
                case 2:
                    metrics[r.choice(["num-examples", "loss", "more"])] = r.choice(
                        [*NUMBERS[:13], [1.0], [2, 3], [float("nan")]]
                    )
                case 3:
                    del metrics[r.choice(list(metrics))]
                    metrics.setdefault("other", 1)
                case 4 | 5:
                    record[r.choice([*record, "more", "version"])] = odd_config(r)
                case 6:
                    content.pop(r.choice(list(content)), None)
                case _:
                    content[r.choice(["more", RECORD])] = r.choice(
                        [MetricRecord({"x": 1}), model(), ConfigRecord({"y": "z"})]
                    )
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    question = Message(RecordDict(), dst_node_id=7, message_type="train")
    return Message(RecordDict(content), reply_to=question)


@tries("replies")
@given(lot=LOT)
def test_replies(lot):
    r = Random(lot)
    tried("replies")
    required = frozenset(s for s in REPORTED if r.random() < 0.3)
    valid = [GridReply(name, message(r, False), 0.5) for name in ("ben", "cem")]
    spoilt = GridReply("anna", message(r, True), 0.5)
    found = Checker(model(), "num-examples", required).check_all([valid[0], spoilt, valid[1]])
    found = with_common_names(found)
    assert [found[0].status, found[2].status] == [Status.OK, Status.OK]
    assert found[1].status == Status.OK or found[1].reason
    measures = measures_of(model(), found)
    for signal in required:
        column = measures.column(signal)
        assert np.isfinite(column[[0, 2]]).all(), f"{signal} of valid clients"
        assert np.isfinite(column[1]).all() == (found[1].status == Status.OK), f"{signal} of the other"
    mean = weighted_average([reply for reply in found if reply.status == Status.OK])
    assert {key: array.numpy().dtype for key, array in mean.items()} == {k: v.dtype for k, v in SENT.items()}
    assert all(np.isfinite(array.numpy()).all() for array in mean.values())


@tries("descriptions")
@given(lot=LOT)
def test_descriptions(lot):
    """A client's word about itself is read, or refused with ValueError; nothing of it is left unchecked."""
    r = Random(lot)
    tried("descriptions")
    record = Description("anna", 40, (1, 2, 3), b"sealed", frozenset(REPORTED[:2]), {"battery": 5}).to_record()
    for _ in range(r.choice([1, 1, 2, 4])):
        record[r.choice([*record, "attribute:x", "attribute:", "more"])] = odd_config(r)
    try:
        found = Description.from_record(record)
    except ValueError:
        return
    assert Description.from_record(found.to_record()) == found
    assert all(isinstance(signal, Signal) for signal in found.signals)
    assert found.name.isprintable()
