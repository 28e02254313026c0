"""Aggregators against formulas worked out by hand."""

import numpy as np
import pytest

from fedcohort.core.errors import FedcohortError, InputError, ParameterError
from fedcohort.core.params import parameters
from fedcohort.training.aggregators import (
    AGGREGATORS,
    Aggregator,
    FedAvgWithAbsent,
    FedNova,
    FedPdp,
    FedProx,
    Mean,
    Scaffold,
)
from fedcohort.training.aggregators.fednova import _normaliser
from fedcohort.training.aggregators.scaffold import _ControlVariates

from .problems import MODELS, OLD, LinearServer, members


def combined(aggregator, **changes):
    return aggregator.combine(OLD, MODELS, members(**changes)).model


def test_size_mean():
    np.testing.assert_allclose(combined(AGGREGATORS.create("fedavg")), 0.25 * MODELS[0] + 0.75 * MODELS[1])


def test_size_mean_of_empty_clients_is_the_plain_mean():
    np.testing.assert_allclose(combined(AGGREGATORS.create("fedavg"), share=(0.0, 0.0)), MODELS.mean(0))


def test_mean_counts_multiplicities():
    np.testing.assert_allclose(combined(Mean()), MODELS.mean(0))
    np.testing.assert_allclose(combined(Mean(), multiplicity=(3.0, 1.0)), 0.75 * MODELS[0] + 0.25 * MODELS[1])


def test_fedavg_absent_clients_keep_the_old_model():
    np.testing.assert_allclose(combined(FedAvgWithAbsent()), 0.6 * OLD + 0.1 * MODELS[0] + 0.3 * MODELS[1])


def test_fedavg_never_gives_the_old_model_a_negative_weight():
    mix = FedAvgWithAbsent().mix(members(share=(0.5, 0.5), multiplicity=(2.0, 1.0)))
    assert mix.old == 0.0
    np.testing.assert_allclose(mix.weights, [2 / 3, 1 / 3])


def test_fedprox_averages_and_sets_the_proximal_term():
    np.testing.assert_allclose(combined(FedProx(mu=0.3)), MODELS.mean(0))
    np.testing.assert_allclose(combined(FedProx(weighting="size")), 0.25 * MODELS[0] + 0.75 * MODELS[1])
    assert FedProx(mu=0.3).prox == 0.3
    assert Mean().prox == 0.0


def test_fedpdp_paper_and_normalised():
    paper = combined(FedPdp(normalise=False))
    np.testing.assert_allclose(paper, 0.1 * 5 * MODELS[0] + 0.3 * 5 * MODELS[1])
    np.testing.assert_allclose(combined(FedPdp()), paper / (0.5 + 1.5))


def test_fednova_normalises_updates_by_steps():
    # tau_eff = 0.25*4 + 0.75*2 = 2.5; d_k = (w - w_k)/tau_k
    direction = 0.25 * (OLD - MODELS[0]) / 4 + 0.75 * (OLD - MODELS[1]) / 2
    np.testing.assert_allclose(combined(FedNova()), OLD - 2.5 * direction)


def test_fednova_equals_size_mean_with_equal_steps():
    same = combined(FedNova(), steps=(5.0, 5.0))
    np.testing.assert_allclose(same, combined(AGGREGATORS.create("fedavg")))


def test_fednova_momentum_normaliser_by_summing_the_weights():
    rho, tau = 0.9, 7
    by_hand = sum(sum(rho**j for j in range(tau - i)) for i in range(tau))
    np.testing.assert_allclose(_normaliser(np.array([float(tau)]), rho), [by_hand])


def test_fednova_leaves_out_clients_without_steps():
    np.testing.assert_allclose(combined(FedNova(), steps=(0.0, 2.0)), MODELS[1])
    np.testing.assert_allclose(combined(FedNova(), steps=(0.0, 0.0)), OLD)


def test_scaffold_trace_by_hand():
    """Two rounds of Algorithm 1, option II, four clients, written out."""
    n, aggregator = 4, Scaffold()
    memory = aggregator.memory(n, OLD)
    np.testing.assert_array_equal(memory.corrections(np.array([2, 0])), np.zeros((2, 3)))
    rates = np.array([0.2, 0.4])
    memory.absorb(np.array([2, 0]), OLD, MODELS, rates, None)
    c2 = (OLD - MODELS[0]) / 0.2
    c0 = (OLD - MODELS[1]) / 0.4
    c = (c2 + c0) / n
    np.testing.assert_allclose(memory.corrections(np.array([0, 1, 2])), [c - c0, c, c - c2])
    again = MODELS[::-1] + 1.0
    memory.absorb(np.array([2, 3]), OLD, again, rates, None)
    c2_new = c2 - c + (OLD - again[0]) / 0.2
    c3_new = -c + (OLD - again[1]) / 0.4
    c_new = c + ((c2_new - c2) + c3_new) / n
    np.testing.assert_allclose(memory.corrections(np.array([3, 2, 0])), [c_new - c3_new, c_new - c2_new, c_new - c0])
    assert sorted(memory.own.clients) == [0, 2, 3]  # client 1 never took part and costs nothing


def test_scaffold_option_one_takes_gradients():
    assert Scaffold(option=1).needs_gradients
    assert not Scaffold().needs_gradients
    memory = _ControlVariates(4, OLD)
    gradients = np.array([[1.0, 2.0, 3.0]])
    memory.absorb(np.array([1]), OLD, MODELS[:1], np.array([0.2]), gradients)
    np.testing.assert_allclose(memory.corrections(np.array([1])), gradients / 4 - gradients)


