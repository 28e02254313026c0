"""Lock-step groups against plain loops: training, costs, statuses, the end of a run."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcohort.core.protocol import Status
from fedcohort.core.signals import Signal
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.engine import train_plain
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.training.local import batch_plan

from .lockstep import BASE, Probe, group, rows


@pytest.mark.parametrize(
    "aggregator",
    [
        {"name": "fedavg"},
        {"name": "fedavg-with-absent"},
        {"name": "fedprox", "mu": 0.7},
        {"name": "fednova"},
        {"name": "scaffold"},
    ],
    ids=lambda a: a["name"],
)
def test_rounds_equal_a_plain_loop(aggregator, plain_client):
    made, prepared = group({"aggregator": aggregator}, seeds=[1, 4])
    n = len(made.runs[0].federation)
    models = {run.plan.id: made.models[run.row].clone() for run in made.runs}
    server = {name: torch.zeros_like(model) for name, model in models.items()}
    own = {name: {} for name in models}
    for t in range(3):
        made.step()
        for row in rows(made)[0]:
            run = next(r for r in made.runs if r.plan.id == row["run"])
            name, plan, old = run.plan.id, run.plan, models[run.plan.id]
            cohort = row["cohort"]
            share = run.context.share[cohort]
            trained, steps = [], []
            for client in cohort:
                plain = plain_client(prepared, client, prepared.federation_keys[run.row])
                extra = {}
                if aggregator["name"] == "scaffold":
                    extra["correction"] = server[name] - own[name].get(client, torch.zeros_like(old))
                elif aggregator["name"] == "fedprox":
                    extra["prox"] = 0.7
                trained.append(plain.train(old, plan.local, plan.seed, t, **extra))
                steps.append(plan.local.steps_for(len(plain.x)))
            stacked = torch.stack(trained)
            if aggregator["name"] == "fedavg":
                new = torch.as_tensor(share / share.sum(), dtype=torch.float32) @ stacked
            elif aggregator["name"] == "fedavg-with-absent":
                new = torch.as_tensor(share, dtype=torch.float32) @ stacked + float(1 - share.sum()) * old
            elif aggregator["name"] == "fednova":
                rho = plan.local.momentum
                a = np.array([sum(sum(rho**j for j in range(s - i)) for i in range(s)) for s in steps])
                p = share / share.sum()
                d = sum(float(pk / ak) * (old - w) for pk, ak, w in zip(p, a, trained, strict=True))
                new = old - float(p @ a) * d
            else:
                new = stacked.mean(0)
            if aggregator["name"] == "scaffold":
                change = torch.zeros_like(old)
                for client, w, s in zip(cohort, trained, steps, strict=True):
                    before = own[name].get(client, torch.zeros_like(old))
                    after = before - server[name] + (old - w) / (s * plan.local.lr)
                    own[name][client] = after
                    change += after - before
                server[name] = server[name] + change / n
            models[name] = new
            torch.testing.assert_close(made.models[run.row], new, rtol=1e-4, atol=1e-5)
            models[name] = made.models[run.row].clone()
    made.close()


@pytest.mark.parametrize("name", ["fedvarp", "mifa", "fedau", "fedawe"])
def test_averages_that_make_up_for_absence_equal_a_plain_loop(name, plain_client):
    """Every client's memory as a row of a full matrix; in FedAWE clients train from their own models."""
    made, prepared = group({"aggregator": {"name": name}, "local": {"lr_decay": 0.8}, "run": {"rounds": 6}})
    (run,) = made.runs
    n, plan = len(run.federation), run.plan
    model = made.models[0].clone()
    own, last, updates = model.repeat(n, 1), np.full(n, -1), torch.zeros(n, len(model))
    intervals = [[] for _ in range(n)]
    for t in range(6):
        made.step()
        (row,) = rows(made)[0]
        cohort, eta = row["cohort"], plan.local.lr * 0.8**t
        start = {i: own[i] if name == "fedawe" else model for i in cohort}
        trained = {i: plain_client(prepared, i).train(start[i], plan.local, plan.seed, t) for i in cohort}
        fresh = updates.clone()
        for i in cohort:
            fresh[i] = (trained[i] - start[i]) / eta
        if name == "fedvarp":
            new = model + eta * (updates.mean(0) + (fresh - updates)[cohort].mean(0))
        elif name == "mifa":
            new = model + eta * fresh.mean(0)
        elif name == "fedau":
            omega = [float(np.mean(intervals[i])) if intervals[i] else 1.0 for i in cohort]
            new = model + sum(w * eta * fresh[i] for w, i in zip(omega, cohort, strict=True)) / n
        else:
            new = torch.stack([start[i] + (t - int(last[i])) * eta * fresh[i] for i in cohort]).mean(0)
        torch.testing.assert_close(made.models[0], new, rtol=1e-4, atol=1e-5)
        for i in cohort:
            intervals[i].append(t - last[i])
            last[i] = t
        updates, model = fresh, made.models[0].clone()
        own[cohort] = model
    assert len({len(of) for of in intervals}) > 1
    made.close()


