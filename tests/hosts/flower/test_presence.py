"""Another process can see whether a live run is alive, what it waits for and who is offline, however it ends."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.strategy import FedAvg
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.hosts.flower import FederationTimeoutError, cohort_client
from fedcohort.journal import read_journal
from fedcohort.journal.presence import MAX_OFFLINE, Presence, RunState, run_state
from fedcohort.report.dashboard.watcher import Watcher
from fedcohort.report.exposition import exposition
from fedcohort.selectors import Uniform
from fedcohort.session import Session


def now(path: Path) -> RunState:
    record = read_journal(path)
    try:
        return run_state(record)
    finally:
        record.close()


def metrics(path: Path) -> dict[str, float]:
    lines = [line.replace('journal="run"', "").replace("{,", "{") for line in exposition({"run": path}).splitlines()]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def line_of(path: Path) -> dict[str, Any]:
    watcher = Watcher(path.parent)
    watcher.poll()
    return watcher.items[path.name].overview()


SERVER = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
import conftest
from flwr.serverapp.strategy import FedAvg
from fedcohort.hosts.flower import pulse

pulse.BEAT_SECONDS = 0.2

class Real(conftest.Clock):
    now = property(lambda self: time.monotonic(), lambda self, value: None)
    def sleep(self, seconds):
        time.sleep(min(seconds, 0.05))

fleet = conftest.Fleet(Real())
fleet.fill(4)
def latency(message):
    if message.metadata.message_type == "train" and message.content["config"]["server-round"] == 3:
        fleet.grid.nodes.pop(fleet.grid.node_of("client-3"), None) if len(fleet.grid.nodes) == 4 else None
        return 100_000.0
    return 0.01
for node in fleet.grid.nodes.values():
    node.latency = latency
strategy = fleet.strategy("uniform", FedAvg(fraction_evaluate=0.0), cohort_size=2, journal=Path(sys.argv[1]))
strategy.start(fleet.grid, conftest.model(), num_rounds=20)
"""


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.clock
def test_a_server_that_is_killed_is_seen_to_be(tmp_path: Path) -> None:
    """After SIGKILL in the middle of a round, only the free lock shows that the run has ended."""
    path = tmp_path / "run.sqlite"
    script = SERVER.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", script, str(path)], env={**os.environ, "OMP_NUM_THREADS": "1"}) as run:
        try:
            wait_for(lambda: path.exists() and line_of(path)["done"] == 2, run)
            wait_for(lambda: bool(line_of(path)["offline"]), run)  # who went while the round lasts
            line = line_of(path)
            assert (line["state"], line["total"], line["online"]) == ("running", 20, 3) and line["left"] > 0
            (away,) = line["offline"]
            assert away["client"] == "client-3" and time.time() - 60 < away["since"] <= time.time()
            first = metrics(path)
            wait_for(lambda: metrics(path)["fedcohort_heartbeat_timestamp_seconds{}"] > time.time() - 1, run)
            wait_for(
                lambda: (
                    metrics(path)["fedcohort_heartbeat_timestamp_seconds{}"]
                    > first["fedcohort_heartbeat_timestamp_seconds{}"] + 0.5
                ),
                run,
            )
            assert first['fedcohort_run_state{state="running"}'] == 1
            assert (first["fedcohort_clients_online{}"], first["fedcohort_clients_offline{}"]) == (3, 1)
            assert first["fedcohort_rounds_planned{}"] == 20
            assert first['fedcohort_client_offline_since_timestamp_seconds{client="client-3"}'] == away["since"]
            watcher = Watcher(path)
            watcher.poll()
            (item,) = watcher.items.values()
            before = item.version
        finally:
            run.send_signal(signal.SIGKILL)
    watcher.poll()
    line = item.overview()
    assert item.version > before and line["state"] == "killed" and line["left"] is None and line["offline"] == []
    assert "start the run again" in line["message"]
    last = metrics(path)
    assert [last[f'fedcohort_run_state{{state="{s}"}}'] for s in ("running", "killed")] == [0, 1]
    assert "fedcohort_heartbeat_timestamp_seconds{}" in last and "fedcohort_clients_online{}" not in last
    told = CliRunner().invoke(app, ["explain", str(path)]).output
    assert "2 of 20 rounds, killed" in " ".join(told.split())
    assert "client-3" in path.with_name("run.sqlite.live").read_text()
    with Session.open(path) as session:  # whoever opens it next closes it
        session.forget("client-3")
    assert not path.with_name("run.sqlite.live").exists()
    assert now(path).state == "stopped" and line_of(path)["state"] == "stopped"


