"""Reading experiments: finished, unfinished, damaged, several at once."""

from __future__ import annotations

import json
import os

import numpy as np
import pyarrow as pa
import pytest

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.report.dashboard.watcher import Watcher
from fedcohort.report.data import load_bundle
from fedcohort.simulate.store.parts import part_bytes, part_files, read_part, rounds_schema
from fedcohort.simulate.store.results import RunInfo, load
from fedcohort.simulate.store.writer import lock_folder


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_runs_become_arrays(small):
    bundle = load_bundle([small])
    (setting,) = bundle.settings
    assert [g.label for g in setting.groups] == ["uniform", "fedcm-ts", "power-of-choice"]
    assert bundle.n_runs == 6 and not bundle.warnings
    table = load(small).rounds.to_pylist()
    for run in setting.runs:
        rows = sorted((row for row in table if row["run"] == run.id), key=lambda row: row["round"])
        assert run.round.tolist() == [row["round"] for row in rows]
        want = [np.nan if row["accuracy"] is None else row["accuracy"] for row in rows]
        np.testing.assert_allclose(run.values["accuracy"], want)
        cohorts = load(small).cohorts(run.id)
        picks = [(row["round"], c) for row, cohort in zip(rows, cohorts, strict=True) for c in cohort.tolist()]
        assert list(zip(run.pick_round.tolist(), run.pick_client.tolist(), strict=True)) == picks
        both = [row["bytes_down"] + row["bytes_up"] + row["query_bytes_down"] + row["query_bytes_up"] for row in rows]
        np.testing.assert_allclose(run.total_bytes, np.cumsum(both))


def test_colours_follow_from_position(toy, tmp_path):
    choices = [toy.Choice("fedcm-ts"), toy.Choice("uniform"), toy.Choice("fedcbs")]
    bundle = load_bundle([toy.make_experiment(tmp_path / "a", choices, seeds=1, rounds=3, clients=8, size=2)])
    assert {g.label: g.color for g in bundle.settings[0].groups} == {"fedcm-ts": 0, "uniform": 1, "fedcbs": 2}


def test_a_running_experiment_says_so(toy, tmp_path):
    running = toy.start_experiment(tmp_path / "going", seeds=1, rounds=20, clients=8, size=2)
    with pytest.raises(InputError, match="No round"):
        load_bundle([running.path])
    running.play(5)
    bundle = load_bundle([running.path])
    assert bundle.settings[0].running
    assert any("still running (15 of 60 rounds)" in text for text in bundle.warnings)


def test_a_process_that_is_gone_is_noticed(toy, tmp_path):
    """Only the lock counts, because another process may have the same number by now."""
    running = toy.start_experiment(tmp_path / "dead", seeds=1, rounds=20, clients=8, size=2)
    running.play(2)
    rewrite(running.path / "status.json", pid=os.getpid())
    watcher = Watcher(running.path)
    with lock_folder(running.path):
        assert any("still running" in text for text in load_bundle([running.path]).warnings)
        watcher.poll()
        (item,) = watcher.items.values()
        assert item.overview()["state"] == "running"
    assert any("process that wrote it is gone" in text for text in load_bundle([running.path]).warnings)
    before = item.version
    watcher.poll()
    line = item.overview()
    assert line["state"] == "killed" and line["left"] is None and "--resume" in line["message"]
    assert item.version > before


@pytest.mark.parametrize(("state", "words"), [("interrupted", "--resume"), ("failed", "the disk is full")])
def test_a_run_that_ended_early_says_why(small, state, words):
    rewrite(small / "status.json", state=state, message="the disk is full")
    assert any(words in text for text in load_bundle([small]).warnings)


def test_a_diverged_run_is_named(small):
    runs = json.loads((small / "runs.json").read_text())
    runs[1].update(state="diverged", reason="loss is NaN")
    (small / "runs.json").write_text(json.dumps(runs))
    assert any(f"Run {runs[1]['id']} diverged" in text for text in load_bundle([small]).warnings)