def test_scaffold_memory_is_restored_exactly():
    memory = _ControlVariates(5, OLD)
    memory.absorb(np.array([3, 1]), OLD, MODELS, np.array([0.1, 0.1]), None)
    copy = _ControlVariates(5, OLD)
    copy.restore(memory.arrays())
    everyone = np.arange(5)
    np.testing.assert_array_equal(copy.corrections(everyone), memory.corrections(everyone))
    for one in (memory, copy):
        one.absorb(np.array([0, 1]), OLD, MODELS, np.array([0.1, 0.1]), None)
    np.testing.assert_array_equal(copy.corrections(everyone), memory.corrections(everyone))


def test_scaffold_global_rate():
    np.testing.assert_allclose(combined(Scaffold(global_rate=0.5)), OLD + 0.5 * (MODELS.mean(0) - OLD))


@pytest.mark.parametrize("name", AGGREGATORS.names())
def test_torch_tensors_give_the_same_result(name):
    torch = pytest.importorskip("torch")
    aggregator = AGGREGATORS.create(name)
    plain, tensors = aggregator.memory(4, OLD), aggregator.memory(4, torch.tensor(OLD))
    for _ in range(2):
        ours = aggregator.combine(OLD, MODELS, members(), plain, LinearServer())
        theirs = aggregator.combine(
            torch.tensor(OLD), torch.tensor(MODELS), members(), tensors, LinearServer(torch.DoubleTensor)
        )
        np.testing.assert_allclose(theirs.model.numpy(), ours.model, rtol=1e-12)
        np.testing.assert_allclose(theirs.weights, ours.weights, rtol=1e-12)
        if aggregator.corrects:
            plain.absorb(np.array([1, 2]), OLD, MODELS, np.array([0.1, 0.2]), None)
            tensors.absorb(np.array([1, 2]), torch.tensor(OLD), torch.tensor(MODELS), np.array([0.1, 0.2]), None)
    if plain is not None:
        saved = plain.arrays()
        assert saved.keys() == tensors.arrays().keys()
        for key, value in tensors.arrays().items():
            np.testing.assert_allclose(np.asarray(value), saved[key], rtol=1e-9)


@pytest.mark.parametrize("name", AGGREGATORS.names())
def test_a_memory_is_restored_to_the_last_bit(name):
    torch = pytest.importorskip("torch")
    aggregator = AGGREGATORS.create(name)
    old, models = torch.tensor(OLD, dtype=torch.float32), torch.tensor(MODELS, dtype=torch.float32)
    memory = aggregator.memory(4, old)
    assert (memory is None) == (type(aggregator).memory is Aggregator.memory)
    if memory is None:
        return
    server = LinearServer(lambda values: torch.tensor(values, dtype=torch.float32))
    results = []
    for round_ in range(4):
        if round_ == 2:  # the server was restarted: all that is left are NumPy arrays
            saved = {key: np.asarray(value).copy() for key, value in memory.arrays().items()}
            copy = aggregator.memory(4, old)
            copy.restore(saved)
            for key, value in copy.arrays().items():
                assert np.asarray(value).dtype == saved[key].dtype
                np.testing.assert_array_equal(np.asarray(value), saved[key])
        for one in [memory] if round_ < 2 else [memory, copy]:
            result = aggregator.combine(old, models + round_, members(), one, server)
            if aggregator.corrects:
                one.absorb(np.array([1, 2]), old, models + round_, np.array([0.1, 0.2]), None)
            results.append(result.model.numpy())
    np.testing.assert_array_equal(results[2], results[3])
    np.testing.assert_array_equal(results[4], results[5])
    for key, value in memory.arrays().items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(copy.arrays()[key]))


@pytest.mark.parametrize("name", AGGREGATORS.names())
def test_one_client_alone_gives_a_finite_model(name):
    aggregator = AGGREGATORS.create(name)
    alone = members(share=(0.5,), steps=(3.0,), multiplicity=(1.0,))
    result = aggregator.combine(OLD, MODELS[:1], alone, aggregator.memory(4, OLD), LinearServer())
    assert np.isfinite(result.model).all()
    assert result.weights.shape == (1,)


@pytest.mark.parametrize("name", [name for name in AGGREGATORS.names() if not AGGREGATORS.get(name).corrects])
def test_a_missing_memory_is_named(name):
    aggregator = AGGREGATORS.create(name)
    if aggregator.memory(4, OLD) is not None:
        with pytest.raises(InputError, match=f"'{name}'.*memory"):
            aggregator.combine(OLD, MODELS, members(), None, LinearServer())


@pytest.mark.parametrize("name", [name for name in AGGREGATORS.names() if AGGREGATORS.get(name).needs_server])
@pytest.mark.parametrize("server", [None, "empty"])
def test_a_server_without_samples_is_named(name, server):
    aggregator = AGGREGATORS.create(name)
    if server == "empty":
        server = LinearServer(inputs=np.zeros((0, 1)))
    with pytest.raises(InputError, match=f"'{name}'.*server") as raised:
        aggregator.combine(OLD, MODELS, members(), aggregator.memory(4, OLD), server)
    assert "server_validation" in raised.value.hint


@pytest.mark.parametrize("name", AGGREGATORS.names())
def test_bad_parameters_are_refused(name):
    for info in parameters(AGGREGATORS.get(name)):
        for bad in info.constraint.bad_values():
            with pytest.raises(ParameterError, match=info.name):
                AGGREGATORS.create(name, **{info.name: bad})


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(FedcohortError, match="'scaffold'"):
        AGGREGATORS.create("scafold")
    with pytest.raises(FedcohortError, match="'mu'"):
        AGGREGATORS.create("fedprox", m=1.0)
