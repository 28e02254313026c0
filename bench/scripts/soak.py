"""A week of abuse: does a session lose anything, let anything in, or grow?

    python bench/scripts/soak.py [--selectors uniform,fedcbs,...] [--seconds 540] [--workers 1]
        [--folder FOLDER]
    python bench/scripts/soak.py --folder FOLDER --summary      # results so far as JSON and a picture

100,000 clients, 2,000 rounds of 100, day and night, 20% failures, clients that join, leave and return. Each selector
plays the week twice: once undisturbed in one process, and once with a process that is killed with SIGKILL at a random
instant every 50 rounds, with garbage in 1% of the replies, a whole report of garbage in every twentieth round, late
replies, a disk that is full twice, and a journal that is pruned every day. Both weeks must choose the same cohorts and
end in the same state.

It stops after ``--seconds`` or Ctrl-C, and continues when it is started again with the same ``--folder``; without one,
it works in a temporary folder and removes it. The full disk is a small tmpfs if mounting is allowed (root), otherwise a
limit on the size of files. None stays mounted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
from soak_picture import draw
from soak_week import Host, Plan, Room

import fedcohort
from fedcohort.core.protocol import SELECTORS
from fedcohort.journal import read_journal

KILL_EVERY = 50
PRUNE_EVERY = 6  # kills, which take about a day
KEEP = 100  # rounds whose scores are kept
DEFAULT = "uniform,balanced,flash-advantage,fedcbs-chance,fedcor"
OUT = Path(__file__).parents[1] / "results" / "soak.json"
PICTURE = Path(__file__).parents[2] / "docs" / "img" / "soak.svg"


class Week:
    """One week of one selector in its own folder, with its progress on disk."""

    def __init__(self, plan: Plan, folder: Path, disturbed: bool, until: float) -> None:
        self.plan, self.disturbed, self.until = plan, disturbed, until
        self.folder = folder / ("disturbed" if disturbed else "quiet")
        self._stand_at = self.folder / "stand.json"
        self.stand = {"kills": 0, "starts": 0, "seconds": 0.0, "done": False, "prunes": []}
        if self._stand_at.exists():
            self.stand = json.loads(self._stand_at.read_text())
        self.room: Room | None = None
        self.journal = self.folder / ("disk/journal.sqlite" if disturbed else "journal.sqlite")

    def _save(self, **changes) -> None:
        self.stand.update(changes)
        self._stand_at.write_text(json.dumps(self.stand))

    def live(self) -> bool:
        """Play until the week or the time of this call is over; return whether the week is over."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            if self.disturbed:
                self.room = stack.enter_context(mounted(self.folder / "disk"))
            return self._live()

    def _live(self) -> bool:
        while not self.stand["done"]:
            if time.time() > self.until:
                return False
            begun = time.time()
            code, reached = self._process()
            self._save(starts=self.stand["starts"] + 1, seconds=self.stand["seconds"] + time.time() - begun)
            if code == -signal.SIGKILL and reached == "kill":
                self._save(kills=self.stand["kills"] + 1)
                if self.disturbed and self.stand["kills"] % PRUNE_EVERY == 0:
                    self._prune()
            elif code == 0:
                self._save(done=True)
            elif code not in (75, -signal.SIGKILL):
                last = (self.folder / "host.log").read_text().splitlines()[-20:]
                raise SystemExit("\n".join([f"{self.plan.selector}: the host ended with {code}", *last]))
            print(f"{self.plan.selector} {self.folder.name}: {self.stand}", flush=True)
        return True

    def _process(self) -> tuple[int, str]:
        """Start a host and kill it at its instant; return its exit code and why it ended: "kill", "time" or "end"."""
        if self.room is not None:
            self.room.widen()
        number, draw_ = self.stand["kills"], np.random.default_rng([self.plan.seed, 99, self.stand["kills"]])
        kill_at = KILL_EVERY * number + int(draw_.integers(KILL_EVERY)) if self.disturbed else self.plan.rounds + 1
        fraction = float(draw_.random())
        arguments = [sys.executable, __file__, "--host", str(self.folder), "--selectors", self.plan.selector]
        arguments += ["--clients", str(self.plan.clients), "--rounds", str(self.plan.rounds)]
        arguments += ["--room", self.room.how if self.room else ""]
        with (self.folder / "host.log").open("a") as log:
            # A session of its own, so that Ctrl-C stops this process only, and this one ends the host.
            host = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        assert host.stdout is not None
        spent, last = [1.0], time.time()
        for line in host.stdout:
            now, round_ = time.time(), int(line)
            spent, last = [*spent[-20:], now - last], now
            if round_ >= kill_at:
                time.sleep(fraction * float(np.median(spent)))  # anywhere in the round
                host.send_signal(signal.SIGKILL)
                host.wait()
                return host.returncode, "kill"
            if now > self.until:
                host.send_signal(signal.SIGKILL)
                host.wait()
                return host.returncode, "time"
        return host.wait(), "end"

    def _prune(self) -> None:
        size = self.journal.stat().st_size
        said = prune(self.journal)
        after = self.journal.stat().st_size
        self._save(prunes=[*self.stand["prunes"], {"before": size, "after": after, "said": said}])

    def lines(self, name: str) -> list[dict]:
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def prune(journal: Path) -> str:
    """Call ``fedcohort journal prune`` and return what it says."""
    command = [sys.executable, "-c", "from fedcohort.cli.app import main; main()", "journal", "prune"]
    command += [str(journal), "--keep", str(KEEP)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, start_new_session=True).stdout.strip()


