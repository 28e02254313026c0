"""The same seed, selector and data in the simulator and on Flower give the same cohorts and the same models."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedcohort.audit.participation import prove_participation
from fedcohort.cli.flower import app_files
from fedcohort.core.protocol import SELECTORS, Selector, Status
from fedcohort.core.signals import Signal
from fedcohort.journal import read_journal
from fedcohort.report.account import read_account
from fedcohort.selectors.baselines.greedyfed import SHAPLEY_VALUE
from fedcohort.simulate.config.toml import read_table, to_toml
from tests.experiments import run_experiment

from .conftest import Node

# What a selector decides from must be the same in both worlds; how long a real client takes is not, and Shapley values
# are the simulator's alone.
ELSEWHERE = frozenset({Signal.DURATION, SHAPLEY_VALUE})
SELECTOR_NAMES = [name for name in SELECTORS if not SELECTORS.create(name).requires & ELSEWHERE]
SETTINGS: dict[str, dict[str, Any]] = {
    "balanced-unlabelled": {"name": "balanced", "balance": "nothing"},
    "fedcor": {"warmup": 1, "interval": 3},
    "fedcm-ts": {"filter": {"name": "fedca"}},
    "fedcm-ucb": {"filter": {"name": "cmfl"}},
}
LABELS = [*SELECTOR_NAMES, *(label for label in SETTINGS if label not in SELECTOR_NAMES)]


def selector_of(label: str) -> Selector[Any]:
    settings = {key: value for key, value in SETTINGS.get(label, {}).items() if key != "filter"}
    return SELECTORS.create(settings.pop("name", label), **settings)


def experiment_table(labels: list[str]) -> dict[str, Any]:
    table = read_table(Path(__file__).parent / "parity.toml")
    return {**table, "selectors": {label: SETTINGS.get(label, {}) for label in labels}}


def write_app(folder: Path, table: dict[str, Any], name: str = "parity-app", asynchronous: bool = False) -> Path:
    """Write the app of ``fedcohort flower new`` with an experiment of our own."""
    files = app_files(name, "power-of-choice", asynchronous)
    files["experiment.toml"] = to_toml(table)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def facts(journal: Path) -> tuple[list[list[int]], list[list[bool]], list[float], list[float]]:
    """Return cohorts, who was kept, accuracies and losses of a journal, round by round."""
    record = read_journal(journal)
    try:
        rows = record.cohorts()
        kept = [[r.kept for r in sorted(record.replies(row.ticket), key=lambda r: r.client)] for row in rows]
        assert all(r.status == Status.OK for r in record.replies())
        metrics = record.metrics()
        numbers = [[metrics[row.round][key] for row in rows] for key in ("accuracy", "loss")]
        return [row.clients.tolist() for row in rows], kept, *numbers
    finally:
        record.close()


def assert_same(simulated: Path, live: Path, rounds: int) -> None:
    """Compare the first rounds of a simulated run with all rounds of a live one."""
    ours, theirs = facts(simulated), facts(live)
    assert len(theirs[0]) == rounds
    ours = tuple(part[:rounds] for part in ours)  # type: ignore[assignment]
    assert theirs[0] == ours[0]
    assert theirs[1] == ours[1]
    np.testing.assert_allclose(theirs[2], ours[2], atol=1e-6)
    np.testing.assert_allclose(theirs[3], ours[3], rtol=1e-4)


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All selectors in the simulator; returns the folder of journals."""
    out = tmp_path_factory.mktemp("simulated") / "out"
    run_experiment(experiment_table(LABELS), out)
    return out / "journal"


@contextlib.contextmanager
def imported(folder: Path, package: str) -> Iterator[dict[str, Any]]:
    """The app's modules, imported from a folder as Flower does."""
    sys.path.insert(0, str(folder))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield {name: importlib.import_module(f"{package}.{name}") for name in ("server_app", "client_app")}
    finally:
        torch.set_num_threads(threads)
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if n.startswith(package)]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write_app(tmp_path_factory.mktemp("app"), experiment_table(LABELS))
    with imported(folder, "parity_app") as modules:
        yield modules


def run_in_process(app: Any, grid: Any, name: str, journals: Path) -> None:
    """Run a selector of an app on eight nodes of an in-process grid."""
    config = {"selector": name, "num-server-rounds": 0, "wait-for": 0, "deadline": 60.0, "journal": str(journals)}
    grid.run_config = config
    for number in range(8):
        grid.add(Node(app["client_app"].app, {"partition-id": number}, latency=0.0), node_id=900 - number)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config, series_id=1)
    app["server_app"].main(grid, context)


