"""Unbiased selectors: over many draws the average is what all clients together would give."""

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import RoundReport, RoundRequest, Slate
from fedcohort.core.signals import SKETCH_WIDTH
from fedcohort.selectors.baselines.clustered import Clustered
from fedcohort.selectors.baselines.delta import Delta, _DeltaState
from fedcohort.selectors.baselines.e3cs import E3CS
from fedcohort.selectors.baselines.feel import Feel, _FeelState
from fedcohort.selectors.baselines.gradnorm import GradNorm, _NormState
from fedcohort.selectors.numerics.recent import RecentVectors
from fedcohort.session import Session
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.training.aggregators import InverseProbability, Members

N, SIZE, DRAWS = 20, 5, 3000
OLD = 4.0  # the global model; a wrong total weight shows
EQUAL = np.full(N, 30.0)
UNEQUAL = np.tile([10.0, 20.0, 60.0, 200.0], N // 4)
CLAIMS = {
    "gradnorm": {},
    "feel": {},
    "clustered": {},
    "clustered, by similarity": {"name": "clustered", "by": "similarity"},
    "clustered, mean": {"name": "clustered", "average": "mean"},
    "size-weighted": {},
    "delta": {},
}


def updates(sizes):
    """(N,) what each client adds to the model: skewed, larger for large clients, and by size 1 on average."""
    raw = np.random.default_rng(3).lognormal(0.0, 0.7, N) * sizes
    return raw / (raw @ sizes / sizes.sum())


def state_of(selector, table, norm):
    """Return the state of a selector to which all clients have reported; norms are those of older rounds."""
    older = norm * np.random.default_rng(9).lognormal(0.0, 0.4, N)
    match selector:
        case GradNorm():
            return _NormState(older)
        case Feel():
            return _FeelState(older, np.random.default_rng(7).uniform(1.0, 9.0, N))
        case Delta():
            return _DeltaState(older / older.mean())
        case Clustered():
            kinds = np.eye(4, SKETCH_WIDTH)[np.arange(N) % 4] * 9
            sketches = kinds + np.random.default_rng(5).normal(size=(N, SKETCH_WIDTH))
            return RecentVectors(np.arange(N), np.zeros(N, np.int64), sketches)
    return selector.init(table, np.random.default_rng(0))


EVERYBODY = np.arange(N)


def aggregates(plan, sizes, available=EVERYBODY):
    """(DRAWS,) the global model after one round from OLD, drawn again and again."""
    update, share, table = updates(sizes), sizes / sizes.sum(), ClientTable(sizes=sizes)
    state, rng = state_of(plan.selector, table, update), np.random.default_rng(11)
    slate = Slate(round=9, size=SIZE, candidates=available, clients=table)
    found = []
    for _ in range(DRAWS):
        cohort, _ = plan.selector.select(state, slate, None, rng)
        who = cohort.clients
        weights = np.ones(len(who)) if cohort.weights is None else cohort.weights
        members = Members(who, share[who], np.ones(len(who)), N, weights)
        found.append(float(plan.aggregator.combine(np.array([OLD]), OLD + update[who][:, None], members).model[0]))
    return np.array(found)


def plan_of(label, **more):
    return Experiment.from_dict({"selectors": {label: CLAIMS[label]}, **more}).plans[0]


@pytest.mark.parametrize(
    ("label", "sizes"),
    [*((label, UNEQUAL) for label in CLAIMS), ("gradnorm", EQUAL), ("feel", EQUAL)],
)
def test_the_average_is_that_of_all_clients(label, sizes):
    found = aggregates(plan_of(label), sizes)
    error = found.std(ddof=1) / np.sqrt(len(found))
    assert abs(found.mean() - (OLD + 1.0)) < 3 * error
    assert error < 0.02  # the bias of fedavg is several times that


@pytest.mark.parametrize("count", [SIZE, 8])
@pytest.mark.parametrize("label", ["gradnorm", "feel", "delta"])
def test_with_some_clients_available_the_average_is_theirs(label, count):
    """A third of the clients moves the model by their mean update, and not by a third of it."""
    some = np.arange(count) * 2
    update = updates(UNEQUAL)[some]
    found = aggregates(plan_of(label), UNEQUAL, some)
    wanted = OLD + update @ UNEQUAL[some] / UNEQUAL[some].sum()
    assert abs(found.mean() - wanted) < 3 * found.std(ddof=1) / np.sqrt(len(found)) + 1e-9


@pytest.mark.parametrize("label", ["gradnorm", "feel", "size-weighted"])
def test_size_mean_is_biased_and_the_configuration_says_so(label):
    """What the note warns of is true: sizes count twice, or large updates too much."""
    experiment = Experiment.from_dict({"selectors": {label: {}}, "aggregator": "fedavg"})
    assert experiment.plans[0].aggregator.name == "fedavg"
    (note,) = experiment.notes
    assert label in note and "'fedavg'" in note and repr(experiment.plans[0].selector.aggregator) in note
    found = aggregates(experiment.plans[0], UNEQUAL)
    assert abs(found.mean() - (OLD + 1.0)) > 4 * found.std(ddof=1) / np.sqrt(len(found))


def test_each_selector_has_a_default_aggregator():
    table = {"selectors": {"uniform": {}, "gradnorm": {}, "active-fl": {}, "bounded": {"of": "gradnorm"}}}
    experiment = Experiment.from_dict(table)
    names = {plan.label: plan.aggregator.name for plan in experiment.plans}
    assert names == {
        "uniform": "fedavg",
        "gradnorm": "inverse-probability",
        "active-fl": "fedavg",
        "bounded": "inverse-probability",
    }
    assert any("gradnorm comes with the aggregator 'inverse-probability'" in note for note in experiment.notes)
    again = Experiment.from_dict(experiment.table)
    assert {plan.label: plan.aggregator for plan in again.plans} == {
        plan.label: plan.aggregator for plan in experiment.plans
    }
    assert again.notes == ()


def test_an_aggregator_of_one_setting_leaves_the_other_settings_alone():
    settings = [{"name": "plain"}, {"name": "adam", "aggregator": {"name": "fedadam"}}]
    experiment = Experiment.from_dict({"selectors": {"gradnorm": {}, "uniform": {}}, "settings": settings})
    for built in (experiment, Experiment.from_dict(experiment.table)):
        names = {(plan.setting_name, plan.label): plan.aggregator.name for plan in built.plans}
        assert names == {
            ("plain", "gradnorm"): "inverse-probability",
            ("plain", "uniform"): "fedavg",
            ("adam", "gradnorm"): "fedadam",
            ("adam", "uniform"): "fedadam",
        }


def test_a_selector_without_probabilities_under_inverse_probability_is_noted():
    experiment = Experiment.from_dict({"selectors": {"uniform": {}}, "aggregator": "inverse-probability"})
    (note,) = experiment.notes
    assert "uniform" in note and "'inverse-probability'" in note


def test_weights_are_clipped_only_on_request():
    members = Members(np.arange(3), np.array([0.1, 0.2, 0.3]), np.ones(3), 9, np.array([1.0, 2.0, 40.0]))
    free, bound = InverseProbability().mix(members), InverseProbability(clip=3.0).mix(members)
    assert free.weights == pytest.approx([0.1, 0.4, 12.0]) and free.old == pytest.approx(-11.5)
    assert bound.weights == pytest.approx([0.1, 0.4, 0.9]) and bound.old == pytest.approx(-0.4)


@pytest.mark.parametrize("fairness", [0.2, 0.5])
def test_e3cs_exact_draws_with_the_probabilities_it_states(fairness):
    """Clients that always finish reach p = 1 and are then in every cohort."""
    session = Session(E3CS(fairness=fairness, rate=5.0, exact=True), ClientTable(n=N), seed=2)
    hits, stated, square = np.zeros(N), np.zeros(N), np.zeros(N)
    certain = 0
    for _ in range(800):
        cohort = session.ask(RoundRequest(size=SIZE))
        assert cohort.size == SIZE
        sure = np.flatnonzero(cohort.score >= 1.0)
        certain += len(sure)
        assert set(sure.tolist()) <= set(cohort.clients.tolist())
        hits[cohort.clients] += 1
        stated += cohort.score
        square += cohort.score * (1 - cohort.score)
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=(cohort.clients >= 6).astype(int)))
    assert certain > 200
    assert (np.abs(hits - stated) <= 4 * np.sqrt(square) + 1e-6).all()
