"""Configurations, as tables and as text: a clear error, or an experiment that can be written down and built again."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.core.errors import FedcohortError
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import to_toml
from tests.experiments import read

from .budget import tried, tries
from .odd import damaged, odd_toml

LOT = st.integers(0, 2**31 - 1)
WHOLE = {
    "name": "noise",
    "seeds": [0, 1],
    "data": {"name": "digits"},
    "task": {"name": "classification"},
    "scenario": {"partition": {"name": "shards", "clients": 20}, "availability": {"name": "bernoulli"}},
    "model": {"name": "mlp"},
    "local": {"batch_size": 64, "steps": 20, "lr": 0.005},
    "aggregator": {"name": "fedavg"},
    "filter": {"name": "keep-all"},
    "labels": {"name": "counts"},
    "rules": {"min_separation": 2},
    "run": {"rounds": 20, "cohort": 10, "eval_every": 5, "targets": [0.7], "shadows": ["uniform"]},
    "selectors": {"uniform": {}, "ours": {"name": "flash", "local": {"loss": "robust"}}, "fedcor": {"warmup": 3}},
    "sweep": {"ours": {"exploration": [0.1, 0.2]}},
    "settings": [{"name": "quiet", "local": {"lr": 0.1}}, {"name": "other", "scenario": {"preset": "flash-noise"}}],
}


def places(table, path=()):
    """Return the paths of everything in a table."""
    found = [path] if path else []
    items = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def changed(r: Random, table):
    """Return a copy of a table in which some things are others, are gone or are new."""
    copy = _copy(table)
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        path = r.choice(places(copy)) if copy else None
        if path is None:
            break
        parent = copy
        for key in path[:-1]:
            parent = parent[key]
        match r.randrange(5):
            case 0:
                del parent[path[-1]]
            case 1 if isinstance(parent, dict):
                parent[r.choice(["name", "x", "rounds", "lr", "", "préset", "a.b"])] = odd_toml(r)
            case _:
                parent[path[-1]] = odd_toml(r)
    return copy


def _copy(value):
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def attempt(build) -> Experiment | None:
    tried("config")
    try:
        return build()
    except FedcohortError as error:
        if len(str(error)) < 10:
            raise
        return None


@tries("config", of=2)
@given(lot=LOT)
def test_tables(lot):
    table = changed(Random(lot), WHOLE)
    before = repr(table)
    found = attempt(lambda: Experiment.from_dict(table))
    assert repr(table) == before, "a table was changed while it was read"
    if found is not None:
        again = Experiment.from_dict(found.table)
        assert [repr(plan) for plan in again.plans] == [repr(plan) for plan in found.plans]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("configs") / "experiment.toml"


@tries("config", of=2)
@given(lot=LOT)
def test_files(file, lot):
    r = Random(lot)
    try:
        text = to_toml(changed(r, WHOLE) if r.random() < 0.5 else WHOLE).encode()
    except FedcohortError:  # an hour of the day is a value in TOML, and no value of ours
        text = to_toml(WHOLE).encode()
    file.write_bytes(damaged(r, text) if r.random() < 0.8 else text)
    overrides = r.choice(
        [[], ["run.rounds=3"], ["run.rounds"], ["=3"], ["run=3"], ["a.b.c=[1"], ["selectors.x.name=all"]]
    )
    attempt(lambda: read(file, overrides))
