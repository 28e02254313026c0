"""Tasks beyond classification: regression, next tokens, other losses, user-defined metrics, and bad input."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcohort.core.errors import InputError, SignalError
from fedcohort.report.data import load_bundle
from fedcohort.report.figures import accuracy as curve_figure
from fedcohort.report.figures import scenario as scenario_figure
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import ConfigError
from fedcohort.simulate.data import Dataset, from_arrays
from fedcohort.simulate.engine import ClientData, Engine, Jobs
from fedcohort.simulate.models import build_model
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.simulate.store.results import load
from fedcohort.simulate.tasks import Classification, NextToken, Regression
from fedcohort.training.local import LocalTraining, batch_plan
from tests.experiments import run_experiment

EXAMPLES = Path(__file__).parents[2] / "examples"


def numbers(n=120, outputs=1):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(n, 3)).astype(np.float32)
    y = x @ draw.normal(size=(3, outputs)) + 0.1 * draw.normal(size=(n, outputs))
    return from_arrays(x, y, target="number", writers=np.arange(n) % 6)


def table(**changes):
    base = {
        "data": numbers(),
        "task": "regression",
        "scenario": {"partition": "natural"},
        "model": "logistic",
        "local": {"steps": 5, "batch_size": 8, "lr": 0.1},
        "run": {"rounds": 4, "cohort": 3, "device": "cpu"},
        "selectors": {"uniform": {}, "power-of-choice": {}},
    }
    return {**base, **changes}


def test_regression_is_ranked_and_written_the_right_way_round(tmp_path):
    assert run_experiment(table(run={**table()["run"], "targets": [0.9]}), tmp_path / "out") == "finished"
    results = load(tmp_path / "out")
    errors = results.column("uniform-s0", "metric")
    assert (
        np.isnan(results.column("uniform-s0", "accuracy")).all()
        and np.isnan(results.column("uniform-s0", "qcid")).all()
    )
    assert errors[-1] < errors[0] and (results.score("uniform-s0") == -errors).all()
    (board,) = results.leaderboards()
    ends = {row.label: results.column(f"{row.label}-s0", "metric")[-1] for row in board.rows}
    assert list(ends.values()) == sorted(ends.values()), "the smallest error is first"
    text = str(board)
    assert "accuracy" not in text and "Lower rmse is better" in text and "%" not in text and "rmse 0.9" in text
    plain = board.to_dict()
    assert plain["metric"] == {"name": "rmse", "higher_is_better": False} and plain["targets"] == [0.9]
    assert plain["rows"][0]["terminal"]["mean"] == pytest.approx(min(ends.values()), abs=1e-5)
    bundle = load_bundle([tmp_path / "out"])
    (setting,) = bundle.settings
    figure = curve_figure(setting, board)
    assert figure.name == "metric" and "accuracy" not in figure.sentence
    drawn = {s["label"]: s["y"][-1] for s in figure.spec["views"][0]["series"]}
    assert drawn["uniform"] == pytest.approx(errors[-1], rel=1e-3)
    assert scenario_figure(setting) is None


def test_the_plain_loop_minimises_the_configured_loss():
    dataset = numbers(outputs=2)
    n = len(dataset.y_train)
    one = ClientData(np.arange(n), np.array([0, n]), np.zeros(n, np.int64), np.array([0]))
    local = LocalTraining(steps=3, batch_size=10, lr=0.2)
    task = Regression(loss="huber_loss", metric="mae")
    arrays = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
    with Engine(
        *arrays, classes=2, federations=[one], model="logistic", local=local, device="cpu", task=task
    ) as engine:
        start = engine.init(1)
        zero = np.zeros(1, np.int64)
        trained = engine.train(start[None], Jobs(zero, zero, zero, zero, zero)).params
        loss, mae = engine.evaluate(trained)
        gradient = engine.client_gradients(start[None], zero, zero, zero)[0]
    model = build_model("logistic", (3,), 2)
    torch.nn.utils.vector_to_parameters(start.clone(), model.parameters())
    x, y = torch.as_tensor(dataset.x_train), torch.as_tensor(dataset.y_train)
    F.huber_loss(model(x), y).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for row, count in zip(*batch_plan(0, 0, 0, n, local), strict=True):
        optimizer.zero_grad()
        F.huber_loss(model(x[row[:count]]), y[row[:count]]).backward()
        optimizer.step()
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(trained[0], vector, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        outputs, truth = model(torch.as_tensor(dataset.x_test)), torch.as_tensor(dataset.y_test)
    assert loss[0] == pytest.approx(float(F.huber_loss(outputs, truth)), rel=1e-4)
    assert mae[0] == pytest.approx(float((outputs - truth).abs().mean()), rel=1e-4)


def test_metrics_and_losses():
    outputs, truth = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [1.0]])
    losses = Regression().losses(outputs, truth)
    assert losses.tolist() == [1.0, 4.0]
    assert Regression().measure(outputs, truth, losses) == pytest.approx(2.5**0.5)
    assert Regression(metric="r2").measure(outputs, truth, losses) == pytest.approx(1 - 5 / 0.5)
    assert Regression(metric="loss").measure(outputs, truth, losses) == 2.5
    scores = torch.zeros(2, 3, 4)
    scores[..., 1] = 2.0
    tokens = torch.tensor([[1, 1, 0], [1, 2, 3]])
    task = NextToken(metric="perplexity")
    assert NextToken().measure(scores, tokens, None) == 0.5
    assert task.losses(scores, tokens).shape == (2,)
    assert task.measure(scores, tokens, None) == pytest.approx(float(task.losses(scores, tokens).mean().exp()))
    assert Classification().fast and not Classification(loss="multi_margin_loss").fast


def test_an_own_metric_leaves_training_to_the_fast_engine(tmp_path):
    """The metric is computed on the outputs: the models have the same bits as with accuracy."""
    (tmp_path / "mine.py").write_text(
        "def share(outputs, targets):\n    return (outputs.argmax(1) == targets).double().mean()\n"
    )
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, 6)).astype(np.float32), np.arange(40) % 4
    one = ClientData(np.arange(40), np.array([0, 40]), y, np.array([0]))
    own = Classification(metric=f"{tmp_path / 'mine.py'}:share", higher_is_better=True)
    found = []
    for task in (Classification(), own, Classification(metric="loss")):
        local = LocalTraining(steps=3, batch_size=10, lr=0.2)
        options = {"model": "mlp-64", "local": local, "device": "cpu", "task": task}
        with Engine(x, y, x, y, classes=4, federations=[one], **options) as engine:
            zero = np.zeros(1, np.int64)
            trained = engine.train(engine.init(1)[None], Jobs(zero, zero, zero, zero, zero)).params
            found.append((engine.kind, trained, *engine.evaluate(trained)))
    (kind, models, losses, accuracies), mine, judged_by_loss = found
    for other in (mine, judged_by_loss):
        assert other[0] == kind and torch.equal(other[1], models)
        np.testing.assert_allclose(other[2], losses, rtol=1e-6)
    np.testing.assert_array_equal(mine[3], accuracies)
    np.testing.assert_allclose(judged_by_loss[3], losses, rtol=1e-6)


def test_user_defined_functions(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def loss(outputs, targets):\n    return (outputs - targets).abs().mean(1)\n"
        "def worst(outputs, targets):\n    return (outputs - targets).abs().max()\n"
        "def scalar(outputs, targets):\n    return (outputs - targets).abs().mean()\n"
        "def words(outputs, targets):\n    return 'good'\n"
        "number = 3\n"
    )
    mine = f"{tmp_path / 'mine.py'}:"
    task = {"name": "regression", "loss": mine + "loss", "metric": mine + "worst", "higher_is_better": False}
    run_experiment(table(task=task), tmp_path / "out")
    results = load(tmp_path / "out")
    assert results.metric.name == "worst" and not results.metric.higher
    for changes, message in (
        ({"metric": mine + "worst", "higher_is_better": None}, "task.higher_is_better"),
        ({"loss": mine + "number"}, "not a function"),
        ({"metric": mine + "nothing"}, "'nothing'"),
        ({"loss": "huber_los"}, "'huber_loss'"),
        ({"metric": "accuracy", "higher_is_better": None}, "rmse, mae, r2, loss"),
        ({"metric": "r2"}, "'r2'"),
        ({"name": "regresion", "higher_is_better": None}, "'regression'"),
    ):
        bad = {key: value for key, value in {**task, **changes}.items() if value is not None}
        with pytest.raises(ConfigError, match=message):
            Experiment.from_dict(table(task=bad))
    for name, part, message in (
        ("scalar", "loss", "one number per sample"),
        ("words", "metric", "one number. Got 'good'"),
    ):
        with pytest.raises(InputError, match=message):
            run_experiment(table(task={**task, part: mine + name}), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"selectors": {"fedcbs": {}}},
            SignalError,
            "'label-products'",
        ),
        ({"selectors": {"flash": {}}}, SignalError, "'flash' .* 'regression'"),
        ({"scenario": {"partition": "dirichlet"}}, InputError, "'dirichlet'"),
        ({"scenario": {"partition": "natural", "noise": {"level": 0.1}}}, InputError, "noise"),
        ({"filter": "fedca"}, InputError, "'fedca'"),
        ({"local": {"steps": 1, "loss": "robust"}}, InputError, "robust loss"),
        ({"labels": "noisy"}, InputError, "'noisy'"),
        ({"data": "synthetic"}, InputError, "'synthetic' is for classification"),
        ({"task": "classification"}, InputError, "'arrays' is for regression"),
        ({"model": "torch.nn:Identity"}, InputError, r"it must give \(1,\)"),
        ({"settings": [{"name": "a", "task": "regression"}]}, ConfigError, "'task'"),
        ({"selectors": {"uniform": {"task": "regression"}}}, ConfigError, "'task'"),
    ],
)
def test_bad_tasks_are_refused_before_anything_is_written(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        run_experiment(table(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_targets_are_values_of_the_metric():
    assert Experiment.from_dict(table(run={"targets": [12.5], "cohort": 2}))
    with pytest.raises(ConfigError, match=r"\[0, 1\]\. Got 62"):
        Experiment.from_dict({"run": {"targets": [62.0]}})


def test_a_classifier_with_another_loss_is_still_a_classifier(tmp_path):
    y = np.arange(60) % 3
    data = from_arrays(np.eye(3)[y] + 0.1, y)
    changes = {"data": data, "scenario": {"partition": {"name": "iid", "clients": 5}}, "selectors": {"fedcbs": {}}}
    run_experiment(table(task={"loss": "multi_margin_loss"}, **changes), tmp_path / "out")
    accuracy = load(tmp_path / "out").column("fedcbs-s0", "accuracy")
    assert accuracy[-1] == 1.0 and load(tmp_path / "out").metric.is_accuracy


def test_integers_reach_the_model_as_integers(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Tokens(nn.Module):\n"
        "    def __init__(self, shape, tokens):\n"
        "        super().__init__()\n"
        "        self.embedding, self.out = nn.Embedding(tokens, 4), nn.Linear(4, tokens)\n"
        "    def forward(self, x):\n"
        "        return self.out(self.embedding(x))\n"
    )
    draw = np.random.default_rng(0)
    text = np.cumsum(draw.integers(1, 3, (80, 9)), axis=1) % 5
    data = from_arrays(text[:, :-1], text[:, 1:], target="token", writers=np.arange(80) % 4)
    assert data.x_train.dtype == np.int64 and data.target == "token" and data.classes == 5
    run_experiment(table(data=data, task="next-token", model=f"{tmp_path / 'net.py'}:Tokens"), tmp_path / "out")
    shares = load(tmp_path / "out").column("uniform-s0", "metric")
    assert len(shares) == 4 and (shares >= 0).all() and (shares <= 1).all()
    assert "token-accuracy" in str(load(tmp_path / "out").leaderboards()[0])
    with pytest.raises(InputError, match="integers"):
        from_arrays(text / 2, text, target="token")
    with pytest.raises(InputError, match="whole numbers"):
        prepare(Experiment.from_dict(table(data=data, task="next-token")))


def test_targets_that_are_not_numbers():
    with pytest.raises(InputError, match="NaN"):
        from_arrays(np.zeros((10, 2)), [np.nan] * 10, target="number")
    with pytest.raises(InputError, match="whole numbers"):
        from_arrays(np.zeros((10, 2)), np.linspace(0, 1, 10))
    good = numbers()
    with pytest.raises(InputError, match="one shape"):
        Dataset("x", good.x_train, good.y_train, good.x_test, np.hstack([good.y_test] * 2), 0, ())


def test_a_table_of_numbers(tmp_path):
    rows = "\n".join(f"{i},{2 * i + 1}.5,{i % 3}" for i in range(30))
    (tmp_path / "a.csv").write_text(f"x,y,who\n{rows}\n")
    data = {"path": str(tmp_path / "a.csv"), "label": "y", "client": "who"}
    ready = prepare(Experiment.from_dict(table(data=data, run={"cohort": 2})))
    (dataset,) = ready.datasets.values()
    assert dataset.target == "number" and dataset.shape == (1,) and len(ready.federations["0-s0"]) == 3


def test_the_example_of_characters_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("characters_example", EXAMPLES / "characters.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "MODULES", example.MODULES[:7])
    example.main(rounds=1)
    assert "token-accuracy" in capsys.readouterr().out
