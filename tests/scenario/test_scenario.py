import json
import subprocess
import sys

import numpy as np
import pytest

from fedcohort.core.errors import ParameterError, ScenarioError, UnknownNameError
from fedcohort.core.protocol import Status
from fedcohort.hosts.round import closing
from fedcohort.scenario import PRESETS, Scenario, preset
from fedcohort.scenario.availability import UniformShare
from fedcohort.scenario.classwise import Iid, Shards
from fedcohort.scenario.dirichlet import ClassHeterogeneity, DirichletQp
from fedcohort.scenario.latency import NoLatency, ShiftedExponential
from fedcohort.scenario.noise import LabelNoise

CIFAR = np.repeat(np.arange(10), 5000)


# --- validation


def test_server_validation_is_balanced_and_belongs_to_no_client():
    federation = preset("fedcm-class-0.1").build(CIFAR, 10, 0)
    kept = federation.server_validation
    assert len(np.unique(kept)) == 5000
    assert np.bincount(CIFAR[kept]).tolist() == [500] * 10
    assert not np.isin(federation.indices, kept).any()
    assert len(np.unique(np.concatenate([federation.indices, kept]))) == 50_000


def test_impossible_server_validation():
    labels = np.repeat([0, 1], [10, 3])
    with pytest.raises(ScenarioError, match=r"5 samples of each class.* class 1 .* 3\."):
        Scenario(partition=Iid(clients=2), server_validation=5).build(labels)
    with pytest.raises(ScenarioError, match="training set"):
        Scenario(partition=Iid(clients=2), server_validation=3).build(np.repeat([0, 1], 3))


def test_local_validation_is_a_tenth_and_at_least_one_of_two():
    federation = preset("flash-noniid").build(CIFAR, 10, 0)
    assert (federation.sizes == 500).all() and (federation.validation == 50).all()
    tiny = Scenario(partition=Iid(clients=4), validation=0.1).build(np.zeros(7, int))
    assert sorted(zip(tiny.sizes.tolist(), tiny.validation.tolist(), strict=True)) == [(1, 0), (2, 1), (2, 1), (2, 1)]
    greedy = Scenario(partition=Iid(clients=1), validation=0.99).build(np.zeros(5, int))
    assert greedy.validation.tolist() == [4]  # one sample stays to train on


def test_local_validation_is_a_random_tenth():
    federation = preset("flash-noniid").build(CIFAR, 10, 0)
    counts = federation.label_counts(part="validation")
    dominant = federation.traits["dominant_class"]
    share = counts[dominant >= 0, dominant[dominant >= 0]].mean() / 50
    assert share == pytest.approx(0.8, abs=0.04)


# --- what happens in a round


def test_each_client_takes_its_own_time():
    scenario = Scenario(partition=Iid(clients=50), latency=ShiftedExponential(straggling=10))
    federation = scenario.build(CIFAR, seed=0)
    cohort = np.array([4, 9, 30])
    events = scenario.events(federation, cohort, seed=0, round=2)
    assert (events.status == Status.OK).all() and len(set(events.durations)) == 3
    assert (events.durations >= 1.0).all()  # 1,000 samples, 1 ms each
    assert scenario.events(federation, np.array([], int), seed=0, round=2).durations.shape == (0,)


def test_the_deadline_makes_clients_late_and_ends_the_round():
    scenario = Scenario(partition=Iid(clients=50), latency=ShiftedExponential(straggling=1), deadline=2.0)
    federation = scenario.build(CIFAR, seed=0)
    everybody = np.arange(50)
    events = scenario.events(federation, everybody, seed=0, round=0)
    late = events.durations > 2.0
    closed = closing(events.durations, events.status, deadline=scenario.deadline)
    assert 0 < late.sum() < 50
    assert (closed.status[late] == Status.LATE).all() and (closed.status[~late] == Status.OK).all()
    assert closed.seconds == 2.0


def test_failures_have_their_probability_and_end_early():
    scenario = Scenario(partition=Iid(clients=1000), latency=ShiftedExponential(), failure=0.2)
    federation = scenario.build(CIFAR, seed=0)
    healthy = Scenario(partition=Iid(clients=1000), latency=ShiftedExponential())
    everybody, failed, shares = np.arange(1000), 0, []
    for t in range(20):
        events = scenario.events(federation, everybody, seed=0, round=t)
        full = healthy.events(federation, everybody, seed=0, round=t).durations
        lost = events.status == Status.FAILED
        failed += lost.sum()
        assert np.array_equal(events.durations[~lost], full[~lost])
        shares.append(events.durations[lost] / full[lost])
    assert failed / 20_000 == pytest.approx(0.2, abs=0.01)
    shares = np.concatenate(shares)
    assert shares.mean() == pytest.approx(0.5, abs=0.02) and shares.min() >= 0 and shares.max() < 1


def test_failures_do_not_depend_on_the_cohort():
    scenario = Scenario(partition=Iid(clients=100), failure=0.5, latency=ShiftedExponential())
    federation = scenario.build(CIFAR, seed=0)
    everybody = scenario.events(federation, np.arange(100), seed=3, round=7)
    cohort = np.array([80, 2, 41])
    few = scenario.events(federation, cohort, seed=3, round=7)
    assert np.array_equal(few.status, everybody.status[cohort])
    assert np.array_equal(few.durations, everybody.durations[cohort])


