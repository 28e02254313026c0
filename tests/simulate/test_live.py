"""What an experiment's directory keeps, and how it is read while the experiment runs and afterwards."""

import contextlib
import sqlite3
import time

import pytest

from fedcohort.core.errors import JournalError
from fedcohort.journal import read_journal
from fedcohort.report.why import explain
from fedcohort.session.explain import explain_round
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import ConfigError
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load

TABLE = {
    "seeds": [3],
    "scenario": {"partition": {"name": "shards", "clients": 12, "per_client": 2}, "failure": 0.3},
    "local": {"batch_size": 8, "steps": 2, "lr": 0.05},
    "run": {"rounds": 6, "cohort": 3, "eval_every": 2, "workers": 1, "shadows": ["fedcbs", "uniform"]},
    "selectors": {"uniform": {}, "fedcbs": {}},
}


def whole(results):
    """Everything about every round and client that the reader knows, but how long the machine took."""
    found = results.rounds.drop_columns("selection_seconds"), results.clients
    return [sorted(table.to_pylist(), key=lambda row: (row["run"], row["round"])) for table in found]


def test_rounds_since_the_last_checkpoint_are_read_like_all_others(tmp_path):
    """While the experiment runs from live.sqlite, afterwards from parts and journals: the reader finds the same."""
    out, seen = tmp_path / "out", []

    class Reads(Listener):
        def on_round(self, run, row):
            time.sleep(0.15)
            seen.append(whole(load(out)))

    table = {**TABLE, "run": {**TABLE["run"], "checkpoint_seconds": 1000.0}}
    simulation = Simulation(Experiment.from_dict(table), out, device="cpu", listeners=[Reads()])
    assert simulation.run() == "finished"
    assert not list(out.glob("live*"))
    after = whole(load(out))
    assert [len(rows) for rows in after] == [12, 36] and any(row["status"] for row in after[1])
    assert len({len(rounds) for rounds, _ in seen}) > 2  # in several steps
    for found in seen:
        known = {(row["run"], row["round"]) for row in found[0]}
        assert found == [[row for row in rows if (row["run"], row["round"]) in known] for rows in after]


def test_what_the_dashboard_read_goes_on_from_where_it_was(tmp_path):
    out, found = tmp_path / "out", []

    class Reads(Listener):
        def on_round(self, run, row):
            found.append(load(out, found[-1] if found else None))
            found[-1].clients, found[-1].rounds  # read now

    table = {**TABLE, "run": {**TABLE["run"], "checkpoint_seconds": 0.0}}
    assert Simulation(Experiment.from_dict(table), out, device="cpu", listeners=[Reads()]).run() == "finished"
    assert whole(load(out, found[-1])) == whole(load(out))


def test_a_spoilt_live_file_hides_nothing_else(tmp_path):
    out = tmp_path / "out"
    assert Simulation(Experiment.from_dict(TABLE), out, device="cpu").run() == "finished"
    expected = whole(load(out))
    for text in (b"", b"no database", b"SQLite format 3\0" + bytes(200)):
        (out / "live.sqlite").write_bytes(text)
        assert whole(load(out)) == expected
        assert explain(load(out).journal("uniform-s3"), 2).explanation.round == 2


def test_every_cohort_is_written_once(tmp_path):
    out = tmp_path / "out"
    assert Simulation(Experiment.from_dict(TABLE), out, device="cpu").run() == "finished"
    files = {"config.toml", "meta.json", "status.json", "runs.json", "federation-0-s3.npz", ".lock"}
    assert {path.name for path in out.iterdir()} - {".workers"} == {*files, "journal", "rounds", "checkpoint"}
    assert not {"cohort", "kept", "clients"} & set(load(out).rounds.column_names)


def test_a_journal_that_is_damaged_is_named(tmp_path):
    out = tmp_path / "out"
    assert Simulation(Experiment.from_dict(TABLE), out, device="cpu").run() == "finished"
    path = load(out).journal("uniform-s3")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "UPDATE cohorts SET clients = (SELECT clients FROM cohorts WHERE ticket = 1) WHERE ticket = 2"
        )
        connection.commit()
    with pytest.raises(JournalError, match=r"uniform-s3\.sqlite is damaged: .*ticket 2"):
        load(out).cohorts("uniform-s3")
    assert len(load(out).cohorts("fedcbs-s3")) == 6
    path.unlink()
    with pytest.raises(JournalError, match="no journal"):
        load(out).cohorts("uniform-s3")


def test_reading_leaves_nothing_behind(tmp_path):
    out = tmp_path / "out"
    assert Simulation(Experiment.from_dict(TABLE), out, device="cpu").run() == "finished"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert load(out).clients.num_rows == 36
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_shadows_are_on_record(tmp_path):
    assert Simulation(Experiment.from_dict(TABLE), tmp_path / "out", device="cpu").run() == "finished"
    journal = read_journal(tmp_path / "out" / "journal" / "uniform-s3.sqlite")
    assert set(explain_round(journal, 2).shadows) == {"fedcbs"}  # nobody shadows himself


def test_a_shadow_must_be_one_of_the_selectors():
    with pytest.raises(ConfigError, match="shadow 'fedcb' is not the label"):
        Experiment.from_dict({**TABLE, "run": {"shadows": ["fedcb"]}})
