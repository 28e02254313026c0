"""A command that lacks an optional dependency names the extra that installs it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedcohort as fc
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


WITHOUT = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {lacking!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
from fedcohort.cli.app import main
sys.argv = ["fedcohort", *{arguments!r}]
main()
"""


@pytest.mark.parametrize(
    "command", ["--help", "check uniform", "list", "explain {journal}", "report {journal} -o {out}"]
)
def test_what_needs_no_extra_runs_without_any(command: str, tmp_path: Path) -> None:
    journal = tmp_path / "run.sqlite"
    with fc.Session("uniform", clients=5, journal=journal) as session:
        session.tell(session.ask(2))
    arguments = command.format(journal=journal, out=tmp_path / "report.html").split()
    script = WITHOUT.format(lacking=set(cli.EXTRAS), arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.clock
def test_the_core_is_imported_in_a_third_of_a_second() -> None:
    script = "import time; begun = time.process_time(); import fedcohort; print(time.process_time() - begun)"
    # The first import may still compile; what a program pays each time is the best of several.
    took = min(float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(5))
    assert took < 0.3, f"import fedcohort took {took:.2f} s of processor time"


def test_every_extra_installs_its_modules() -> None:
    called = {"sklearn": "scikit-learn"}
    for module, extra in cli.EXTRAS.items():
        wanted = PROJECT["optional-dependencies"][extra]
        assert any(line.startswith(called.get(module, module)) for line in wanted), (module, extra)
