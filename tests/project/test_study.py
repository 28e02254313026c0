"""The page from nothing to a table, a figure and a paragraph; the example of tuning."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedcohort as fc

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "publish-a-study.md").read_text()
COMMANDS = re.findall(r"```console\n\$ (.*?)\n```", PAGE)


def without_numbers(text):
    return " ".join(re.sub(r"[\d.]+", "#", text).split())


def test_there_are_five_commands_of_which_the_first_installs():
    assert len(COMMANDS) == 5 and COMMANDS[0] == 'pip install -c constraints.txt ".[sim,report,notebook]"'


def test_the_commands_make_a_table_a_figure_and_a_paragraph(tmp_path):
    pytest.importorskip("matplotlib")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}
    said = []
    for line in COMMANDS[1:]:
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        said.append(done.stdout)
    shown = re.findall(r"```text\n(.*?)\n```", PAGE, re.S)
    for output, printed in zip(shown, said, strict=False):  # the last digits depend on the processor
        assert without_numbers(printed).startswith(without_numbers(output))
    text = (tmp_path / "study.tex").read_text()
    assert text.startswith("We compare fedcor, uniform and oort on digits") and "same 14 seeds" in text
    assert text.count(r"\toprule") == 3 and "Established over 14 seeds" in text
    assert (tmp_path / "study.pdf").read_bytes().startswith(b"%PDF")


class Pruned(Exception):
    pass


@pytest.fixture
def tuning(monkeypatch):
    if importlib.util.find_spec("optuna") is None:  # it only draws parameters and decides when to prune
        monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(TrialPruned=Pruned))
    path = ROOT / "examples" / "tuning" / "tune_selector.py"
    spec = importlib.util.spec_from_file_location("tune_selector", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROUNDS, module.TUNING = (4, 8), [100]
    return module


class Trial:
    def __init__(self, prune_at=None):
        self.reported, self.prune_at = {}, prune_at

    def suggest_float(self, name, low, high):
        return (low + high) / 2

    def report(self, value, step):
        self.reported[step] = value

    def should_prune(self):
        return self.prune_at in self.reported


def test_a_trial_reports_by_round_and_is_pruned(tuning):
    trial = Trial()
    end = tuning.objective(trial)
    assert list(trial.reported) == [4, 8] and end == trial.reported[8]
    oort = {"name": "oort", "exploration": 0.525, "penalty": 1.5}
    whole = fc.compare({"tuned": oort}, partition="shards", rounds=8, seeds=[100], quiet=True)
    assert whole.leaderboards()[0].rows[0].terminal.mean == end
    with pytest.raises(tuning.optuna.TrialPruned):
        tuning.objective(Trial(prune_at=4))
    assert len((ROOT / "examples" / "tuning" / "tune_selector.py").read_text().splitlines()) <= 45
