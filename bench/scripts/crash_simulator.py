"""Simulated experiments are killed, or run out of disk: does each one continue to the same results?

    python bench/scripts/crash_simulator.py [--kills 300] [--disks 100] [--seed 0] [--folder DIR] [--write FILE.json]

One small experiment (two lock-step groups, shadows, failures, a filter, SCAFFOLD; a checkpoint after every round) runs
undisturbed. Then it runs again and again, each time with one or more disturbances, and is continued until it is
finished. Rows, run states, every table of every journal, models and selector states must equal those of the undisturbed
experiment bit for bit; only clocks may differ.

Kills are aimed at windows. An audit hook of Python tells them apart by the files that are opened and moved:

    creation       the directory, until meta.json exists
    start          from there to the first checkpoint: journals are created, the first round is run
    first rows     the first checkpoint of a group: its rows are written
    first commit   the first checkpoint of a group: the journals are committed
    first saving   the first checkpoint of a group: its file is written, older ones are removed, the status is updated
    later ...      the same three for a later checkpoint
    end            the merging of parts, the last reports
    resuming       the experiment is killed in a later commit, and again while it is being continued

Within a window, a process dies by SIGKILL at a random event (a call in Python or into C), or at a random instant by a
timer, whose signal may also kill in the middle of a system call.

Full disks need root: each is its own tmpfs, which is filled when a window is entered, except for a random number of
kilobytes. The experiment must stop with a message, not a traceback; then the space is freed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

from fedcohort.core.errors import FedcohortError
from fedcohort.journal import Savepoint, read_journal
from fedcohort.journal.codec import pack
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.listener import Listener
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store import checkpoint as checkpoints
from fedcohort.simulate.store.results import load

TABLE = {
    "name": "crash",
    "seeds": [0],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 60, "classes": 4, "shape": [6]},
    "scenario": {
        "partition": {"name": "shards", "clients": 12, "per_client": 2},
        "latency": {"name": "shifted-exponential"},
        "failure": 0.1,
        "validation": 0.1,
        "server_validation": 3,
    },
    "model": {"name": "logistic"},
    "local": {"batch_size": 8, "steps": 3, "lr": 0.1},
    "run": {
        "rounds": 5, "cohort": 3, "eval_every": 2, "workers": 1, "device": "cpu", "checkpoint_seconds": 0.0,
        "shadows": ["uniform"],
    },
    "selectors": {
        "uniform": {},
        "flash-advantage": {},
        "fedcor": {"warmup": 2, "interval": 2},
        "fedcm-ts": {"filter": {"name": "fedca"}},
        "scaffolded": {"name": "fedcbs", "aggregator": {"name": "scaffold"}},
    },
}  # fmt: skip
KILLS = {  # the weight with which each window is drawn
    "creation": 2, "start": 3, "first rows": 2, "first commit": 8, "first saving": 5,
    "later rows": 2, "later commit": 8, "later saving": 5, "end": 2, "resuming": 5,
}  # fmt: skip
DISKS = {window: weight for window, weight in KILLS.items() if window != "resuming"}
FINISHED, REFUSED, CRASHED = 0, 3, 4  # exit codes of a child
MEBIBYTE = 1 << 20


# -- in the child ------------------------------------------------------------------------------------------------


class Watch:
    """Tracks the process's window by the files it opens and moves, and reports each window it enters."""

    def __init__(self, entered):
        self.entered = entered
        self.window = ""
        self.checkpoints = 0
        self.finishing = False  # whether the last round is over
        sys.addaudithook(self._audit)

    def _audit(self, event, arguments):
        if event == "os.mkdir" and Path(str(arguments[0])).name == "rounds":
            self._enter("creation")
        elif event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(".tmp"):
            name = Path(arguments[0]).name
            if name.startswith(".part-") and self.window != "end":
                self._enter_checkpoint("rows")
            elif name.startswith(".group-"):
                self._enter_checkpoint("saving")
        elif event == "os.rename":
            name = Path(str(arguments[1])).name
            if name == "meta.json":
                self._enter("start")
            elif name.startswith("part-") and "/rounds/" in str(arguments[1]) and self.window != "end":
                self._enter_checkpoint("commit")
            elif name == "runs.json" and self.window.endswith("saving"):
                self.checkpoints += 1
                self._enter("rounds")
        elif event == "sqlite3.connect" and "/journal/" in str(arguments[0]) and self.window == "rounds":
            self.checkpoints = 0  # the next group
            self._enter("start")
        elif event in ("os.scandir", "os.listdir") and str(arguments[0]).endswith("/rounds") and self.finishing:
            self._enter("end")

    def _enter_checkpoint(self, stage):
        self._enter(f"{'later' if self.checkpoints else 'first'} {stage}")

    def _enter(self, window):
        if window != self.window:
            self.window = window
            self.entered(window)


