"""The walk through a round in docs/design.md, held against a round: every file it passes is named, and is there."""

import re
import sys
from pathlib import Path

import pytest

import fedcohort
from fedcohort.simulate.config import Experiment
from fedcohort.simulate.runner import Simulation

SOURCES = Path(fedcohort.__file__).parent
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
EXPERIMENT = {
    "seeds": [1],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 60, "classes": 4, "shape": [6]},
    "scenario": {
        "partition": {"name": "client-heterogeneity", "clients": 8, "alpha": 1.0},
        "validation": 0.2,
        "latency": {"name": "shifted-exponential"},
        "availability": {"name": "bernoulli", "probabilities": [0.9] * 8},
    },
    "model": {"name": "mlp-64"},
    "local": {"batch_size": 7, "epochs": 1, "lr": 0.1},
    "run": {"rounds": 2, "cohort": 3, "patience": 2},
}
# Called by everything everywhere; a walk that named them at each step would tell nothing.
GROUND = {"arrays.py", "params.py", "registry.py", "specs.py", "errors.py", "guard.py"}


@pytest.fixture(scope="module")
def walk():
    text = DESIGN.read_text()
    section = text[text.index("## One walk through a round") : text.index("## Decisions")]
    return section[: section.index("Over Flower")]


def test_every_file_of_the_walk_is_there(walk):
    for name in re.findall(r"`([\w/]+\.py)`", walk):
        places = [SOURCES / name, SOURCES / "simulate" / "engine" / name]
        assert any(place.exists() for place in places), name
    for name in re.findall(r"`(\w+)/`", walk):
        assert (SOURCES / name).is_dir() or (SOURCES / "simulate" / "engine" / name).is_dir(), name


@pytest.mark.parametrize("selector", ["power-of-choice", "fedcor", "fedacs"])
def test_every_file_a_round_passes_is_in_the_walk(selector, walk, tmp_path):
    changes = {"selectors": {selector: {"warmup": 1} if selector == "fedcor" else {}}}
    simulation = Simulation(Experiment.from_dict({**EXPERIMENT, **changes}), tmp_path / "out", device="cpu")
    passed: set[str] = set()

    def note(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(SOURCES)):
            passed.add(Path(name).relative_to(SOURCES).as_posix())

    from fedcohort.simulate.group import Group

    step = Group.step

    def traced(*args, **kwargs):
        sys.setprofile(note)
        try:
            return step(*args, **kwargs)
        finally:
            sys.setprofile(None)

    Group.step = traced
    try:
        simulation.run()
    finally:
        Group.step = step
    assert "simulate/group.py" in passed and "session.py" in passed
    named = set(re.findall(r"`([\w/]+\.py)`", walk))
    folders = tuple(f"{name}/" for name in re.findall(r"`(\w+)/[`.]", walk))
    missing = {
        name
        for name in passed
        if name not in named
        and not name.startswith(folders)
        and not (name.startswith("simulate/engine/") and name.rsplit("/", 1)[1] in named)
        and name.rsplit("/", 1)[-1] not in GROUND
    }
    assert sorted(missing) == []
