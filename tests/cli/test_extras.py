"""A command that lacks an optional dependency names the extra that installs it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedcohort.cli import app as cli

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def lacking(**_: Any) -> None:
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    monkeypatch.setattr(cli, "app", lacking)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert "This needs torch, which is not installed." in said and "pip install 'fedcohort[sim]'" in said


def test_a_missing_module_without_an_extra_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(**_: Any) -> None:
        raise ModuleNotFoundError("No module named 'fedcohort.gone'", name="fedcohort.gone")

    monkeypatch.setattr(cli, "app", lacking)
    with pytest.raises(ModuleNotFoundError):
        cli.main()


def test_every_extra_installs_its_modules() -> None:
    called = {"sklearn": "scikit-learn"}
    for module, extra in cli.EXTRAS.items():
        wanted = PROJECT["optional-dependencies"][extra]
        assert any(line.startswith(called.get(module, module)) for line in wanted), (module, extra)