@contextmanager
def mounted(folder: Path) -> Iterator[Room]:
    """A disk that can be full: a tmpfs if mounting is allowed, otherwise a folder with limited file sizes.

    Before and after, the files lie in the folder itself.
    """
    aside = folder.with_name("aside")
    folder.mkdir(exist_ok=True)
    aside.mkdir(exist_ok=True)
    if not os.path.ismount(folder):  # it is if this script was killed
        move(folder, aside)
        mount = ["mount", "-t", "tmpfs", "-o", "size=4g", "fedcohort-soak", str(folder)]
        subprocess.run(mount, capture_output=True, check=False)
    try:
        move(aside, folder)
        yield Room(folder, "tmpfs" if os.path.ismount(folder) else "file limit")
    finally:
        if os.path.ismount(folder):
            move(folder, aside)
            subprocess.run(["umount", str(folder)], check=True)
            move(aside, folder)


def move(source: Path, target: Path) -> None:
    for path in source.iterdir():
        shutil.move(path, target / path.name)


def play(weeks: list[Week], workers: int) -> None:
    """Play all weeks; Ctrl-C and SIGTERM end them after their round."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(workers) as pool:
        ends = [pool.submit(week.live) for week in weeks]
        try:
            wait(ends)
        except KeyboardInterrupt:
            for week in weeks:
                week.until = 0.0
    for end in ends:
        end.result()


# -- results ---------------------------------------------------------------------------------------------------------


def difference(quiet: Path, disturbed: Path) -> str | None:
    """Return the first difference of two journals in what a selector or a proof reads, or None."""
    with closing(read_journal(quiet)) as a, closing(read_journal(disturbed)) as b:
        ours, theirs = a.cohorts(), b.cohorts()
        for one, other in zip(ours, theirs, strict=False):
            same = (one.ticket, one.round, one.n_candidates) == (other.ticket, other.round, other.n_candidates)
            for name in ("clients", "weights", "work"):
                x, y = getattr(one, name), getattr(other, name)
                same = same and ((x is None and y is None) or np.array_equal(x, y))
            if not same or one.told_at is None or other.told_at is None:
                return f"the cohort of round {one.round}"
            mine, its = ([r for r in j.reply_blocks(one.ticket) if not r.late] for j in (a, b))
            if [(r.clients.tolist(), r.status.tolist()) for r in mine] != [
                (r.clients.tolist(), r.status.tolist()) for r in its
            ]:
                return f"the replies of round {one.round}"
        if len(ours) != len(theirs):
            return f"{len(ours)} cohorts and {len(theirs)}"
        left, right = a.state(""), b.state("")
        for name, value in left.items():
            if name not in right or np.asarray(value).tobytes() != np.asarray(right[name]).tobytes():
                return f"the field {name!r} of the last state"
        (table, active), (table_, active_) = a.table(), b.table()
        if table.n != table_.n or not np.array_equal(active, active_):
            return "the members"
        return None


def slope(x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[float, float]:
    """Return the slope of y over x that all groups share, each with its own intercept, and its standard error."""
    x, y = x.astype(float).copy(), y.astype(float).copy()
    for g in np.unique(group):
        inside = group == g
        x[inside] -= x[inside].mean()
        y[inside] -= y[inside].mean()
    b = float(x @ y / (x @ x))
    freedom = max(len(x) - len(np.unique(group)) - 1, 1)
    return b, float(np.sqrt(((y - b * x) ** 2).sum() / freedom / (x @ x)))


def fitted(week: Week) -> dict:
    """Return how memory and journal grow with the rounds.

    Undisturbed: within a process, without its first 50 rounds. Disturbed: across the processes, each just before it is
    killed, so that growth shows which comes from reading a longer journal after a restart.
    """
    samples = week.lines("samples")
    born: dict[int, int] = {}
    last: dict[int, dict] = {}
    for s in samples:
        born.setdefault(s["pid"], s["round"])
        last[s["pid"]] = s
    chosen = list(last.values()) if week.disturbed else [s for s in samples if s["round"] >= born[s["pid"]] + 50]
    rounds, rss, pids = (np.array([s[key] for s in chosen]) for key in ("round", "rss", "pid"))
    group = np.zeros(len(chosen)) if week.disturbed else pids
    if len(chosen) < len(np.unique(group)) + 2:
        return {"processes": len(born), "samples": len(chosen), "missing": "memory: too few samples for a line"}
    figures = {
        "processes": len(born),
        "samples": len(chosen),
        "rss_mean_mb": round(float(rss.mean()) / 1e6, 1),
        "rss_max_mb": round(float(rss.max()) / 1e6, 1),
    }
    for key in ("rss", "held", "blocks"):
        values = np.array([s[key] for s in chosen], float)  # NaN if the C library does not tell
        figures[f"{key}_slope_per_round"], figures[f"{key}_slope_standard_error"] = (
            round(number, 1) for number in slope(rounds, values, group)
        )
    if not week.disturbed:
        x = np.array([s["round"] for s in samples], float)
        y = np.array([s["db"] for s in samples], float)
        late = x >= x.max() / 10
        line = np.polyfit(x[late], y[late], 1)
        rest = y[late] - np.polyval(line, x[late])
        figures["journal_bytes_per_round"] = round(float(line[0]), 1)
        figures["journal_linear_r2"] = round(1 - float(rest.var() / y[late].var()), 6)
        figures["wal_max_mb"] = round(max(s["-wal"] for s in samples) / 1e6, 2)
    return figures


def counted(notes: list[dict], kind: str) -> int:
    return sum(note["count"] for note in notes if note["kind"] == kind)


def summary(plan: Plan, folder: Path) -> dict | None:
    quiet, disturbed = (Week(plan, folder, which, 0) for which in (False, True))
    missing = [week for week in (quiet, disturbed) if not week.stand["done"]]
    for week in missing:
        reached = week.lines("samples")[-1]["round"] if week.lines("samples") else 0
        print(f"{plan.selector}: the {week.folder.name} week is missing; it is at round {reached:,} of {plan.rounds:,}")
    if missing:
        return None
    notes = disturbed.lines("notes")
    pruned = folder / "pruned.sqlite"
    for path in folder.glob("pruned.sqlite*"):
        path.unlink()
    shutil.copyfile(quiet.journal, pruned)
    before = pruned.stat().st_size
    prune(pruned)
    wrong = difference(quiet.journal, disturbed.journal)
    return {
        "selector": plan.selector,
        "clients": plan.clients,
        "rounds": plan.rounds,
        "cohort": plan.cohort,
        "identical": wrong is None,
        "first_difference": wrong,
        "kills": disturbed.stand["kills"],
        "starts": disturbed.stand["starts"],
        "garbage_replies": counted(notes, "garbage replies"),
        "garbage_reports_refused": counted(notes, "garbage reports"),
        "late_replies": counted(notes, "late replies"),
        "full_disks": [note for note in notes if note["kind"] == "full disk"],
        "prunes_on_the_way": disturbed.stand["prunes"],
        "pruned_at_the_end": {"keep": KEEP, "before": before, "after": pruned.stat().st_size},
        "seconds": {"quiet": round(quiet.stand["seconds"]), "disturbed": round(disturbed.stand["seconds"])},
        "quiet": fitted(quiet),
        "disturbed": fitted(disturbed),
        "curves": {
            w.folder.name: [[s[k] for k in ("round", "rss", "db", "pid", "held")] for s in w.lines("samples")[::2]]
            for w in (quiet, disturbed)
        },
    }


def plan_of(name: str, clients: int | None, rounds: int | None) -> Plan:
    changes = {key: value for key, value in (("clients", clients), ("rounds", rounds)) if value is not None}
    return Plan(name, **changes)


def write(folder: Path, names: list[str], clients: int | None, rounds: int | None, out: Path, picture: Path) -> None:
    summaries = [summary(plan_of(name, clients, rounds), folder / name) for name in names]
    done = [entry for entry in summaries if entry is not None]
    if not done:
        print("No selector has both weeks, so nothing is written.")
        return
    machine = {"machine": platform.machine(), "python": platform.python_version(), "cores": os.cpu_count()}
    machine["fedcohort"] = fedcohort.__version__
    out.write_text(json.dumps({"machine": machine, "selectors": done}, indent=None, separators=(",", ":")) + "\n")
    picture.write_text(draw(done))
    for entry in done:
        brief = {key: value for key, value in entry.items() if key != "curves"}
        print(json.dumps(brief, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--selectors", default=DEFAULT)
    parser.add_argument("--clients", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after this time; the next call continues"
    )
    parser.add_argument("--workers", type=int, default=1, help="weeks to play at once, each on one core")
    parser.add_argument(
        "--folder", type=Path, help="folder for journals and progress; default: a temporary one, removed at the end"
    )
    parser.add_argument(
        "--summary", action="store_true", help="only write the JSON and the picture of the weeks that are complete"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--host", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--room", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.selectors.split(",")
    for name in names:
        SELECTORS.create(name)  # an unknown name is an error now, not after an hour
    if options.host is not None:
        plan = plan_of(names[0], options.clients, options.rounds)
        Host(plan, options.host, Room(options.host / "disk", options.room) if options.room else None).play()
        return
    if options.summary and options.folder is None:
        parser.error("--summary needs the --folder of the weeks")
    with ExitStack() as stack:
        temporary = options.folder is None
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedcohort-soak-")))
        if not options.summary:
            until = time.time() + options.seconds
            plans = [plan_of(name, options.clients, options.rounds) for name in names]
            weeks = [Week(plan, folder / plan.selector, which, until) for plan in plans for which in (True, False)]
            play(weeks, options.workers)
            if not all(week.stand["done"] for week in weeks):
                go_on = "only with --folder can it go on later" if temporary else "the same command goes on from here"
                print(f"Stopped before the end; {go_on}.")
        write(folder, names, options.clients, options.rounds, options.out, options.picture)


if __name__ == "__main__":
    main()