def test_a_round_of_hours_is_no_idle_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.sqlite"
    real = time.time
    with Session(Uniform(), ClientTable(names=["anna", "ben"]), journal=path) as session:
        monkeypatch.setattr(time, "time", lambda: real() - 7200)
        cohort = session.ask(RoundRequest(1))
        monkeypatch.undo()
        assert line_of(path)["state"] == "running"
        session.note("planned", {"rounds": 10})
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        for _ in range(2):  # three quick rounds, and one that lasts: the end is not near
            cohort = session.ask(RoundRequest(1))
            session.tell(RoundReport(cohort.ticket, cohort.clients))
        session.ask(RoundRequest(1))
        assert line_of(path)["left"] < 60
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        line = line_of(path)
        monkeypatch.undo()
        assert line["state"] == "running" and line["left"] > 3600
    assert line_of(path)["state"] == "stopped"  # nobody is at work on it, and it was closed


def test_what_a_run_waits_for_is_seen_from_outside(fleet: Any, kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    seen: list[tuple[dict[str, Any], dict[str, float]]] = []
    fleet.clock.at.append((3.0, lambda: [fleet.grid.remove(fleet.grid.node_of(f"client-{i}")) for i in range(3)]))
    fleet.clock.at.append((30.0, lambda: seen.append((line_of(path), metrics(path)))))
    fleet.clock.at.append((40.0, lambda: [fleet.grid.add(fleet.node(i)) for i in range(2)]))
    fleet.clock.at.append((43.0, lambda: seen.append((line_of(path), metrics(path)))))
    began = time.time()
    strategy = fleet.strategy("uniform", FedAvg(fraction_evaluate=0.0), cohort_size=2, wait_for=5, journal=path)
    strategy.start(fleet.grid, kit.model(), num_rounds=8)
    (line, numbers), (later, _) = seen
    assert line["state"] == "waiting" and line["message"] == "3 of 5 clients have been online"
    assert began <= line["since"] <= time.time() and line["left"] is None
    assert [c["client"] for c in line["offline"]] == ["client-0", "client-1", "client-2"] and line["online"] == 3
    assert (
        numbers['fedcohort_run_state{state="waiting"}']
        == 1
        == sum(value for name, value in numbers.items() if name.startswith("fedcohort_run_state"))
    )
    assert numbers["fedcohort_waiting_since_timestamp_seconds{}"] == line["since"]
    assert (later["state"], later["online"], later["offline_count"]) == ("running", 5, 1)
    assert [c["client"] for c in later["offline"]] == ["client-2"]
    assert line_of(path)["state"] == "finished" and Presence.of(path) is None


def test_a_run_that_has_no_journal_yet_is_seen(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    """The status shows at once that a new federation waits, and later why it gave up."""
    fleet, path = empty_fleet, tmp_path / "new" / "run.sqlite"
    fleet.fill(1)
    seen: list[dict[str, Any]] = []
    fleet.clock.at.append((10.0, lambda: seen.append(line_of(path))))
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, wait_for=3, patience=20.0, journal=path)
    with pytest.raises(FederationTimeoutError):
        strategy.start(fleet.grid, kit.model(), num_rounds=8)
    (line,) = seen
    assert (line["state"], line["total"], line["online"]) == ("waiting", 8, 1)
    assert line["message"] == "1 of the 3 clients needed can take part"
    line = line_of(path)
    assert line["state"] == "failed" and "Waited 20 s for 3 clients" in line["message"]
    assert metrics(path)['fedcohort_run_state{state="failed"}'] == 1
    fleet.fill(3)
    fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=path).start(fleet.grid, kit.model(), num_rounds=2)
    assert line_of(path)["state"] == "finished"


