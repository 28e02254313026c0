"""A model's arrays stay the same through a checkpoint, over the wire, and in the checks of a reply."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as arrays_of
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from safetensors.numpy import load_file, save_file

from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import Status
from fedcohort.hosts.flower import cohort_client, failures
from fedcohort.hosts.flower.averaging import with_integers
from fedcohort.hosts.flower.checkpoint import Checkpoints
from fedcohort.hosts.flower.exchange import GridReply
from fedcohort.hosts.flower.replies import Checker, decode, weighted_average
from fedcohort.hosts.flower.wrapped_strategy import StrategyState, WrappedStrategy
from fedcohort.hosts.measures import flat
from fedcohort.journal.codec import pack_many, unpack_many
from fedcohort.simulate.store.checkpoint import Checkpoint

_TYPES = ["?", "i1", "u1", "i2", "<u2", "<i4", "u4", "i8", "u8", "f2", "f4", "f8", ">f4", ">i8", "c8", "c16", "g"]


@st.composite
def arrays(draw: Any, types: Any = _TYPES) -> Any:
    """Zero-dimensional, empty, strided, in either order, of any type that holds numbers."""
    dtype = np.dtype(draw(st.sampled_from(types)))
    shape = draw(arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    values = draw(st.randoms(use_true_random=False))
    numbers = np.array([values.randrange(2) for _ in range(int(np.prod(shape)))]).reshape(shape).astype(dtype)
    match draw(st.integers(0, 3)) if numbers.ndim else 0:
        case 1:
            return np.asfortranarray(numbers)
        case 2:
            return np.repeat(numbers, 2, axis=-1)[..., ::2]
        case 3:
            return numbers[::-1]
        case _:
            return numbers


def bfloat16(values: Any) -> Array:
    """Return numbers as libraries with bfloat16 write them: NumPy has no such type and calls it two bytes."""
    bits = torch.tensor(values, dtype=torch.bfloat16).view(torch.int16).numpy()
    return Array("bfloat16", tuple(bits.shape), "numpy.ndarray", Array(bits.view("V2")).data)


def floats(array: Array) -> Any:
    """Return what a bfloat16 array holds."""
    return torch.from_numpy(array.numpy().view(np.int16).copy()).view(torch.bfloat16).float().numpy()


def same(a: Any, b: Any) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def reply(record: ArrayRecord) -> GridReply:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    question = Message(RecordDict(), dst_node_id=7, message_type="train")
    content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 4})})
    return GridReply("anna", Message(content, reply_to=question), 0.5)


def reopened(record: ArrayRecord, strategy: Any = None, again: Any = None) -> ArrayRecord:
    with tempfile.TemporaryDirectory() as folder:
        store = Checkpoints(folder)
        name = store.save(1, record, StrategyState(WrappedStrategy(strategy or FedAvg())), {})
        return store.load(name, StrategyState(WrappedStrategy(again or FedAvg())))


@settings(max_examples=150, deadline=None)
@given(st.lists(arrays(), min_size=1, max_size=4))
def test_a_model_comes_back_from_a_checkpoint_as_it_was(values: list[Any]) -> None:
    record = ArrayRecord({f"p{i}": Array(value) for i, value in enumerate(values)})
    found = reopened(record)
    assert list(found) == list(record)
    for key, array in record.items():
        same(found[key].numpy(), array.numpy())
        assert (found[key].dtype, found[key].shape, found[key].stype) == (array.dtype, array.shape, array.stype)
    # A model that was sent before a restart gives a valid reply after it, and the other way round.
    for sent, answer in ((record, found), (found, record)):
        (checked,) = Checker(sent, "num-examples", ()).check_all([reply(answer)])
        assert (checked.status, checked.reason) == (Status.OK, "")
        for key, array in checked.arrays.items():
            same(array.numpy(), record[key].numpy())


@settings(max_examples=60, deadline=None)
@given(arrays(), arrays(), st.floats(allow_nan=False))
def test_a_strategys_memory_comes_back_as_it_was(a: Any, b: Any, number: float) -> None:
    """The moments of a model with a 0-d array are NumPy's numbers, not arrays."""
    strategy, again = FedAvg(), FedAvg()
    memory = StrategyState(WrappedStrategy(strategy))
    strategy.moments = {"a": a, "b": np.float64(number)}  # type: ignore[attr-defined]
    strategy.rows = [a, b]  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        name = Checkpoints(folder).save(1, ArrayRecord(), memory, {})
        Checkpoints(folder).load(name, StrategyState(WrappedStrategy(again)))
    same(again.moments["a"], a)  # type: ignore[attr-defined]
    same(again.moments["b"], np.float64(number))  # type: ignore[attr-defined]
    for found, given_ in zip(again.rows, (a, b), strict=True):  # type: ignore[attr-defined]
        same(found, given_)


@settings(max_examples=60, deadline=None)
@given(arrays())
def test_the_journals_and_the_simulators_arrays_come_back_as_they_were(value: Any) -> None:
    same(unpack_many(pack_many({"x": value}))["x"], value)
    same(Checkpoint.from_bytes(Checkpoint(0, {}, {"x": value}).to_bytes()).arrays["x"], value)


