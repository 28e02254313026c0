"""Worst groups, worst clients and turns: what the results keep of them, against brute force."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from fedcohort.scenario import Scenario
from fedcohort.scenario.shift import Shift, meant, seen
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.data import from_arrays
from fedcohort.simulate.engine import Engine, HeldOut, Jobs
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.leaderboard import leaderboard_table, to_text
from fedcohort.simulate.leaderboard.table import COLUMNS
from fedcohort.simulate.metrics import Participation, jain, worst_tenth
from fedcohort.simulate.models import build_model
from fedcohort.simulate.rounds.group import Group
from fedcohort.simulate.rounds.judge import Views
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from fedcohort.training.local import LocalTraining


def images(n=600, classes=4, seed=0, writers=None):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    x = rng.integers(0, 80, (n, 6, 6))
    x[np.arange(n), y, :] += 150  # a bright row, which turns into a column
    return from_arrays(x.astype(np.uint8), y, writers=writers, name="rows")


def experiment(data, **changes):
    table = {
        "name": "groups",
        "seeds": [0],
        "model": {"name": "mlp"},
        "local": {"batch_size": 10, "steps": 4, "lr": 0.1},
        "scenario": {"partition": {"name": "iid", "clients": 20}, "validation": 0.1},
        "run": {"rounds": 12, "cohort": 4, "eval_every": 4, "device": "cpu", "workers": 1},
        "selectors": {"uniform": {}, "balanced": {}},
    }
    for key, value in changes.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    return Experiment.from_dict(table | {"data": data})


def run(data, out, **changes):
    Simulation(experiment(data, **changes), out, processes=1).run()
    return load(out)


def accuracy_by_hand(engine, model, x, y):
    """Predictions of one model for samples that are not in the engine: through a module of its own."""
    one = Engine(
        DATA.x_train, DATA.y_train, x, y, classes=4, federations=[ANY], model="mlp", local=LocalTraining(steps=1),
        device="cpu",
    )  # fmt: skip
    with one:
        return float(one.evaluate(model[None])[1][0])


DATA = images()
FEDERATION = Scenario.from_dict({"partition": {"name": "iid", "clients": 20}}).build(DATA.labels, 4, 0)
ANY = Views(DATA, [FEDERATION]).client_data(FEDERATION)


def test_training_on_a_view_is_training_on_samples_transformed_beforehand():
    """Copies appended to the array, against a dataset whose samples are already as each client sees them."""
    scenario = Scenario.from_dict(
        {"partition": {"name": "iid", "clients": 10}, "shift": {"views": ["rotate"], "share": 0.3}}
    )
    federation = scenario.build(DATA.labels, 4, 1)
    views = Views(DATA, [federation])
    before = DATA.x_train.copy()
    mine = federation.indices[(federation.groups.of == 1)[federation.owner]]
    before[mine] = seen("rotate", before[mine])
    local = LocalTraining(steps=5, batch_size=8, lr=0.1)
    results = []
    plain = Scenario(partition=scenario.partition).build(DATA.labels, 4, 1)
    zeros = np.zeros(10, np.int64)
    for x, data, copies in (
        (DATA.x_train, views.client_data(federation), views.copies),
        (before, Views(DATA, [plain]).client_data(plain), ()),
    ):
        with Engine(
            x, DATA.y_train, DATA.x_test, DATA.y_test, classes=4, federations=[data], model="mlp", local=local,
            device="cpu", workers=1, copies=copies,
        ) as engine:  # fmt: skip
            results.append(engine.train(engine.init(3)[None], Jobs(zeros, zeros, np.arange(10), zeros, zeros)).params)
    # turned images have the same mean and deviation, so that even the standardisation is the same
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("view", ["rotate", "invert", "sketch", "relabel"])
def test_each_group_is_tested_as_it_sees_the_world(view, tmp_path):
    plans = experiment(DATA, scenario={"shift": {"views": [view], "share": 0.25}}).plans
    federation = plans[0].scenario.build(DATA.labels, 4, 0)
    group = Group(plans[:1], ["a"], DATA, {"a": federation}, device="cpu", workers=1)
    rows = []
    group.start()
    for _ in range(12):
        group.step(lambda info, row: rows.append(row))
    found = rows[-1]
    model = group.models[0]
    plain = accuracy_by_hand(group.engine, model, DATA.x_test, DATA.y_test)
    other = accuracy_by_hand(group.engine, model, seen(view, DATA.x_test), meant(view, DATA.y_test, 4))
    np.testing.assert_allclose(found["groups"], [plain, other])
    assert found["worst_group"] == pytest.approx(min(plain, other))
    assert found["accuracy"] == pytest.approx(0.75 * plain + 0.25 * other)
    assert rows[0]["worst_group"] is None and len(rows[0]["groups"]) == 0  # not evaluated
    group.close()


def test_a_clients_accuracy_is_that_of_its_classes(tmp_path):
    plans = experiment(DATA, scenario={"partition": {"name": "shards", "clients": 20, "per_client": 2}}).plans
    federation = plans[0].scenario.build(DATA.labels, 4, 0)
    group = Group(plans[:1], ["a"], DATA, {"a": federation}, device="cpu", workers=1)
    rows = []
    group.start()
    for _ in range(4):
        group.step(lambda info, row: rows.append(row))
    by_class = np.array(
        [
            accuracy_by_hand(
                group.engine, group.models[0], DATA.x_test[DATA.y_test == c], DATA.y_test[DATA.y_test == c]
            )
            for c in range(4)
        ]
    )
    counts = federation.label_counts(part="all", true=True)
    clients = counts @ by_class / counts.sum(1)
    assert rows[-1]["worst_tenth"] == pytest.approx(np.sort(clients)[:2].mean())
    assert rows[-1]["client_spread"] == pytest.approx(clients.std())
    assert rows[-1]["worst_recall"] == pytest.approx(by_class.min())
    model = FlatModel(build_model("mlp", group.engine.sample, 4)).load(group.models[0])
    predicted = model(group.engine.store.x_test.view(-1, *group.engine.sample)).argmax(1).numpy()
    assert rows[-1]["macro_f1"] == pytest.approx(f1_score(DATA.y_test, predicted, average="macro"))
    assert 0 < rows[-1]["selection_seconds"] < 1
    main = counts.argmax(1)
    groups = [counts[main == c].sum(0) @ by_class / counts[main == c].sum() for c in np.unique(main)]
    np.testing.assert_allclose(rows[-1]["groups"], groups)
    group.close()


def test_owners_are_tested_on_their_own_samples():
    data = images(900, writers=np.arange(900) % 9)
    plans = experiment(data, scenario={"partition": {"name": "natural"}}).plans
    federation = plans[0].scenario.build(data.labels, 4, 0, data.writers, data.writer_names)
    group = Group(plans[:1], ["a"], data, {"a": federation}, device="cpu", workers=1)
    rows = []
    group.start()
    for _ in range(4):
        group.step(lambda info, row: rows.append(row))
    test = HeldOut(len(data.y_train), data.y_test, data.y_test, 4)
    _, right, _ = group.engine.evaluate_cells(group.models, test)
    assert rows[-1]["accuracy"] == pytest.approx(right.sum() / len(data.y_test))
    per_owner = HeldOut(len(data.y_train), data.y_test, data.writers_test, 9)
    _, right, _ = group.engine.evaluate_cells(group.models, per_owner)
    np.testing.assert_allclose(rows[-1]["groups"], right[0] / np.bincount(data.writers_test))
    group.close()


def test_the_plain_loop_counts_as_compiled_code_does():
    test = HeldOut(len(DATA.y_train), DATA.y_test, DATA.y_test, 4)
    found = []
    for model in ("mlp", f"{__name__}:Residual"):
        with Engine(
            DATA.x_train, DATA.y_train, DATA.x_test, DATA.y_test, classes=4, federations=[ANY], model=model,
            local=LocalTraining(steps=1), device="cpu", workers=1,
        ) as engine:  # fmt: skip
            models = torch.stack([engine.init(0), engine.init(1)])
            loss, right, _ = engine.evaluate_cells(models, test)
            whole_loss, accuracy = engine.evaluate(models)
            np.testing.assert_allclose(right.sum(1) / len(DATA.y_test), accuracy)
            np.testing.assert_allclose(loss, whole_loss, rtol=1e-6)
            found.append(engine.kind)
    assert found[1].startswith("plain loop")


class Residual(torch.nn.Module):
    """Not a chain, so that only the plain loop trains it."""

    def __init__(self, sample, classes):
        super().__init__()
        self.first, self.last = torch.nn.Linear(36, 36), torch.nn.Linear(36, classes)

    def forward(self, x):
        x = x.flatten(1)
        return self.last(x + torch.relu(self.first(x)))


@pytest.mark.parametrize("seed", range(5))
def test_participation_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    n, rounds = int(rng.integers(1, 12)), int(rng.integers(1, 30))
    cohorts = [rng.permutation(n)[: int(rng.integers(0, n + 1))] for _ in range(rounds)]
    seen_by = Participation(n)
    for t, cohort in enumerate(cohorts):
        seen_by.add(t, cohort)
        if t == rounds // 2:
            seen_by = Participation.of(seen_by.array())  # through a checkpoint
    longest = 0
    for client in range(n):
        absent = 0
        for cohort in cohorts:
            absent = 0 if client in cohort else absent + 1
            longest = max(longest, absent)
    assert seen_by.longest_absence(rounds) == longest
    counts = np.bincount(np.concatenate([*cohorts, np.zeros(0, int)]).astype(int), minlength=n)
    np.testing.assert_array_equal(seen_by.counts, counts)
    if counts.any():
        assert seen_by.jain == pytest.approx(counts.sum() ** 2 / (n * (counts**2).sum()))
        assert 1 / n - 1e-12 <= jain(counts) <= 1 + 1e-12


def test_the_worst_tenth_is_the_mean_of_the_lowest():
    values = np.random.default_rng(0).random(37)
    assert worst_tenth(values) == pytest.approx(np.sort(values)[:3].mean())
    assert np.isnan(worst_tenth(np.array([np.nan])))


def test_results_and_leaderboard_name_who_loses(tmp_path):
    results = run(DATA, tmp_path / "a", scenario={"shift": {"views": ["invert"], "share": 0.2}}, seeds=[0, 1])
    facts = results.federation(results.runs[0])
    assert facts.group_names == ("plain", "invert") and np.bincount(facts.groups).tolist() == [16, 4]
    (board,) = results.leaderboards()
    row = board.rows[0]
    for name in ("worst_group", "worst_tenth", "client_spread", "jain", "longest_absence", "asked"):
        assert row.fair(name).count == 2, name
    text = to_text(leaderboard_table(board, columns=COLUMNS), 250)
    assert "Worst group" in text and "Jain" in text and "absence" in text
    last = results.column(results.runs[0], "worst_group")
    assert np.isnan(last[0]) and np.isfinite(last[-1])
    with_groups = results.per_client(results.runs[0], "groups")
    assert [len(g) for g in with_groups] == [2 if t % 4 == 3 else 0 for t in range(12)]
    assert "fairness" in board.to_dict()["rows"][0]


def test_resuming_keeps_the_turns(tmp_path):
    whole = run(DATA, tmp_path / "a", run={"checkpoint_seconds": 0})
    simulation = Simulation(experiment(DATA, run={"checkpoint_seconds": 0}), tmp_path / "b", processes=1)

    class Stop(Listener):
        def on_round(self, info, row):
            if row["round"] == 6:
                simulation.stop()

    simulation.listeners.append(Stop())
    assert simulation.run() == "interrupted"
    assert Simulation.open(tmp_path / "b", processes=1).run() == "finished"
    again = load(tmp_path / "b")
    for one in whole.runs:
        for name in ("jain", "longest_absence", "worst_tenth"):
            np.testing.assert_array_equal(whole.column(one, name), again.column(one.id, name))


def test_a_view_of_what_is_no_image_is_refused_before_the_first_round():
    data = from_arrays(np.random.default_rng(0).random((200, 5)), np.arange(200) % 4)
    with pytest.raises(Exception, match="images of bytes"):
        Views(data, [Scenario(shift=Shift(views=("blur",))).build(data.labels, 4, 0)])
