"""A selector in a file outside the package works everywhere, like one of fedcohort's own."""

import doctest
import itertools
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

from fedcohort import Session
from fedcohort.cli.flower import app_files
from fedcohort.core.errors import InputError, JournalError, UnknownNameError
from fedcohort.core.protocol import SELECTORS
from fedcohort.journal import read_journal
from fedcohort.report.dashboard.watcher import Watcher
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import ConfigError
from fedcohort.simulate.store.results import load
from tests.experiments import read

DOCS = Path(__file__).parents[2] / "docs" / "writing-a-selector.md"

OWN = '''
"""The least recently trained first."""
from dataclasses import dataclass

import numpy as np

from fedcohort import Cohort, Selector, Signal, per_client, register
from fedcohort.core.top import top_k
from fedcohort.core.params import Interval, param
from fedcohort.core.plots import Intervals, Picture


@dataclass(frozen=True)
class Waiting:
    since: np.ndarray = per_client()


def waits(record):
    since = record.rounds - 1 - record.state["since"]
    return Intervals(since, since, since, text=f"{record.opening} client {int(since.argmax())} has waited longest.")


@register("NAME")
@dataclass(frozen=True, kw_only=True)
class Mine(Selector[Waiting]):
    """Those who have waited longest."""

    pictures = (Picture("waits", "Who waits", "rounds", waits),)
    jitter: float = param(0.0, Interval(float, 0, None), "random rounds added to each wait")

    @property
    def requires(self):
        return frozenset({Signal.KEPT})

    def init(self, clients, rng):
        return Waiting(np.full(clients.n, -1.0))

    def select(self, state, slate, answer, rng):
        waited = slate.round - slate.of_candidates(state.since)
        score = waited + self.jitter * rng.random(len(waited))
        picked = slate.candidates[top_k(score, slate.size, rng)]
        return Cohort(picked, candidates=slate.candidates, score=score, parts={"waited": waited}), state

    def update(self, state, outcome):
        since = state.since.copy()
        since[outcome.clients] = outcome.round
        return Waiting(since)


class Half(Selector[Waiting]):
    """Not finished."""


NOTHING = 3
'''

CONFIG = """
name = "tiny"
[data]
name = "synthetic"
samples = 300
test_samples = 80
classes = 4
shape = [6]
[scenario]
partition = {name = "shards", clients = 10, per_client = 2}
server_validation = 5
[model]
name = "logistic"
[local]
steps = 3
batch_size = 8
lr = 0.1
[run]
rounds = 6
cohort = 3
workers = 1
device = "cpu"
"""
_names = itertools.count()


@pytest.fixture
def own(tmp_path):
    """The file and the name it registers, which differs in every test because a name is registered once."""
    name = f"own-{next(_names)}"
    (tmp_path / "mine.py").write_text(OWN.replace("NAME", name))
    (tmp_path / "tiny.toml").write_text(CONFIG)
    return tmp_path, name