@pytest.mark.parametrize("values", [1.5, [], [[1.0, -2.5], [3e38, 0.0]]])
def test_bfloat16_is_a_type_of_numbers(values: Any) -> None:
    record = ArrayRecord({"w": bfloat16(values)})
    found = reopened(record)
    assert found["w"] == record["w"]
    (checked,) = Checker(found, "num-examples", ()).check_all([reply(record)])
    assert checked.status == Status.OK
    np.testing.assert_array_equal(flat(decode(found)), np.ravel(floats(record["w"])))
    (mean,) = weighted_average([checked, checked]).values()
    assert mean == record["w"]


def test_bfloat16_that_is_not_finite_is_found_and_floats_are_rounded() -> None:
    sent = ArrayRecord({"w": bfloat16([1.0, 2.0])})
    for bad in (np.nan, np.inf):
        (checked,) = Checker(sent, "num-examples", ()).check_all([reply(ArrayRecord({"w": bfloat16([bad, 1.0])}))])
        assert (checked.status, checked.reason) == (Status.INVALID, "the array 'w' has NaN or infinite entries")
    # Rounded as torch rounds, ties to even.
    numbers = np.random.default_rng(0).normal(size=200).astype(np.float32)
    numbers[:3] = [1 + 2**-8, 1 + 3 * 2**-8, 3.39e38]
    for given_, kind in ((ArrayRecord([numbers]), bfloat16(numbers)), (ArrayRecord({"0": bfloat16(numbers)}), None)):
        model = ArrayRecord({"0": bfloat16(np.zeros(200)) if kind else Array(np.zeros(200, np.float32))})
        (checked,) = Checker(model, "num-examples", ()).check_all([reply(given_)])
        assert checked.status == Status.OK
        if kind:
            assert checked.arrays["0"] == kind
        else:
            np.testing.assert_array_equal(checked.arrays["0"].numpy(), floats(given_["0"]))
    (checked,) = Checker(sent, "num-examples", ()).check_all([reply(ArrayRecord({"w": Array(np.array([3.4e38, 1]))}))])
    assert checked.status == Status.INVALID


# -- a torch model with batch norm -------------------------------------------------------------------------------------


def norm_model(value: float = 0.0) -> ArrayRecord:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    state = {
        key: tensor + value if tensor.is_floating_point() else tensor for key, tensor in module.state_dict().items()
    }
    return ArrayRecord(state)


def norm_step(message: Any, context: Any) -> RecordDict:
    """Train like a torch app: load the received model, take steps, send the state."""
    number = int(context.node_config["partition-id"])
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    draw = torch.Generator().manual_seed(1000 * int(message.content["config"]["server-round"]) + number)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.randn(8, 3, generator=draw)).square().mean().backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": 10 * (1 + number)})
    return RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})


def norm_fleet(kit: Any, first: int) -> Any:
    fleet = kit.Fleet()
    for number in range(4):
        app = cohort_client(kit.client_app(norm_step), kit.ANSWERS)
        fleet.grid.add(fleet.node(number, app), node_id=first + number)
    return fleet


@pytest.mark.parametrize("make", [FedAvg, FedAdam])
def test_a_model_with_batch_norm_goes_on_after_a_restart(make: Any, kit: Any, tmp_path: Path) -> None:
    def start(journal: str, rounds: int, first: int) -> Any:
        fleet = norm_fleet(kit, first)
        inner = make(fraction_train=0.5, fraction_evaluate=0.0)
        return fleet.strategy("uniform", inner, journal=tmp_path / journal, seed=2).start(
            fleet.grid, norm_model(), rounds
        )

    whole = start("whole", 6, 100)
    for rounds in (1, 2, 4, 6):
        again = start("parts", rounds, 1000 * rounds)
    assert not failures(tmp_path / "parts")
    assert whole.arrays["1.num_batches_tracked"].numpy().dtype == np.int64
    for key, array in whole.arrays.items():
        same(again.arrays[key].numpy(), array.numpy())


@settings(max_examples=60, deadline=None)
@given(arrays(["?", "i1", "u1", "i4", "i8", "u8"]), st.sampled_from([0.0, 0.4, -0.4, 1e30, -1e30]))
def test_counters_keep_their_type_in_an_average(sent: Any, off: float) -> None:
    mean = np.asarray(sent.astype(np.float64) + off)
    found = with_integers(ArrayRecord({"n": Array(mean), "w": Array(mean)}), ArrayRecord({"n": Array(sent)}))
    same(found["w"].numpy(), mean)
    if abs(off) < 1:
        same(found["n"].numpy(), np.asarray(sent, order="K"))
    else:
        limits = [False, True] if sent.dtype.kind == "b" else [np.iinfo(sent.dtype).min, np.iinfo(sent.dtype).max]
        same(found["n"].numpy(), np.full(sent.shape, limits[off > 0], sent.dtype))


def test_a_checkpoint_in_another_format_is_refused(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "c")
    name = store.save(0, norm_model(), StrategyState(WrappedStrategy(FedAvg())), {})
    path = tmp_path / "c" / name
    save_file(load_file(path), path, {"format": "fedcohort-flower-1"})
    with pytest.raises(JournalError, match=r"fedcohort-flower-1.*fedcohort-flower-2") as refused:
        store.load(name)
    assert "new journal" in str(refused.value.hint)
