"""Damage a journal in many ways, and count what is refused, what changes nothing, and what goes unnoticed.

    python bench/scripts/journal_damage.py [--times 600] [--seed 0]

Each trial damages a copy of one journal: single bits of each of its files, the file or its companion cut off somewhere,
pages replaced or swapped, the companion lost, an older copy put back. Then the journal is read and its session
continues for two rounds. "Harmless" means that everything reads as before and the cohorts are the same.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from fedcohort import ClientTable, Session, Signal, Status, create
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.journal import database, read_journal
from fedcohort.journal.maintenance import tables
from fedcohort.session.rules import Rules

PAGE = 4096
ROUNDS = 60
KILLED_ROUNDS = 20  # SQLite copies a companion of 1,000 pages to the main file
ENDS = ("", "-wal", ".lock")
Damage = Callable[[Path, random.Random], None]


def play(session: Session) -> tuple[str, ...]:
    """Play one round, whose report depends only on the round."""
    cohort = session.ask(RoundRequest(size=3))
    status = [Status.FAILED if i == cohort.round % 5 else Status.OK for i in range(cohort.size)]
    metrics = {Signal.LOSS: 1.0 + cohort.clients + 0.25 * cohort.round}
    session.tell(RoundReport(cohort.ticket, cohort.clients, status, metrics), host={"model": cohort.round})
    session.record(cohort.round, {"accuracy": 0.1 * cohort.round})
    return cohort.names


def write(path: Path, rounds: int) -> Session:
    """Return a session with a shadow, rules, attributes, and members that come and go."""
    names = [f"clinic-{i}" for i in range(9)]
    session = Session(
        create("active-fl"),
        ClientTable(names=names[:8], sizes=range(10, 18)),
        seed=4,
        journal=path,
        shadows={"u": create("uniform")},
        rules=Rules(blocked=(names[5],), max_participations=400),
    )
    for round_ in range(rounds):
        if round_ == 2:
            session.join(ClientTable(names=names[8:], sizes=[30]))
            session.set_attributes({names[2]: {"battery": 0.5}})
        if round_ == 4:
            session.abandon(session.ask(RoundRequest(size=2, available=[0, 2, 3, 4])).ticket, "the power failed")
        play(session)
    return session


def written_and_killed(path: Path) -> None:
    child = os.fork()
    if child == 0:
        # All events since the first are in the companion only: neither the clock nor SQLite copies them.
        database.CHECKPOINT_SECONDS = float("inf")
        session = write(path, KILLED_ROUNDS)
        assert session.round == KILLED_ROUNDS
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def contents(path: Path) -> str:
    """Return everything that can be read from a journal."""
    with closing(read_journal(path)) as journal:
        rows = journal.cohorts()
        table, active = journal.table()
        return repr([
            journal.meta(), rows, tables(journal), journal.attributes(), active.tolist(), table.names,
            table.sizes.tolist(), [journal.state(name) for name in ("", "u")],
            [journal.scores(row.ticket) for row in rows], [journal.exclusions(row.ticket) for row in rows],
            [journal.candidates(row.ticket, table.n).tolist() for row in rows],
        ])  # fmt: skip


def flip(end: str, within: int | None = None) -> Damage:
    def damage(path: Path, rng: random.Random) -> None:
        file = Path(f"{path}{end}")
        data = bytearray(file.read_bytes())
        bit = rng.randrange(8 * min(len(data), within or len(data)))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)

    return damage


def cut(end: str) -> Damage:
    def damage(path: Path, rng: random.Random) -> None:
        file = Path(f"{path}{end}")
        os.truncate(file, rng.randrange(file.stat().st_size))

    return damage


def replace_page(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    page, other = rng.sample(range(len(data) // PAGE), 2)
    news = (bytes(PAGE), rng.randbytes(PAGE), data[other * PAGE :][:PAGE])
    path.write_bytes(data[: page * PAGE] + rng.choice(news) + data[(page + 1) * PAGE :])


def swap_pages(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    pages = [data[i : i + PAGE] for i in range(0, len(data), PAGE)]
    one, other = rng.sample(range(len(pages)), 2)
    pages[one], pages[other] = pages[other], pages[one]
    path.write_bytes(b"".join(pages))


def lose(*ends: str) -> Damage:
    def damage(path: Path, _: random.Random) -> None:
        for end in ends:
            os.unlink(f"{path}{end}")

    return damage


def both(first: Damage, second: Damage) -> Damage:
    def damage(path: Path, rng: random.Random) -> None:
        first(path, rng)
        second(path, rng)

    return damage


def copied(path: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for end in ENDS:
        if Path(f"{path}{end}").exists():
            shutil.copy(f"{path}{end}", folder)
    return folder / path.name


def tried(path: Path, damage: Damage, times: int, rng: random.Random, folder: Path) -> Counter[str]:
    """Damage copies of a journal and count what became of them."""
    expected = contents(copied(path, folder))
    with Session.open(folder / path.name) as session:
        following = [play(session) for _ in range(2)]
    found: Counter[str] = Counter()
    for _ in range(times):
        file = copied(path, folder)
        damage(file, rng)
        try:
            same = contents(file) == expected
            with Session.open(file) as session:
                same &= [play(session) for _ in range(2)] == following
        except JournalError:
            found["refused"] += 1
        else:
            found["harmless" if same else "SILENT"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=600, help="trials of the frequent kinds of damage")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    many, some = options.times, options.times // 4
    with tempfile.TemporaryDirectory() as place:
        closed, killed, older = (Path(place) / f"{name}.sqlite" for name in ("closed", "killed", "older"))
        write(closed, ROUNDS).close()
        written_and_killed(killed)
        write(older, ROUNDS // 2).close()
        old = older.read_bytes()
        with Session.open(older) as session:
            for _ in range(ROUNDS // 2):
                play(session)
        cases: list[tuple[str, Path, Damage, int]] = [
            ("a bit of a closed journal", closed, flip(""), many),
            ("a bit of SQLite's header", closed, flip("", 100), many),
            ("a bit of the file, session killed", killed, flip(""), many),
            ("a bit of -wal", killed, flip("-wal"), many),
            ("a bit of .lock", killed, flip(".lock"), many),
            ("the file cut off", closed, cut(""), some),
            ("-wal cut off", killed, cut("-wal"), some),
            ("-wal cut off, .lock lost", killed, both(cut("-wal"), lose(".lock")), some),
            ("-wal lost", killed, lose("-wal"), 1),
            ("-wal and .lock lost", killed, lose("-wal", ".lock"), 1),
            ("an older copy put back", older, lambda path, _: path.write_bytes(old) and None, 1),
            ("a page replaced", closed, replace_page, some),
            ("two pages swapped", closed, swap_pages, some),
        ]
        print("| damage | times | refused | nothing different | silently different |\n|---|--:|--:|--:|--:|")
        for name, path, damage, times in cases:
            found = tried(path, damage, times, rng, Path(place) / "copy")
            print(f"| {name} | {times} | {found['refused']} | {found['harmless']} | {found['SILENT']} |", flush=True)


if __name__ == "__main__":
    main()