def test_it_is_compared_reported_explained_watched_and_resumed(own, command):
    folder, name = own
    done = command(
        *("compare", "tiny.toml", "--selectors", "uniform,mine.py:Mine", "--out", "runs/out"),
        *("-s", f'run.shadows=["{name}"]'),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
    assert f"{name} comes with the filter 'fedca'" in " ".join(done.stderr.split())
    out = folder / "runs" / "out"
    found = load(out)
    assert [run.label for run in found.runs] == ["uniform", name]
    assert found.config["selectors"][name]["name"] == f"{folder.resolve()}/mine.py:Mine"
    assert found.config["selectors"][name]["filter"]["name"] == "fedca"
    page = command("report", out, cwd=folder)
    assert page.returncode == 0, page.stderr
    text = next(folder.rglob("*.html")).read_text()
    assert "Who waits" in text and "has waited longest" in text
    why = command("explain", out, "--run", f"{name}-s0", "--round", "3")
    assert why.returncode == 0 and "waited" in why.stdout
    shadowed = command("explain", out, "--run", "uniform-s0", "--round", "3")
    assert f"shadow {name} would have picked" in shadowed.stdout
    watcher = Watcher(folder / "runs")
    watcher.poll()
    assert watcher.items["out"].why(f"{name}-s0", 3, None)["parts"] == ["waited"]


def test_it_is_resumed_by_another_process_in_another_folder(own, tmp_path_factory):
    from fedcohort.simulate.rounds.listener import Listener
    from fedcohort.simulate.runner import Simulation

    class Stop(Listener):
        def on_round(self, run, row):
            simulation.stop()

    folder, name = own
    (folder / "tiny.toml").write_text(CONFIG + '[selectors.mine]\nname = "mine.py:Mine"\n')
    simulation = Simulation(read(folder / "tiny.toml"), folder / "out", listeners=[Stop()])
    assert simulation.run() == "interrupted"
    done = subprocess.run(
        [sys.executable, "-m", "fedcohort.cli.app", "run", "--resume", str(folder / "out"), "--quiet"],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert load(folder / "out").rounds.num_rows == 6
    report = [sys.executable, "-m", "fedcohort.cli.app", "report", str(folder / "out"), "-o", str(folder / "page.html")]
    page = subprocess.run(report, capture_output=True, text=True, timeout=120, check=True)
    assert "--selector" in page.stderr
    subprocess.run([*report, "--selector", f"{folder}/mine.py:Mine"], capture_output=True, timeout=120, check=True)
    assert "Who waits" in (folder / "page.html").read_text()
    journal = folder / "out" / "journal" / "mine-s0.sqlite"
    assert Session.open(journal).round == 6
    with closing(read_journal(journal)) as record:
        assert record.meta()["selector"]["name"] == name


def test_a_journal_says_that_its_selectors_file_is_gone(own):
    from fedcohort.core.selector_spec import rebuild_selector

    folder, _ = own
    spec = {"name": "long-gone", "class": "m:Mine", "reference": f"{folder}/gone.py:Mine", "params": {}}
    with pytest.raises(JournalError, match=r"gone\.py:Mine"):
        rebuild_selector(spec, None, folder / "x.sqlite")


def test_a_flower_app_includes_the_file(own, monkeypatch):
    folder, name = own
    monkeypatch.chdir(folder)
    files = app_files("app", "mine.py:Mine")
    assert files["app/mine_selector.py"] == (folder / "mine.py").read_text()
    table = tomllib.loads(files["experiment.toml"])
    assert table["selectors"][name] == {"name": "app/mine_selector.py:Mine"}
    assert table["filter"] == {"name": "fedca"} and table["scenario"]["server_validation"] == 5
    app = folder / "app"
    for path, text in files.items():
        (app / path).parent.mkdir(parents=True, exist_ok=True)
        (app / path).write_text(text.replace(f'register("{name}")', f'register("{name}-app")'))
    experiment = read(app / "experiment.toml")  # from another folder
    assert type(experiment.plans[0].selector).__name__ == "Mine"


def test_the_tutorials_selector_passes_the_check(tmp_path, command):
    examples = doctest.DocTestParser().get_examples(DOCS.read_text())
    kept = list(itertools.takewhile(lambda e: "Session(" not in e.source, examples))
    (tmp_path / "tutorial.py").write_text("".join(e.source for e in kept if "import ClientTable" not in e.source))
    target = ("check", "tutorial.py:LongestWaiting")
    done = command(*target, cwd=tmp_path)
    assert done.returncode == 1 and "fails 1 of" in " ".join(done.stderr.split())
    done = command(*target, "--skip", "documentation=cites no paper", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "skipped" in done.stdout and "cites no paper" in done.stdout and "1 skipped" in done.stderr
    done = command(*target, "--skip", "documentaton", cwd=tmp_path)
    assert done.returncode == 1 and "did you mean 'documentation'?" in done.stderr


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("gone.py:Mine", "There is no file 'gone.py'"),
        ("mine.py:Mien", "did you mean 'mine.py:Mine'?"),
        ("mine.py:NOTHING", "is a int: 3, not a Selector"),
        ("mine.py:Waiting", "is the class Waiting, not a Selector"),
        ("mine.py:Half", "init, select, update"),
        ("broken.py:Mine", "cannot be imported: NameError"),
        ("no.such.module:Mine", "cannot be imported"),
    ],
)
def test_bad_references_change_nothing(own, command, reference, message):
    folder, _ = own
    (folder / "broken.py").write_text("nonsense\n")
    done = command("compare", "tiny.toml", "--selectors", f"uniform,{reference}", "--out", "out", cwd=folder)
    assert done.returncode == 1
    assert message in " ".join(done.stderr.split())
    assert not (folder / "out").exists()


def test_a_file_may_have_the_name_of_a_module(own, monkeypatch):
    folder, name = own
    monkeypatch.chdir(folder)
    (folder / "mine.py").rename(folder / "random.py")
    assert SELECTORS.get("random.py:Mine") is SELECTORS.get(f"{folder}/random.py:Mine") is SELECTORS.get(name)
    import random

    assert hasattr(random, "randint")


def test_an_unregistered_class_is_known_by_its_class_name(tmp_path, command):
    (tmp_path / "plain.py").write_text(
        "from dataclasses import dataclass\nfrom fedcohort.selectors import Uniform\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Plain(Uniform):\n    'Uniform under another name.'\n"
    )
    cls = SELECTORS.get(f"{tmp_path}/plain.py:Plain")
    assert cls.name == "Plain" and "Plain" not in SELECTORS.names()
    with pytest.raises(ConfigError, match="speed"):
        Experiment.from_dict({"selectors": {"p": {"name": f"{tmp_path}/plain.py:Plain", "speed": 3}}})
    with pytest.raises(UnknownNameError, match="no file"):
        SELECTORS.get("plain-not-here.py:Plain")
    with pytest.raises(InputError, match="Selector"):
        SELECTORS.get("json:JSONDecoder")