def test_damaged_directories_are_refused_with_the_reason(small, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("hello")
    for path, words in (
        (empty, "empty"),
        (foreign, "is not a fedcohort experiment"),
        (tmp_path / "nowhere", "no experiment at"),
    ):
        with pytest.raises(FedcohortError, match=words):
            load_bundle([path])
    rewrite(small / "meta.json", format=99)
    with pytest.raises(FedcohortError, match="newer fedcohort"):
        load_bundle([small])
    rewrite(small / "meta.json", format=2)
    (small / "config.toml").unlink()
    with pytest.raises(FedcohortError, match="half-written"):
        load_bundle([small])
    with pytest.raises(InputError, match="at least one"):
        load_bundle([])


def test_without_the_federation_only_its_figure_is_missing(small):
    for file in small.glob("federation-*.npz"):
        file.unlink()
    bundle = load_bundle([small])
    assert bundle.settings[0].federation() is None
    assert any("Figures of the scenario are left out" in text for text in bundle.warnings)


def test_a_round_written_twice_counts_once(small):
    from fedcohort.simulate.store.writer import ExperimentWriter

    table = load(small).rounds
    again = table.slice(0, 6)
    ExperimentWriter(small).append(again.cast(rounds_schema()))
    before = {run.id: len(run.round) for run in load_bundle([small]).settings[0].runs}
    assert set(before.values()) == {10}
    assert isinstance(table, pa.Table)


def test_of_experiments_that_are_set_up_alike_the_newer_runs_count(toy, tmp_path):
    one = toy.make_experiment(tmp_path / "one", [toy.Choice("uniform")], seeds=1, rounds=4, clients=8, size=2)
    two = toy.make_experiment(
        tmp_path / "two", [toy.Choice("uniform"), toy.Choice("fedcbs")], seeds=1, rounds=4, clients=8, size=2
    )
    started(one, "2026-01-01"), started(two, "2026-01-02")
    bundle = load_bundle([one, two])
    assert [g.label for g in bundle.settings[0].groups] == ["uniform", "fedcbs"]
    assert [run.federation.split(":")[0] for run in bundle.settings[0].runs] == [str(two)] * 2
    assert any("newer runs are shown: uniform" in text for text in bundle.warnings)


def test_experiments_that_are_set_up_differently_are_not_mixed(toy, tmp_path):
    old = toy.make_experiment(tmp_path / "old", [toy.Choice("uniform")], seeds=1, rounds=4, clients=8, size=2)
    new = toy.make_experiment(tmp_path / "new", [toy.Choice("uniform")], seeds=1, rounds=5, clients=8, size=2)
    started(old, "2026-01-01"), started(new, "2026-01-02")
    for path, rounds in ((old, 4), (new, 5)):
        text = (path / "config.toml").read_text()
        (path / "config.toml").write_text(f"{text}\n[task]\nname = 'classification-{rounds}'\n")
    bundle = load_bundle([old, new])
    assert bundle.paths == (new,) and bundle.settings[0].rounds == 5
    assert any("left out: old" in text and "task.name" in text for text in bundle.warnings)


def started(path, day):
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "created": day}))


def test_settings_are_kept_apart(toy, tmp_path):
    path = toy.make_experiment(
        tmp_path / "sweep", [toy.Choice("uniform")], seeds=2, rounds=4, clients=12, size=2,
        settings=({"name": "small"}, {"name": "large", "size": 5}),
    )  # fmt: skip
    bundle = load_bundle([path])
    assert [s.name for s in bundle.settings] == ["small", "large"]
    assert all(len(s.runs) == 2 for s in bundle.settings)


def test_targets_come_from_the_configuration(toy, tmp_path):
    path = toy.make_experiment(
        tmp_path / "aimed", [toy.Choice("uniform")], seeds=1, rounds=4, clients=8, size=2,
        extra_config="[run]\ntargets = [0.8, 0.7]\nterminal = 3\n",
    )  # fmt: skip
    bundle = load_bundle([path])
    options = bundle.settings[0].options
    assert options.targets == (0.8, 0.7) and options.terminal == 3
    assert isinstance(load(path).runs[0], RunInfo)


def test_what_an_earlier_version_did_not_measure_is_unknown(toy, tmp_path):
    path = toy.make_experiment(tmp_path / "a", [toy.Choice("uniform")], seeds=1, rounds=3, clients=8, size=2)
    for part in part_files(path / "rounds").values():
        part.write_bytes(part_bytes(read_part(part).drop_columns(["macro_f1", "selection_seconds"])))
    results = load(path)
    assert results.rounds.column_names == rounds_schema().names
    assert np.isnan(results.column(results.runs[0], "macro_f1")).all() and len(results.score(results.runs[0])) == 3