class Killer:
    """Kills this process in the n-th visit to a window, after a number of events or seconds."""

    def __init__(self, window, visit, events=None, seconds=None):
        self.target, self.visit, self.left, self.seconds = window, visit, events, seconds
        self.watch = Watch(self._entered)

    def _entered(self, window):
        sys.setprofile(None)
        if window != self.target:
            return
        if self.visit:
            self.visit -= 1
        elif self.seconds is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # dies at once, wherever the process is
            signal.setitimer(signal.ITIMER_REAL, max(self.seconds, 1e-6))
        else:
            sys.setprofile(self._event)

    def _event(self, *_):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Meter:
    """Counts the events and seconds of each visit to each window in an undisturbed experiment."""

    def __init__(self):
        self.visits = []
        self.watch = Watch(self._entered)
        sys.setprofile(self._event)

    def _entered(self, window):
        self.visits.append([window, 0, time.perf_counter()])

    def _event(self, *_):
        if self.visits:
            self.visits[-1][1] += 1

    def result(self):
        sys.setprofile(None)
        ends = [visit[2] for visit in self.visits[1:]] + [time.perf_counter()]
        return [[w, events, end - began] for (w, events, began), end in zip(self.visits, ends, strict=True)]


class Filler:
    """Fills the disk, except for ``room`` bytes, when a window is entered for the n-th time."""

    def __init__(self, folder, window, visit, room):
        self.ballast, self.target, self.visit, self.room = folder / "ballast", window, visit, room
        self.watch = Watch(self._entered)

    def _entered(self, window):
        if window == self.target:
            if self.visit == 0:
                free = os.statvfs(self.ballast.parent)
                size = free.f_bavail * free.f_frsize - self.room
                if size > 0:
                    descriptor = os.open(self.ballast, os.O_CREAT | os.O_WRONLY)
                    os.posix_fallocate(descriptor, 0, size)
                    os.close(descriptor)
            self.visit -= 1


def experiment(out):
    """Begin or continue the experiment."""
    if (out / "meta.json").exists():
        return Simulation.open(out)
    return Simulation(Experiment.from_dict(TABLE), out)


def work(out, hook, said):
    """Run the experiment in the child, and write how it ended."""
    watcher = hook()
    try:
        simulation = experiment(out)
        simulation.listeners.append(_Ending(watcher))
        simulation.run()
        code = FINISHED
    except FedcohortError as error:
        said.write_text(str(error))
        code = REFUSED
    except BaseException as error:
        import traceback

        said.write_text(f"{error!r}\n{traceback.format_exc()}")
        code = CRASHED
    if isinstance(watcher, Meter):
        said.write_text(json.dumps(watcher.result()))
    return code


class _Ending(Listener):
    """Tells the watch when the last round is over."""

    def __init__(self, watcher):
        self.watch = getattr(watcher, "watch", None)
        self.left = 0

    def on_start(self, runs, rounds_done, rounds_total):
        self.left = rounds_total - rounds_done

    def on_round(self, run, row):
        self.left -= 1
        if self.left <= 0 and self.watch is not None:
            self.watch.finishing = True


# -- in the parent -----------------------------------------------------------------------------------------------


