"""GreedyFed: its rounds by hand, and Shapley values that the simulator computes against the definition."""

import itertools
from math import comb

import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from fedcohort.core.clients import ClientTable  # noqa: E402
from fedcohort.core.errors import FedcohortError  # noqa: E402
from fedcohort.core.protocol import RoundReport, RoundRequest, Status  # noqa: E402
from fedcohort.selectors.baselines.greedyfed import SHAPLEY_VALUE, GreedyFed  # noqa: E402
from fedcohort.session.session import Session  # noqa: E402
from fedcohort.simulate.config.experiment import Experiment  # noqa: E402
from fedcohort.simulate.rounds.listener import Listener  # noqa: E402
from fedcohort.simulate.rounds.prepare import prepare  # noqa: E402
from fedcohort.simulate.runner import Simulation  # noqa: E402
from fedcohort.simulate.store.results import load  # noqa: E402


@pytest.mark.parametrize("memory", [None, 0.8])
def test_twenty_rounds_by_hand(memory):
    """Algorithm 1 with plain lists."""
    n, m = 7, 3
    rng = np.random.default_rng(0)
    session = Session(GreedyFed(memory=memory), ClientTable(n=n), seed=1, signals={SHAPLEY_VALUE})
    sv, count = [0.0] * n, [0] * n
    for t in range(20):
        cohort = session.ask(RoundRequest(size=m))
        chosen = cohort.clients.tolist()
        if t < 2:
            assert all(count[k] == 0 for k in chosen)
        elif t == 2:
            assert sum(count[k] == 0 for k in chosen) == 1
        else:
            assert sorted(chosen) == sorted(np.argsort(sv)[-m:])
        values = rng.normal(size=m)
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics={SHAPLEY_VALUE: values}))
        for k, value in zip(chosen, values, strict=True):
            count[k] += 1
            old = (count[k] - 1) / count[k] if memory is None else memory
            sv[k] = old * sv[k] + (1 - old) * value


def test_a_client_that_never_delivers_does_not_hold_its_place():
    session = Session(GreedyFed(), ClientTable(n=3), seed=0, signals={SHAPLEY_VALUE})
    for _ in range(4):
        cohort = session.ask(RoundRequest(size=1))
        failed = cohort.clients[0] == 2
        status = [Status.FAILED if failed else Status.OK]
        values = [np.nan if failed else 0.5]
        session.tell(RoundReport(cohort.ticket, cohort.clients, status=status, metrics={SHAPLEY_VALUE: values}))
    assert cohort.clients[0] != 2


TABLE = {
    "seeds": [1],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 60, "classes": 4, "shape": [6]},
    "scenario": {"partition": {"name": "dirichlet", "clients": 8, "alpha": 0.3}, "server_validation": 6},
    "model": {"name": "mlp-64"},
    "local": {"batch_size": 8, "epochs": 1, "lr": 0.1},
    "run": {"rounds": 4, "cohort": 4},
    "selectors": {"greedyfed": {}},
}


def test_the_simulator_reports_shapley_values():
    prepared = prepare(Experiment.from_dict(TABLE), "cpu")
    group = prepared.group(0, journals=None, device="cpu", workers=1)
    group.start()
    (run,) = group.runs
    dataset = next(iter(prepared.datasets.values()))
    place = run.federation.server_validation.astype(np.int64)
    labels = torch.as_tensor(np.asarray(dataset.y_train)[place].astype(np.int64))
    old = group.models[0].clone()
    trained = {}
    real = group.batch.train

    def watched(runs, clients, *rest):
        result = real(runs, clients, *rest)
        trained.update(zip(clients[0].tolist(), result.params.clone(), strict=True))
        return result

    group.batch.train = watched
    group.step()
    journal = run.session.journal
    cohort = journal.cohorts(round_=0)[0]
    reported = {reply.client: reply.metrics["shapley-value"] for reply in journal.replies(cohort.ticket)}
    clients = cohort.clients.tolist()

    def utility(chosen):
        model = old
        if chosen:
            sizes = run.context.share[list(chosen)]
            model = sum(float(s / sizes.sum()) * trained[c] for s, c in zip(sizes, chosen, strict=True))
        (logits,) = group.engine.logits(model[None].float(), place)
        return -float(F.cross_entropy(logits.double(), labels))

    exact = {}
    for k in clients:
        others = [c for c in clients if c != k]
        exact[k] = sum(
            (utility((*chosen, k)) - utility(chosen)) / comb(3, size) / 4
            for size in range(4)
            for chosen in itertools.combinations(others, size)
        )
    assert np.mean(np.abs(list(exact.values()))) > 0.005
    for k in clients:
        assert reported[k] == pytest.approx(exact[k], abs=1e-6)
    group.close()


class StopAfter(Listener):
    def __init__(self, rows):
        self.rows, self.simulation = rows, None

    def on_round(self, run, row):
        self.rows -= 1
        if self.rows == 0:
            self.simulation.stop()


def test_an_interrupted_run_continues_with_the_same_values(tmp_path):
    table = {**TABLE, "run": {"rounds": 6, "cohort": 4, "device": "cpu", "workers": 1}}
    assert Simulation(Experiment.from_dict(table), tmp_path / "whole").run() == "finished"
    listener = StopAfter(3)
    listener.simulation = Simulation(Experiment.from_dict(table), tmp_path / "stopped", listeners=[listener])
    assert listener.simulation.run() == "interrupted"
    assert Simulation.open(tmp_path / "stopped").run() == "finished"
    whole, stopped = (load(tmp_path / name).clients.to_pylist() for name in ("whole", "stopped"))
    assert len(whole) == 24 and whole == stopped


def test_without_samples_at_the_server_it_is_refused():
    table = {**TABLE, "scenario": {"partition": {"name": "iid", "clients": 8}}}
    with pytest.raises(FedcohortError, match="shapley-value") as raised:
        prepare(Experiment.from_dict(table), "cpu").group(0, journals=None, device="cpu", workers=1).start()
    assert "server_validation" in str(raised.value.hint)


def test_flower_refuses_it():
    flower = pytest.importorskip("fedcohort.hosts.flower")
    with pytest.raises(FedcohortError, match="Flower"):
        flower.CohortStrategy("greedyfed")