def test_a_failed_run_that_was_started_again_runs(fleet: Any, kit: Any, tmp_path: Path) -> None:
    """The end in the journal belongs to an earlier start."""
    path = tmp_path / "run.sqlite"

    def broken(message: Any, context: Any) -> Any:
        raise ValueError("out of memory")

    for node in fleet.grid.nodes.values():
        node.app = cohort_client(kit.client_app(broken), kit.ANSWERS)
    strategy = fleet.strategy("uniform", FedAvg(), cohort_size=2, journal=path, tries=1)
    with pytest.raises(Exception, match="no model in"):
        strategy.start(fleet.grid, kit.model(), num_rounds=2)
    assert now(path).state == "failed" and "no model in" in now(path).why
    seen: list[str] = []
    again = kit.Fleet()
    again.fill(1)
    again.clock.at.append((5.0, lambda: seen.append(now(path).state)))
    again.clock.at.append((6.0, lambda: [again.grid.add(again.node(i)) for i in range(1, 6)]))
    again.strategy("uniform", FedAvg(), cohort_size=2, journal=path, wait_for=4).start(again.grid, kit.model(), 2)
    assert seen == ["waiting"] and now(path).state == "finished"


def test_looking_never_keeps_a_session_from_its_journal(tmp_path: Path) -> None:
    """A reader shares the lock for a moment, but a session that needs it at that time still gets it."""
    path = tmp_path / "run.sqlite"
    Session(Uniform(), ClientTable(names=["anna", "ben"]), journal=path).close()
    with Path(f"{path}.lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.05, lambda: fcntl.flock(looking, fcntl.LOCK_UN)).start()
        Session.open(path).close()
    with Session.open(path), pytest.raises(JournalError, match="another process"):
        Session.open(path)


def test_what_lies_beside_a_journal_may_be_anything(tmp_path: Path) -> None:
    """A status file that is damaged, a link or a directory is ignored and never written through."""
    path, live = tmp_path / "run.sqlite", tmp_path / "run.sqlite.live"
    with Session(Uniform(), ClientTable(names=["anna", "ben"]), journal=path):
        for text in ("", "{", "[]", "null", '{"state": "running"}', "[" * 100_000, '{"offline": 3}'):
            live.write_text(text)
            assert now(path).state == "running" and metrics(path)['fedcohort_run_state{state="running"}'] == 1
        valid = asdict(Presence("running", 1.0, at=time.time(), generation=run_generation(path), planned=3, online=1))
        for key in ("since", "at", "generation", "planned", "online", "offline_count"):
            for odd in (math.inf, 10**400, "9" * 5000, {}):
                live.write_text(json.dumps({**valid, key: odd}))
                assert now(path).state == "running", (key, odd)
        live.unlink()
        other = tmp_path / "other"
        other.write_text("mine")
        live.symlink_to(other)
        Presence("running", time.time()).write(path)
        assert other.read_text() == "mine" and not live.is_symlink()
        many = {f"client-{i}": 1.0 + i for i in range(MAX_OFFLINE)}
        generation = run_generation(path)
        said = Presence("running", 1.0, at=2.0, generation=generation, online=1, offline=many, offline_count=5000)
        said.write(path)
        numbers = metrics(path)
        assert sum("client_offline_since" in name for name in numbers) == 100
        assert numbers["fedcohort_clients_offline{}"] == 5000


def run_generation(path: Path) -> int:
    from fedcohort.audit.verification import examine

    head = examine(path, replay=False).head
    assert head is not None
    return head.generation