def child(out, hook, said):
    """Fork a child that works; return its exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        code = CRASHED
        try:
            code = work(out, hook, said)
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def bits(value):
    """Return a value that compares bits: NaN equals NaN, minus zero differs from zero."""
    if isinstance(value, np.ndarray):
        return pack(value)
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def journal_content(path):
    """Return every table of a journal, without clocks."""
    with contextlib.closing(read_journal(path)) as journal:
        tickets = [row.ticket for row in journal.cohorts()]
        shadows = list(journal.meta()["shadows"])
        return bits(
            {
                "cohorts": [
                    (
                        c.ticket,
                        c.round,
                        c.told_at is None,
                        c.wanted,
                        c.clients,
                        c.weights,
                        c.work,
                        dict(c.notes),
                        c.stop,
                    )
                    for c in journal.cohorts()
                ],
                "candidates": [journal.candidates(t, journal.table()[0].n) for t in tickets],
                "replies": [
                    (b.ticket, b.late, b.clients, b.status, b.kept, dict(b.metrics)) for b in journal.reply_blocks()
                ],
                "scores": [journal.scores(t) for t in tickets],
                "states": {name: journal.state(name) for name in ("", *shadows)},
                "metrics": {str(k): v for k, v in journal.metrics().items()},
                "events": [journal.events(kind) for kind in ("shadow", "filter", "excluded", "abandoned")],
            }
        )


def checkpoint_content(folder):
    """Return models, memories and session states of every group, but not how the journal numbers its blocks."""
    groups = {}
    for number in checkpoints.all_newest(folder):
        point = checkpoints.Checkpoint.from_bytes(checkpoints.newest(folder, number).read_bytes())
        arrays = {name: value for name, value in point.arrays.items() if not name.startswith("session/")}
        sessions = {
            name: Savepoint.from_bytes(value.tobytes()).states
            for name, value in point.arrays.items()
            if name.startswith("session/")
        }
        groups[str(number)] = bits({"facts": point.facts, "arrays": arrays, "sessions": sessions})
    return groups


def content(out):
    """Return all results of an experiment."""
    results = load(out)
    tables = {}
    for kind in ("rounds", "clients"):
        rows = getattr(results, kind).to_pylist()
        for row in rows:
            row.pop("selection_seconds", None)
        key = ("run", "round", "client") if kind == "clients" else ("run", "round")
        tables[kind] = bits(sorted(rows, key=lambda row: [row[name] for name in key]))
    return {
        **tables,
        "runs": [(r.id, r.state, r.reason, r.rounds_done, r.federation, r.params) for r in results.runs],
        "state": results.status["state"],
        "journals": {run.id: journal_content(results.journal(run)) for run in results.runs},
        "checkpoints": checkpoint_content(out / "checkpoint"),
        "files": sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.suffix in (".npz", ".parquet", ".tmp")),
    }


def differences(one, other):
    """Return the names of the parts in which two experiments differ."""
    return [name for name in one if one[name] != other[name]]


class Trial:
    """One disturbed experiment."""

    def __init__(self, folder, number):
        self.home = folder / f"trial-{number}"
        self.out = self.home / "out"
        self.said = folder / f"said-{number}.txt"

    def __enter__(self):
        self.home.mkdir()
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.home, ignore_errors=True)
        self.said.unlink(missing_ok=True)

    def disturb(self, hook):
        return child(self.out, hook, self.said)

    def verdict(self, expected):
        """Continue undisturbed; return "identical", or what went wrong."""
        code = child(self.out, lambda: None, self.said)
        if code != FINISHED:
            return f"cannot be continued: {self.said.read_text() if self.said.exists() else code}"
        parts = differences(expected, content(self.out))
        return f"differs in {', '.join(parts)}" if parts else "identical"


def drawn(rng, visits, window):
    """Draw a point in a window: which visit, and after how many events or seconds."""
    ours = [visit for visit in visits if visit[0] == window]
    place = rng.randrange(len(ours))
    _, events, seconds = ours[place]
    if rng.random() < 0.5:
        return {"visit": place, "events": rng.randrange(max(events, 1))}
    return {"visit": place, "seconds": rng.random() * seconds}


def kill(trial, rng, visits, window):
    """Kill the experiment once or twice in a window; return whether it died."""
    target = "later commit" if window == "resuming" else window
    point = drawn(rng, visits, target)
    died = trial.disturb(lambda: Killer(target, **point)) < 0
    if window == "resuming" and died:
        events = rng.randrange(20_000)

        def begin():
            killer = Killer("nowhere", 0, events=events)
            sys.setprofile(killer._event)
            return killer

        died = trial.disturb(begin) < 0
    return died


def kills(folder, count, rng, visits, expected, tell):
    verdicts = {window: Counter() for window in KILLS}
    done = 0
    while done < count:
        window = rng.choices(list(KILLS), list(KILLS.values()))[0]
        with Trial(folder, done) as trial:
            if not kill(trial, rng, visits, window):
                verdicts[window]["(the point was not reached; not counted)"] += 1
                continue
            done += 1
            verdicts[window][trial.verdict(expected)] += 1
        tell(f"{done} of {count} kills", verdicts)
    return verdicts


def disks(folder, count, rng, visits, expected, tell):
    verdicts = {window: Counter() for window in DISKS}
    ended = Counter()
    done = 0
    while done < count:
        window = rng.choices(list(DISKS), list(DISKS.values()))[0]
        places = [visit for visit in visits if visit[0] == window]
        visit, room = rng.randrange(len(places)), rng.choice([0, 4096, 16384, 65536, 262144]) + rng.randrange(65536)
        with Trial(folder, f"disk-{done}") as trial, mounted(trial.home):
            code = trial.disturb(partial(Filler, trial.home, window, visit, room))
            if code == FINISHED:  # there was enough space
                continue
            done += 1
            ended[{REFUSED: "a sentence", CRASHED: "a traceback"}.get(code, f"signal {-code}")] += 1
            if code == CRASHED:
                tell(trial.said.read_text(), {})
            (trial.home / "ballast").unlink(missing_ok=True)
            verdicts[window][trial.verdict(expected)] += 1
        tell(f"{done} of {count} full disks", verdicts)
    return verdicts, ended


@contextlib.contextmanager
def mounted(folder):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={24 * MEBIBYTE}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--disks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", type=Path, help="JSON file for the counts")
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    began = time.monotonic()
    printed_at = [0.0]

    def tell(text, verdicts):
        bad = sum(n for counts in verdicts.values() for what, n in counts.items() if what[0] not in "i(")
        if time.monotonic() - printed_at[0] > 10 or not verdicts:
            printed_at[0] = time.monotonic()
            print(f"{text}{f', {bad} not identical' if verdicts else ''}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="fedcohort-crash-", dir=options.folder) as name:
        folder = Path(name)
        with Trial(folder, "whole") as trial, Trial(folder, "measured") as measured:
            assert child(trial.out, lambda: None, trial.said) == FINISHED, trial.said.read_text()
            expected = content(trial.out)
            assert child(measured.out, Meter, measured.said) == FINISHED, measured.said.read_text()
            visits = json.loads(measured.said.read_text())
            assert differences(expected, content(measured.out)) == []
        missing = set(DISKS) - {visit[0] for visit in visits}
        assert not missing, f"windows that were never entered: {missing}"
        killed = kills(folder, options.kills, rng, visits, expected, tell)
        filled, ended = {}, Counter()
        if options.disks:
            filled, ended = disks(folder, options.disks, rng, visits, expected, tell)
    summary = {
        "kills": {window: dict(counts) for window, counts in killed.items()},
        "full_disks": {window: dict(counts) for window, counts in filled.items()},
        "full_disks_ended_with": dict(ended),
        "seconds": round(time.monotonic() - began, 1),
        "python": platform.python_version(),
    }
    print(json.dumps(summary, indent=1))
    if options.write:
        options.write.write_text(json.dumps(summary, indent=1) + "\n")
    verdicts = [what for group in (killed, filled) for counts in group.values() for what in counts]
    valid = all(what == "identical" or what.startswith("(") for what in verdicts)
    return 0 if valid and set(ended) <= {"a sentence"} else 1


if __name__ == "__main__":
    sys.exit(main())
