"""``fedcohort flower new``: what it writes, and that it runs."""

from __future__ import annotations

import ast
import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.cli.flower import app_files
from fedcohort.core.errors import InputError, UnknownNameError
from fedcohort.core.protocol import SELECTORS, Status
from fedcohort.journal import read_journal
from fedcohort.simulate.config.experiment import Experiment


def test_it_writes_a_complete_app(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["flower", "new", str(tmp_path / "my-app"), "--selector", "fedcor"])
    assert done.exit_code == 0, done.output
    files = {str(p.relative_to(tmp_path / "my-app")) for p in (tmp_path / "my-app").rglob("*") if p.is_file()}
    package = {f"my_app/{name}.py" for name in ("__init__", "task", "client_app", "server_app")}
    assert files == package | {".gitignore", "LICENSE", "pyproject.toml", "experiment.toml", "README.md"}
    assert all(name in done.output for name in files)
    project = tomllib.loads((tmp_path / "my-app" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-app"
    assert project["tool"]["flwr"]["app"]["components"]["clientapp"] == "my_app.client_app:app"
    assert project["tool"]["flwr"]["app"]["config"]["selector"] == "fedcor"


def test_flower_would_take_it(tmp_path: Path) -> None:
    """What ``flwr app publish`` checks before it sends anything."""
    publish: Any = importlib.import_module("flwr.cli.app_cmd.publish")
    from flwr.supercore.fab_format_version import normalize_and_validate_fab_format

    folder = tmp_path / "my-app"
    assert CliRunner().invoke(app, ["flower", "new", str(folder)]).exit_code == 0
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert normalize_and_validate_fab_format(project).fab_format_version == 1
    publish._validate_description(project["project"]["description"])
    publish._validate_app_name(project["project"]["name"], "publish")
    paths = publish._collect_file_paths(folder)
    publish._validate_files(paths)
    assert {"README.md", "LICENSE", "pyproject.toml", "experiment.toml"} <= {path.name for path in paths}


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "mine.txt").write_text("mine")
    done = CliRunner().invoke(app, ["flower", "new", str(tmp_path / "app")])
    assert isinstance(done.exception, InputError) and "not an empty directory" in str(done.exception)
    assert [p.name for p in (tmp_path / "app").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("selector", list(SELECTORS))
def test_every_selector_gives_an_app_that_can_be_read(selector: str) -> None:
    files = app_files("app", selector)
    assert not [path for path, text in files.items() if "@name@" in text or "@package@" in text]
    for path, text in files.items():
        if path.endswith(".py"):
            ast.parse(text)
    experiment = Experiment.from_dict(tomllib.loads(files["experiment.toml"]))
    assert [plan.label for plan in experiment.plans] == list(dict.fromkeys([selector, "uniform"]))
    assert experiment.plans[0].selector == SELECTORS.create(selector)


@pytest.mark.parametrize("name", ["1app", "my app", "class", "", "a.b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InputError, match="directory"):
        app_files(name, "uniform")


def test_an_unknown_selector_is_named() -> None:
    with pytest.raises(UnknownNameError, match="no selector 'unifrom'"):
        app_files("app", "unifrom")


def run_app(federation: Any, folder: Path, wait_for: int) -> None:
    """Run the app as it is for two rounds and look at what it left."""
    for path, text in app_files("my-app", "power-of-choice").items():
        (folder / "my-app" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "my-app" / path).write_text(text)
    config = {"num-server-rounds": 2, "wait-for": wait_for, "journal": str(folder / "journals")}
    with federation:
        done = federation.run(folder / "my-app", config, timeout=800)
        assert done.status == 0 and "raised an exception" not in done.log, done.log
    record = read_journal(folder / "journals" / "power-of-choice.sqlite")
    assert len(record.cohorts()) == 2 and {r.status for r in record.replies()} == {Status.OK}
    assert (folder / "journals" / "power-of-choice.pt").is_file()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_app_runs_as_it_is_in_a_deployment(kit: Any, tmp_path: Path) -> None:
    run_app(kit.Loopback(tmp_path / "home", nodes=3), tmp_path, wait_for=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_app_runs_as_it_is_in_flowers_simulation(kit: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run_app(kit.Loopback(tmp_path / "home", nodes=0, simulated=10), tmp_path, wait_for=0)