@pytest.mark.parametrize("name", LABELS)
def test_the_app_on_an_in_process_grid(name: str, app: Any, kit: Any, simulated: Path, tmp_path: Path) -> None:
    run_in_process(app, kit.FakeGrid(kit.Clock()), name, tmp_path)
    assert_same(simulated / f"{name}-s7.sqlite", tmp_path / f"{name}.sqlite", rounds=5)


def test_rules_admit_the_same_clients_in_both_worlds(kit: Any, tmp_path: Path) -> None:
    """What simulated clients say about themselves is what the app's clients say; the shadow watches both."""
    table = experiment_table(["uniform", "active-fl"])
    table["scenario"] = {
        **table["scenario"],
        "attributes": {
            "region": ["north", "north", "north", "north", "north", "south", "south", "south"],
            "charge": [90, 10, 80, 70, 60, 50, 40, 30],
        },
    }
    table["rules"] = {"eligible": "charge >= 20", "quotas": {"region": {"north": 1, "south": 1}}, "min_separation": 2}
    table["run"] = {**table["run"], "shadows": ["active-fl"]}
    run_experiment(table, tmp_path / "out")
    with imported(write_app(tmp_path / "app", table, "ruled-app"), "ruled_app") as app:
        run_in_process(app, kit.FakeGrid(kit.Clock()), "uniform", tmp_path / "live")
    simulated, live = tmp_path / "out" / "journal" / "uniform-s7.sqlite", tmp_path / "live" / "uniform.sqlite"
    assert_same(simulated, live, rounds=5)
    ours, theirs = read_account(simulated), read_account(live)
    assert [r.excluded for r in ours.rounds] == [r.excluded for r in theirs.rounds]
    assert all("it does not meet charge >= 20" in r.excluded for r in theirs.rounds) and prove_participation(live).holds
    assert [(s.name, s.rounds) for s in theirs.shadows] == [("active-fl", 5)]


# One ServerApp goes through all selectors, so that every node describes itself once and not once for each of them.
_SERVER = """
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from parity_app import server_app

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    for label in str(context.run_config["selector"]).split(","):
        own = Context(context.run_id, context.node_id, context.node_config, context.state,
                      {**context.run_config, "selector": label}, context.series_id)
        server_app.main(grid, own)
"""
_CLIENT = """
import torch
from parity_app import client_app, task

# An optimiser's first step imports torch._dynamo, a second of work that every train message would pay for.
for member in vars(torch.optim.Optimizer).values():
    if hasattr(member, "__wrapped__"):
        member.__wrapped__.__dynamo_disable = member.__wrapped__
torch.optim.SGD.step = torch.no_grad()(torch.optim.SGD.step.__wrapped__)
task.plan_of = lambda context: next(iter(task.plans().values()))  # all train alike
app = client_app.app
"""


def travelling(label: str) -> set[str]:
    """What a selector makes travel: the signals it needs, a question of its own, a filter."""
    selector = selector_of(label)
    kinds = {signal.name for signal in selector.requires}
    return kinds | ({"a question"} if type(selector).query is not Selector.query else {"no question"})


def covering() -> list[str]:
    """Return few selectors among which everything travels that travels for any; the rest is the wire's daily bread."""
    left, chosen = set[str]().union(*map(travelling, LABELS)), []
    while left:
        chosen.append(max(LABELS, key=lambda label: len(travelling(label) & left)))
        left -= travelling(chosen[-1])
    return chosen


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("names", [pytest.param(covering(), id="covering"), pytest.param(LABELS, id="all")])
def test_a_deployment_of_eight_nodes(names: list[str], kit: Any, simulated: Path, tmp_path: Path) -> None:
    """1 SuperLink, 8 SuperNodes, selectors that decide from the same facts, two rounds each.

    Among the few that cover, every signal, question and filter goes over the wire.
    """
    app = write_app(tmp_path / "app", experiment_table(LABELS))
    (app / "parity_app" / "all_server.py").write_text(_SERVER)
    (app / "parity_app" / "all_client.py").write_text(_CLIENT)
    project = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(
        project.replace("server_app:app", "all_server:app").replace("client_app:app", "all_client:app")
    )
    config = {"selector": ",".join(names), "num-server-rounds": 2, "journal": str(tmp_path / "journals")}
    with kit.Loopback(tmp_path / "home", nodes=8) as federation:
        done = federation.run(app, config, timeout=1000)
        assert done.status == 0 and "raised an exception" not in done.log, done.log
        assert "gave no losses" not in done.log and "returned no model" not in done.log, done.log
    for name in names:
        assert_same(simulated / f"{name}-s7.sqlite", tmp_path / "journals" / f"{name}.sqlite", rounds=2)
