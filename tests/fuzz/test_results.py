"""Damaged results: a clear error, or what can be read."""

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.core.errors import FedcohortError

from .budget import tried, tries
from .odd import damaged
from .sessions import MEMORY

pytest.importorskip("pyarrow")
from fedcohort.report.data import load_bundle
from fedcohort.simulate.store.results import load

LOT = st.integers(0, 2**31 - 1)
NAME = "fedcohort_report_fixtures"


def made(folder: Path) -> Path:
    """Return a small experiment's directory."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, Path(__file__).parent.parent / "report" / "fixtures.py")
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    fixtures = sys.modules[NAME]
    choices = [fixtures.Choice("uniform"), fixtures.Choice("fedcbs")]
    return fixtures.make_experiment(folder / "experiment", choices, seeds=1, rounds=4, clients=6, size=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made(tmp_path_factory.mktemp("results"))


def look(path: Path) -> None:
    results = load(path)
    for run in results.runs:
        results.coverage(run), results.federation(run), results.column(run, "loss")
    len(results.rounds), len(results.clients)
    results.leaderboards()


@tries("results")
@given(lot=LOT)
def test_folders(folder, lot):
    r = Random(lot)
    tried("results")
    place = Path(tempfile.mkdtemp(dir=MEMORY))
    copy = place / "experiment"
    try:
        shutil.copytree(folder, copy)
        file = r.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
        match r.randrange(6):
            case 0:
                file.unlink()
            case 1:
                file.write_bytes(b"")
            case 2 if file.suffix == ".json":
                file.write_text(
                    r.choice(["[]", "{}", "null", "3", '[{"id": 3}]', '{"format": 2}', '{"format": "x"}', "[[]]"])
                )
            case _:
                file.write_bytes(damaged(r, file.read_bytes()))
        for reading in (look, lambda path: load_bundle([path])):
            try:
                reading(copy)
            except FedcohortError as error:
                if len(str(error)) < 10:
                    raise
    finally:
        shutil.rmtree(place)