def test_a_client_that_would_fail_after_the_deadline_is_late():
    scenario = Scenario(partition=Iid(clients=200), latency=ShiftedExponential(), failure=0.9, deadline=0.05)
    federation = scenario.build(CIFAR, seed=0)
    events = scenario.events(federation, np.arange(200), seed=0, round=0)
    closed = closing(events.durations, events.status, deadline=scenario.deadline)
    assert set(closed.status[events.durations > 0.05]) == {Status.LATE}
    assert set(closed.status[events.durations <= 0.05]) <= {Status.FAILED}


# --- tables


def test_from_dict_builds_every_part():
    scenario = Scenario.from_dict(
        {
            "partition": {"name": "shards", "clients": 50, "per_client": 1},
            "noise": {"level": 0.2},
            "latency": "shifted-exponential",
            "availability": {"name": "uniform-share", "share": 0.1},
            "failure": 0.05,
            "deadline": 3,
            "validation": 0.1,
            "server_validation": 10,
        }
    )
    assert scenario == Scenario(
        partition=Shards(clients=50, per_client=1),
        noise=LabelNoise(level=0.2),
        latency=ShiftedExponential(),
        availability=UniformShare(share=0.1),
        failure=0.05,
        deadline=3,
        validation=0.1,
        server_validation=10,
    )


def test_preset_with_changes():
    changed = Scenario.from_dict(
        {"preset": "fedcm-class-0.1", "partition": {"clients": 7}, "availability": "uniform-share"}
    )
    assert changed.partition == ClassHeterogeneity(clients=7, alpha=0.1)
    assert changed.availability == UniformShare() and changed.server_validation == 500
    other = Scenario.from_dict({"preset": "fedcm-class-0.1", "partition": {"name": "dirichlet-qp"}})
    assert other.partition == DirichletQp()
    kept = Scenario.from_dict({"preset": "flash-noise", "noise": {"concentration": 9.0}})
    assert kept.noise == LabelNoise(level=0.15, concentration=9.0)


@pytest.mark.parametrize(
    ("table", "kind", "words"),
    [
        ({"partitoin": "iid"}, ParameterError, "did you mean 'partition'"),
        ({"partition": {"name": "iid", "client": 3}}, ParameterError, "did you mean 'clients'"),
        ({"partition": {"name": "shards", "perclient": 3}}, ParameterError, "did you mean 'per_client'"),
        ({"partition": "dirichlet-pq"}, UnknownNameError, "did you mean 'dirichlet-qp'"),
        ({"partition": 3}, ParameterError, "a name or a table"),
        ({"noise": 0.3}, ParameterError, "a table such as"),
        ({"noise": {"levle": 0.3}}, ParameterError, "did you mean 'level'"),
        ({"noise": {"level": -1}}, ParameterError, "'level'"),
        ({"preset": "fedcor-1sp"}, UnknownNameError, "did you mean 'fedcor-1spc'"),
        ({"failure": 1.0}, ParameterError, "'failure'"),
        ({"deadline": 0}, ParameterError, "'deadline'"),
        ({"validation": "tenth"}, ParameterError, "'validation'"),
        ({"availability": {"share": 0.2}}, ParameterError, "'always' has no parameter 'share'"),
    ],
)
def test_bad_tables(table, kind, words):
    with pytest.raises(kind, match=words):
        Scenario.from_dict(table)


def test_parts_of_the_wrong_type():
    with pytest.raises(ParameterError, match="'partition'"):
        Scenario(partition="iid")
    with pytest.raises(ParameterError, match="'latency'"):
        Scenario(latency=None)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_survives_a_round_trip_through_json(name):
    scenario = preset(name)
    assert Scenario.from_dict(json.loads(json.dumps(scenario.to_dict()))) == scenario


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_builds_prints_and_runs(name):
    scenario = preset(name)
    federation = scenario.build(CIFAR, 10, 1, writers=np.arange(50_000) % 300)
    mask = scenario.available(federation, seed=1, round=0)
    cohort = np.flatnonzero(mask)[: PRESETS[name].cohort or 10]
    events = scenario.events(federation, cohort, seed=1, round=0)
    assert len(cohort) == (PRESETS[name].cohort or 10) and (events.status == Status.OK).all()
    assert (events.durations.max() > 0) == (not isinstance(scenario.latency, NoLatency))
    assert scenario.describe().startswith("partition     " + scenario.partition.name)
    assert f"{len(federation):,} clients" in federation.describe()


# --- determinism


def test_same_in_another_process():
    code = (
        "import numpy as np, zlib; from fedcohort.scenario import preset; s = preset('flash-both'); "
        "f = s.build(np.repeat(np.arange(10), 500), 10, 7); e = s.events(f, np.arange(5), seed=7, round=3); "
        "print(zlib.crc32(f.indices.tobytes()), zlib.crc32(f.labels.tobytes()), e.durations.tolist())"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(runs) == 1


def test_global_generator_is_left_alone():
    np.random.seed(3)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    scenario = preset("flash-both")
    federation = scenario.build(CIFAR, 10, 0)
    scenario.available(federation, seed=0, round=0)
    scenario.events(federation, np.arange(4), seed=0, round=0)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_importing_scenarios_needs_no_optional_package():
    code = (
        "import sys, fedcohort.scenario; "
        "print([m for m in ('torch', 'sklearn', 'quadprog', 'pyarrow', 'flwr') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
