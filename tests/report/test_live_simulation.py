"""The dashboard follows a real simulation: a round is shown and explained within two seconds of its end."""

import threading
import time
from contextlib import closing

import pytest

from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.errors import FedcohortError
from fedcohort.core.protocol import SELECTORS, RoundReport, RoundRequest
from fedcohort.journal.live import LiveRounds, read_with_live
from fedcohort.report.dashboard.feed import ExperimentItem
from fedcohort.session import Session
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation

TABLE = {
    "seeds": [0],
    "scenario": {"partition": {"name": "shards", "clients": 12, "per_client": 2}},
    "local": {"batch_size": 8, "steps": 2, "lr": 0.05},
    "run": {"rounds": 25, "cohort": 3, "workers": 1, "checkpoint_seconds": 1000.0},
    "selectors": {"uniform": {}},
}


def shown(item):
    """The rounds the dashboard can show, as (run, round)."""
    last = {line["id"]: line["round"] for line in item.detail().get("table", ())}
    return [(run, round_) for run, newest in last.items() if newest is not None for round_ in range(newest + 1)]


class Paced(Listener):
    """Records when each round ended, and is slow, like rounds of a larger model."""

    def __init__(self):
        self.ended = {}

    def on_round(self, run, row):
        self.ended[row["round"]] = time.monotonic()
        time.sleep(0.2)


@pytest.mark.clock
def test_rounds_appear_within_two_seconds(tmp_path):
    paced = Paced()
    simulation = Simulation(Experiment.from_dict(TABLE), tmp_path / "out", device="cpu", listeners=[paced])
    worker = threading.Thread(target=simulation.run)
    worker.start()
    item, seen = ExperimentItem(tmp_path / "out", "out"), {}
    while worker.is_alive():
        item.poll()
        now = time.monotonic()
        for _, round_ in shown(item):
            seen.setdefault(round_, now)
        time.sleep(0.1)
    worker.join()
    before_the_end = [r for r in range(20) if r in seen]  # long before any checkpoint
    assert before_the_end == list(range(20))
    assert max(seen[r] - paced.ended[r] for r in before_the_end) < 2.0


@pytest.mark.clock
def test_every_round_shown_can_be_explained_while_the_simulation_runs(tmp_path):
    table = {
        **TABLE,
        "seeds": [0, 1],
        "selectors": {"uniform": {}, "fedcbs": {}},
        "run": {**TABLE["run"], "rounds": 12},
    }
    item, failed, asked = ExperimentItem(tmp_path / "out", "out"), [], set()

    class Clicks(Listener):
        """Clicks on every round the dashboard shows, after each round, before any checkpoint."""

        def on_round(self, run, row):
            time.sleep(0.06)
            item.poll()
            for name, round_ in set(shown(item)) - asked:
                asked.add((name, round_))
                cohort = [member["client"] for member in item.cohort(name, round_)]
                try:
                    found = item.why(name, round_, cohort[0])
                    assert found["was_picked"] and found["status"] == "OK"
                    assert sorted(str(r["client"]) for r in found["picked"]) == sorted(cohort)
                    assert item.why(name, round_, None)["picked"] == found["picked"]
                except FedcohortError as error:
                    failed.append((name, round_, error.message))

    simulation = Simulation(Experiment.from_dict(table), tmp_path / "out", device="cpu", listeners=[Clicks()])
    assert simulation.run() == "finished"
    assert failed == [] and len(asked) > 30
    assert not (tmp_path / "out" / "live.sqlite").exists()
    # afterwards, the journals have every round
    item.poll()
    assert len(shown(item)) == 48
    assert all(item.why(name, round_, None)["round"] == round_ for name, round_ in shown(item))


def test_copies_end_with_the_journal_and_begin_after_it(tmp_path):
    path, live = tmp_path / "run.sqlite", tmp_path / "live.sqlite"
    session = Session(SELECTORS.create("fedcbs"), table_of(8), seed=1, journal=path, commit="manual")
    copies = LiveRounds(live, {"run": session.journal, "other": session.journal})

    def play(rounds):
        for _ in range(rounds):
            cohort = session.ask(RoundRequest(size=3))
            session.tell(RoundReport(cohort.ticket, cohort.clients, [0, 0, 0]))

    def seen():
        with closing(read_with_live(path, live, "run")) as journal:
            rows = journal.cohorts()
            return [row.round for row in rows], [len(journal.replies(row.ticket)) for row in rows]

    play(2)
    assert seen() == ([], [])  # nothing is durable, nothing copied
    copies.publish([])
    assert seen() == ([0, 1], [3, 3])
    play(1)
    copies.publish([])
    session.commit()
    assert seen() == ([0, 1, 2], [3, 3, 3])  # in both, shown once
    copies.forget(copies.mark())
    play(1)
    copies.publish([])
    assert seen() == ([0, 1, 2, 3], [3, 3, 3, 3])
    copies.close()
    assert seen()[0] == [0, 1, 2] and not live.exists()
    session.close()


def table_of(n):
    return ClientTable(sizes=[10.0] * n, labels=LabelCounts([[5.0, 5.0]] * n))


@pytest.mark.slow
def test_rounds_of_every_process_are_shown_before_they_are_handed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcohort.simulate.processes.local._HAND_OVER_SECONDS", 1000.0)
    table = {
        **TABLE,
        "seeds": [0],
        "selectors": {"uniform": {}, "fedcbs": {}},
        "settings": [{"name": "one"}, {"name": "two", "local": {"batch_size": 4}}],
        "run": {**TABLE["run"], "rounds": 200, "checkpoint_seconds": 1000.0},
    }
    out = tmp_path / "out"
    simulation = Simulation(Experiment.from_dict(table), out, device="cpu", processes=2)
    assert len(simulation.prepared.groups) == 2
    ended = []
    thread = threading.Thread(target=lambda: ended.append(simulation.run()))
    item = ExperimentItem(out, "out")
    thread.start()
    seen, explained = set(), 0
    while thread.is_alive():
        time.sleep(0.1)
        if not (out / "meta.json").exists():
            continue
        item.poll()
        early = not list((out / "rounds").glob("*.parquet"))
        for name, round_ in shown(item) if early else ():
            seen.add(name)
            if round_ % 50 == 7 and explained < 10:
                explained += 1
                cohort = [member["client"] for member in item.cohort(name, round_)]
                picked = item.why(name, round_, None)["picked"]
                assert cohort and sorted(str(row["client"]) for row in picked) == sorted(cohort)
    thread.join()
    assert ended == ["finished"]
    assert len(seen) == 4 and explained, "nothing was seen before the end"
    item.poll()
    assert len(shown(item)) == 4 * 200 and not list(out.glob("live*"))
