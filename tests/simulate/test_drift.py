"""Data that change while a run goes on."""

import numpy as np
import pytest

import fedcohort as fc
from fedcohort.advice.drift import changes
from fedcohort.advice.record import read_record
from fedcohort.core.errors import ParameterError, ScenarioError
from fedcohort.scenario import Scenario

LABELS = np.repeat(np.arange(10), 60)
PARTITION = {"name": "class-heterogeneity", "clients": 12, "alpha": 0.5}


def both(drift, **more):
    scenario = Scenario.from_dict({"partition": PARTITION, "drift": drift, **more})
    after = scenario.build(LABELS, seed=3)
    return scenario.before(after, seed=3), after


@pytest.mark.parametrize("kind", ["class", "shares", "stream"])
def test_before_a_drift_nobody_has_what_is_new_and_all_have_as_much(kind):
    before, after = both({"kind": kind, "at": 5, "share": 0.2})
    assert (before.sizes == after.sizes).all() and (LABELS[before.indices] == before.true_labels).all()
    if kind == "class":
        assert before.label_counts()[:, 8:].sum() == 0 < after.label_counts()[:, 8:].sum()
    elif kind == "shares":
        share = before.label_counts()[:, 5:].sum() / after.label_counts()[:, 5:].sum()
        assert 0.75 < share < 0.95
    else:
        for c in range(12):
            mine, later = before.indices[before.owner == c], after.indices[after.owner == c]
            assert set(mine) < set(later) and len(set(mine)) == np.ceil(0.8 * len(later))


def test_sensors_are_those_of_the_shift_only_afterwards():
    before, after = both({"kind": "sensors"}, shift={"views": ["relabel"], "share": 0.5})
    assert before.groups is None and after.groups.kind == "view"
    assert (before.true_labels == LABELS[before.indices]).all()
    assert not (after.true_labels == LABELS[after.indices]).all()
    with pytest.raises(ScenarioError):
        both({"kind": "sensors"})
    with pytest.raises(ParameterError):
        both({"kind": "no-such"})


def run(tmp_path, name, drift, **more):
    table = {
        "data": {"name": "synthetic", "samples": 800, "test_samples": 300, "difficulty": 0.2},
        "local": {"epochs": 1, "batch_size": 16, "lr": 0.2},
        "run": {"rounds": 40, "cohort": 8, "processes": 1},
        "scenario": {"partition": PARTITION, **({} if drift is None else {"drift": drift}), **more},
    }
    results = fc.run(table, out=tmp_path / name, quiet=True)
    return results, results.column(results.runs[0], "accuracy")


def test_a_class_that_appears_is_learned_only_then_and_a_late_drift_changes_nothing(tmp_path):
    _, plain = run(tmp_path, "plain", None)
    _, drifted = run(tmp_path, "class", {"kind": "class", "at": 20, "share": 0.4})
    _, later = run(tmp_path, "never", {"kind": "class", "at": 1000, "share": 0.4})
    assert drifted[19] < 0.65 < plain[19] and drifted[39] > drifted[19] + 0.15
    assert (drifted[:20] == later[:20]).all()
    assert later[39] < 0.65


def test_a_journal_shows_that_sensors_were_replaced(tmp_path):
    drift = {"kind": "sensors", "at": 20}
    results, _ = run(tmp_path, "sensors", drift, shift={"views": ["relabel"], "share": 1.0})
    (found,) = [
        change for change in changes(read_record(results.journal(results.runs[0]))) if "How well" in change.what
    ]
    assert found.found and abs(found.round - 20) < 8
