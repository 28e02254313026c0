"""``fedcohort flare new``: what it writes."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.cli.flare import job_files
from fedcohort.core.errors import InputError, UnknownNameError
from fedcohort.core.protocol import SELECTORS
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.greedyfed import SHAPLEY_VALUE
from fedcohort.simulate.config.experiment import Experiment

AT_THE_SERVER = frozenset({Signal.KEPT, SHAPLEY_VALUE})


def test_it_writes_a_complete_job(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["flare", "new", str(tmp_path / "my-job"), "--selector", "fedcor"])
    assert done.exit_code == 0, done.output
    files = {path.name for path in (tmp_path / "my-job").iterdir()}
    assert files == {"README.md", "client.py", "experiment.toml", "job.py", "server_model.py", "task.py"}
    assert all(name in done.output for name in files)


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = CliRunner().invoke(app, ["flare", "new", str(tmp_path)])
    assert isinstance(done.exception, InputError)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("selector", list(SELECTORS))
def test_every_selector_gives_a_job_or_a_reason(selector: str) -> None:
    if SELECTORS.create(selector).requires & AT_THE_SERVER:
        with pytest.raises(InputError, match="server"):
            job_files("job", selector)
        return
    files = job_files("job", selector)
    assert not [path for path, text in files.items() if "@" in text.replace("@cache", "")]
    for path, text in files.items():
        if path.endswith(".py"):
            ast.parse(text)
            assert max(map(len, text.splitlines())) <= 120
    experiment = Experiment.from_dict(tomllib.loads(files["experiment.toml"]))
    assert experiment.plans[0].selector == SELECTORS.create(selector)


def test_bad_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unifrom"):
        job_files("job", "unifrom")
    with pytest.raises(InputError, match="name"):
        job_files("1job", "uniform")
    with pytest.raises(InputError, match=r"mine\.py:Mine"):
        job_files("job", "mine.py:Mine")