def test_what_clients_report_is_of_the_model_they_trained_from(plain_client):
    """In FedAWE that is each client's own, in losses and in updates."""
    wants = frozenset({Signal.LOSS, Signal.UPDATE_NORM, Signal.GRADIENT_NORM})
    made, prepared = group({"aggregator": {"name": "fedawe"}}, selector=Probe(wants=wants))
    made.step()
    own = made.models[0] + torch.linspace(-0.1, 0.1, 3)[:, None]
    made.runs[0].memory.own.put(np.arange(3), own)
    local = made.runs[0].plan.local
    made.step()
    journal = made.runs[0].session.journal
    replies = {reply.client: reply.metrics for reply in journal.replies(journal.cohorts(round_=1)[0].ticket)}
    for client in range(3):
        plain = plain_client(prepared, client)
        trained = plain.train(own[client], local, made.runs[0].plan.seed, 1)
        loss = F.cross_entropy(plain.module(own[client])(plain.x), plain.y)
        assert replies[client]["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert replies[client]["update-norm"] == pytest.approx(float((trained - own[client]).norm()), rel=1e-3)
        assert replies[client]["gradient-norm"] == pytest.approx(float(plain.gradient(own[client]).norm()), rel=1e-3)
    made.close()


def test_a_run_is_the_same_bit_by_bit_whoever_shares_its_batch():
    selectors = {"uniform": {}, "power-of-choice": {}, "flash": {}, "fedcor": {"warmup": 1}}
    # Ten models of 52,469 numbers, no multiple of four: beside others a batched product adds them up in another order.
    # With 10 classes (52,500 numbers) it would not.
    shape = {
        "data": {"shape": [28, 28], "classes": 9, "samples": 2000},
        "scenario": {"partition": {"name": "client-heterogeneity", "clients": 30, "alpha": 1.0}},
        "model": {"name": "mlp"},
        "local": {"batch_size": 64},
        "run": {"rounds": 2, "cohort": 10},
    }
    many, _ = group(shape, seeds=[1, 2, 3, 4, 5], selectors=selectors)
    while not many.done:
        many.step()
    together = [{_place(row): row for row in table} for table in rows(many)]
    for name, seed in [("uniform", 1), ("uniform", 4), ("power-of-choice", 2), ("flash", 3), ("fedcor", 5)]:
        alone, _ = group(shape, seeds=[seed], selectors={name: selectors[name]})
        while not alone.done:
            alone.step()
        for table, others in zip(rows(alone), together, strict=True):
            for row in table:
                assert {**row, "selection_seconds": 0} == {**others[_place(row)], "selection_seconds": 0}
        mine = next(run for run in many.runs if run.plan.id == f"{name}-s{seed}")
        assert torch.equal(alone.models[0], many.models[mine.row])
        alone.close()
    many.close()


def _place(row):
    return row["run"], row["round"], row.get("client")


def test_the_same_twice_is_bit_identical():
    tables = []
    for _ in range(2):
        made, _ = group(seeds=[1, 2], selectors={"uniform": {}, "flash": {}})
        while not made.done:
            made.step()
        tables.append((made.models.clone(), rows(made)))
        made.close()
    assert torch.equal(tables[0][0], tables[1][0])
    for one, other in zip(tables[0][1][0], tables[1][1][0], strict=True):
        assert {k: v for k, v in one.items() if k != "selection_seconds"} == {
            k: v for k, v in other.items() if k != "selection_seconds"
        }
    assert repr(tables[0][1][1]) == repr(tables[1][1][1])


# -- a selector that asks for everything ---------------------------------------------------------------


def test_simulated_seconds_by_hand():
    latency = {"name": "shifted-exponential", "shift": 2.0, "straggling": 0.0, "unit": 1.0}
    made, _ = group({"scenario": {"latency": latency}}, selector=Probe(wants=frozenset({Signal.LOSS})))
    made.step()
    made.step()
    federation = made.runs[0].federation
    got = rows(made)
    sizes, train = federation.sizes[:3], federation.train_sizes[:3]
    # one epoch is n samples forward and backward, 3 n passes (a short last batch counts in full); the loss n more
    batches = np.ceil(train / 7)
    usual = 3 * batches * np.minimum(train, 7)
    seconds = 2.0 * sizes * (1 + train / usual)
    row = got[0][1]
    assert row["seconds"] == pytest.approx(seconds.max())
    assert row["client_seconds"] == pytest.approx(seconds.sum())
    assert row["clock"] == pytest.approx(2 * seconds.max())
    np.testing.assert_allclose([c["seconds"] for c in got[1][:3]], seconds, rtol=1e-6)
    made.close()


def test_work_sets_the_number_of_local_steps(plain_client):
    made, prepared = group(selector=Probe(work=(0.01, 1.0, 2.0)))
    run = made.runs[0]
    old = made.models[0].clone()
    made.step()
    trained = []
    for client, factor in ((0, 0.01), (1, 1.0), (2, 2.0)):
        plain = plain_client(prepared, client)
        usual = run.plan.local.steps_for(len(plain.x))
        steps = max(1, math.floor(usual * factor + 0.5))
        model = plain.module(old)
        plan = batch_plan(run.plan.seed, 0, client, len(plain.x), run.plan.local, steps)
        train_plain(model, plain.x, plain.y, plan, run.plan.local)
        trained.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    share = run.context.share[:3]
    expected = torch.as_tensor(share / share.sum(), dtype=torch.float32) @ torch.stack(trained)
    torch.testing.assert_close(made.models[0], expected, rtol=1e-4, atol=1e-5)
    made.close()


def test_multiplicities_weigh_in_the_average():
    made, _ = group({"aggregator": {"name": "mean"}}, selector=Probe(weights=(2.0, 1.0, 1.0)))
    made.step()
    np.testing.assert_allclose([row["weight"] for row in rows(made)[1]], [0.5, 0.25, 0.25])
    made.close()


def test_failed_and_late_clients_stay_out_of_the_average():
    latency = {"name": "shifted-exponential", "straggling": 5.0, "unit": 1.0}
    made, _ = group({"scenario": {"latency": latency, "failure": 0.3, "deadline": 150.0}, "run": {"rounds": 12}})
    while not made.done:
        made.step()
    rounds, clients = rows(made)
    seen = {row["status"] for row in clients}
    assert {int(Status.OK), int(Status.FAILED), int(Status.LATE)} <= seen
    size = 4 * made.engine.n_params
    for row in rounds:
        mine = [c for c in clients if c["round"] == row["round"]]
        for client in mine:
            assert client["kept"] == (client["status"] == Status.OK)
            assert (client["weight"] > 0) == client["kept"]
        assert row["seconds"] <= 150.0
        assert row["bytes_up"] == size * sum(c["status"] != Status.FAILED for c in mine)
        if any(c["kept"] for c in mine):
            assert sum(c["weight"] for c in mine) == pytest.approx(1.0)
    made.close()


def test_nobody_available_leaves_the_model_alone():
    night = {"name": "day-night", "period": 2, "zones": 1}
    made, _ = group({"scenario": {"availability": night}})
    made.step()
    before = made.models.clone()
    made.step()
    assert torch.equal(made.models, before)
    made.step()
    assert not torch.equal(made.models, before)
    rounds, clients = rows(made)
    assert [len(row["cohort"]) for row in rounds] == [3, 0, 3]
    assert rounds[1]["available"] == 0 and rounds[1]["qcid"] is None and rounds[1]["bytes_down"] == 0
    assert {row["round"] for row in clients} == {0, 2}
    assert made.runs[0].state == "finished"
    made.close()


def test_a_selector_can_end_its_run():
    made, _ = group({"run": {"rounds": 9, "eval_every": 5}}, selector=Probe(stop_at=2))
    while not made.done:
        made.step()
    info = made.infos()[0]
    assert (info.state, info.reason, info.rounds_done) == ("stopped", "enough", 3)
    rounds, _ = rows(made)
    assert [row["accuracy"] is not None for row in rounds] == [False, False, True]
    made.close()


def test_the_early_stop_rule_ends_a_run(monkeypatch):
    made, _ = group({"run": {"rounds": 9, "patience": 2}})
    losses = iter([(1.0, 1.0), (0.9, 1.1), (0.8, 1.2), (0.7, 1.3)])
    real = made.engine.measure

    def drifting(*args, **kwargs):
        found = real(*args, **kwargs)
        now = dict(zip(("train", "validation"), next(losses), strict=True))
        return {measure: values * 0 + now[measure.part] for measure, values in found.items()}

    monkeypatch.setattr(made.engine, "measure", drifting)
    while not made.done:
        made.step()
    info = made.infos()[0]
    assert (info.state, info.rounds_done) == ("stopped", 3)
    assert "2 rounds in a row" in info.reason
    made.close()


def test_a_diverged_run_ends_and_the_others_go_on():
    alone, _ = group(seeds=[1])
    made, _ = group(seeds=[1, 2])
    alone.step()
    made.step()
    made.models[1] = float("nan")
    while not made.done:
        made.step()
        if not alone.done:
            alone.step()
    first, second = made.infos()
    assert (first.state, first.rounds_done) == ("finished", 3)
    assert (second.state, second.rounds_done) == ("diverged", 2)
    assert "NaN" in second.reason
    torch.testing.assert_close(made.models[0], alone.models[0], rtol=1e-4, atol=1e-5)
    alone.close()
    made.close()


def test_one_broken_model_is_invalid_and_left_out(monkeypatch):
    made, _ = group()
    real = made.engine.train

    def breaking(*args, **kwargs):
        trained = real(*args, **kwargs)
        trained.params[1, 3] = float("inf")
        return trained

    monkeypatch.setattr(made.engine, "train", breaking)
    made.step()
    _, clients = rows(made)
    assert [c["status"] for c in clients] == [Status.OK, Status.INVALID, Status.OK]
    assert [c["weight"] > 0 for c in clients] == [True, False, True]
    assert torch.isfinite(made.models).all()
    assert made.runs[0].running
    made.close()


def test_scaffold_ignores_gradients_that_the_selector_wants():
    plain, _ = group({"aggregator": {"name": "scaffold"}}, selector=Probe())
    other, _ = group({"aggregator": {"name": "scaffold"}}, selector=Probe(wants=frozenset({Signal.GRADIENT_DISTANCE})))
    first, _ = group({"aggregator": {"name": "scaffold", "option": 1}}, selector=Probe())
    for made in (plain, other, first):
        made.step()
        made.step()
    torch.testing.assert_close(plain.runs[0].memory.server, other.runs[0].memory.server)
    torch.testing.assert_close(plain.models, other.models)
    assert not torch.allclose(plain.runs[0].memory.server, first.runs[0].memory.server)
    for made in (plain, other, first):
        made.close()


def test_scaffold_option_one_takes_full_batch_gradients_at_the_received_model(plain_client):
    made, prepared = group({"aggregator": {"name": "scaffold", "option": 1}}, selector=Probe())
    old = made.models[0].clone()
    made.step()
    gradients = [plain_client(prepared, client).gradient(old) for client in range(3)]
    torch.testing.assert_close(made.runs[0].memory.server, sum(gradients) / 8, rtol=1e-3, atol=1e-6)
    size = 4 * made.engine.n_params
    row = rows(made)[0][0]
    assert row["bytes_down"] == row["bytes_up"] == 3 * 2 * size
    made.close()


@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_fedca_keeps_what_validates_best_at_the_server(score, plain_client):
    made, prepared = group({"filter": {"name": "fedca", "score": score}}, seeds=[1, 2])
    dataset = next(iter(prepared.datasets.values()))
    old = made.models.clone()
    made.step()
    _, clients = rows(made)
    for run in made.runs:
        mine = [c for c in clients if c["run"] == run.plan.id]
        place = torch.as_tensor(dataset.x_train[run.federation.server_validation])
        labels = torch.as_tensor(dataset.y_train[run.federation.server_validation])
        logits = []
        for client in mine:
            plain = plain_client(prepared, client["client"], prepared.federation_keys[run.row])
            model = plain.module(plain.train(old[run.row], run.plan.local, run.plan.seed, 0))
            with torch.no_grad():
                logits.append(model(place))

        def value(subset, logits=logits, labels=labels):
            mean = torch.stack([logits[i] for i in subset]).mean(0)
            if score == "loss":
                return -float(F.cross_entropy(mean, labels))
            return float((mean.argmax(1) == labels).float().mean())

        subsets = [[i for i in range(3) if code >> i & 1] for code in range(1, 8)]
        best = max(value(subset) for subset in subsets)
        kept = [i for i, client in enumerate(mine) if client["kept"]]
        assert value(kept) == pytest.approx(best, abs=1e-5)
    made.close()


def test_label_imbalance_of_the_cohort_is_of_true_training_labels():
    made, _ = group({"scenario": {"noise": {"level": 0.5}}})
    made.step()
    row = rows(made)[0][0]
    counts = made.runs[0].federation.label_counts(part="train", true=True)[row["cohort"]].sum(0)
    share = counts / counts.sum()
    assert row["qcid"] == pytest.approx(float(((share - 0.25) ** 2).sum()))
    made.close()


@pytest.mark.gpu
@pytest.mark.parametrize("aggregator", ["fedavg", "scaffold", "fedvarp", "mifa", "fedau", "fedawe"])
def test_cuda_makes_the_same_rounds(aggregator):
    table = {**BASE, "aggregator": aggregator, "seeds": [1, 2], "filter": {"name": "fedca"}}
    table["selectors"] = {"uniform": {}, "flash": {}, "fedacs": {}, "fedcor": {"warmup": 1}}
    prepared = prepare(Experiment.from_dict(table), "cuda")
    made = []
    for device in ("cpu", "cuda"):
        one = prepared.group(0, journals=None, device=device, workers=1)
        one.start()
        while not one.done:
            one.step()
        made.append((one.models.cpu(), rows(one)[0]))
        one.close()
    for here, there in zip(made[0][1], made[1][1], strict=True):
        assert here["cohort"] == there["cohort"]
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)
    torch.testing.assert_close(made[0][0], made[1][0], rtol=1e-3, atol=1e-4)
