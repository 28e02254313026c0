"""A life of a session: every event in any order, well meant or not, with an oracle after each.

What must hold: an error is the library's own and leaves session and journal as they were; a session that is opened
again, or from a copy of its files as a kill would leave them, is the one that was there and chooses the same.
"""

import contextlib
import shutil
import tempfile
from pathlib import Path
from random import Random

import numpy as np

from fedcohort import ClientTable, LabelCounts, Losses, Session, Signal, create
from fedcohort.audit.choices import audit_journal
from fedcohort.audit.participation import prove_participation
from fedcohort.core.clients import LabelFactor, LabelGram, LabelGramRows
from fedcohort.core.errors import FedcohortError, JournalError, SelectorError
from fedcohort.core.protocol import SELECTORS, Answer, RoundReport, RoundRequest
from fedcohort.core.signals import TABLE_SIGNALS
from fedcohort.journal import Journal
from fedcohort.journal.maintenance import prune
from fedcohort.session.rules import Rules
from tests.snapshot import differences, full_disk, journal_content, session_state

from .budget import tried
from .odd import odd, odd_key

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where syncing a file costs nothing
CLASSES = 3
MOST = 12  # clients
NUMBERS = [0.0, 1.0, -1.0, 0.3, 2.5, 1e-300, 1e30, -1e30, 1e300]
ODD_NUMBERS = [*NUMBERS, float("nan"), float("inf"), float("-inf")]
PARAMS = {"fedcor": {"warmup": 2, "steps": 2, "interval": 2}, "flash": {"first_round": "asked"}}


def federation(r: Random, n: int, first: int = 0, like: ClientTable | None = None) -> ClientTable:
    """Return a table of ``n`` clients, or of ``n`` more for the federation ``like``."""
    counts = np.array([[r.randrange(0, 30) + (c == i % CLASSES) for c in range(CLASSES)] for i in range(n)], float)
    counts = counts.reshape(n, CLASSES)
    names = [f"client {first + i}" for i in range(n)]
    if like is None:
        labels = r.choice([LabelCounts(counts), LabelFactor(counts, CLASSES), LabelGram(counts @ counts.T, CLASSES)])
        return ClientTable(names=names if r.random() < 0.8 else None, sizes=counts.sum(axis=1), labels=labels)
    match like.labels:
        case LabelCounts():
            more = LabelCounts(counts)
        case LabelFactor():
            more = LabelFactor(counts, CLASSES)
        case LabelGram(gram=gram):
            cross = np.array([[r.random() * 10 for _ in range(len(gram))] for _ in range(n)]).reshape(n, len(gram))
            more = LabelGramRows(np.hstack([cross, counts @ counts.T]), CLASSES)
    return ClientTable(names=names if like.has_names else None, sizes=counts.sum(axis=1), labels=more, n=n)


def selector(r: Random):
    name = r.choice(SELECTORS.names())
    return create(name, **PARAMS.get(name, {}))


def fitting(r: Random, table: ClientTable):
    """Return a selector that the table has facts enough for."""
    while True:
        found = selector(r)
        if found.requires & TABLE_SIGNALS <= table.signals:
            return found


def rules(r: Random, names: tuple[str, ...]) -> Rules:
    given = {}
    if r.random() < 0.3:
        given["eligible"] = r.choice(["battery >= 30", "battery > 10 and region != 'n'", "size > 5"])
    shuffled = r.sample(names, min(3, len(names)))
    if r.random() < 0.3:
        given["blocked"] = tuple(shuffled[:1])
    if r.random() < 0.3:
        given["pinned"] = tuple(shuffled[1:])
    if r.random() < 0.3:
        given |= {"failures": r.randint(1, 2), "cool_off": r.randint(1, 3)}
    if r.random() < 0.4:
        given["min_separation"] = r.randint(1, 4)
    if r.random() < 0.2:
        given["max_participations"] = r.randint(1, 6)
    if r.random() < 0.3:
        given["window"] = r.randint(2, 4)
        given |= {"max_in_window": 2} if r.random() < 0.7 else {"min_in_window": 1}
    if r.random() < 0.3:
        given["quotas"] = {"region": {"n": 1, "s": 1}}
    if r.random() < 0.2:
        given |= {"budget": {"bytes": 10.0}, "cost": {"bytes": 3.0}}
    return Rules(**given)


class Life:
    """A session and what is done to it; ``r`` decides what exactly."""

    def __init__(self, r: Random) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fedcohort-fuzz-", dir=MEMORY))
        self.path = self.folder / "journal.sqlite"
        self.manual = r.random() < 0.25
        self.full = False
        self.wide = frozenset(Signal.all())
        table = federation(r, r.randint(1, 8))
        shadows = {f"s{i}": fitting(r, table) for i in range(r.choice([0, 0, 1, 2]))}
        self.session = Session(
            fitting(r, table),
            table,
            seed=r.randrange(100),
            signals=self.wide,
            journal=self.path,
            shadows=shadows,
            rules=rules(r, table.names) if r.random() < 0.5 else None,
            commit="manual" if self.manual else "always",
            audit=r.random() < 0.25,
        )
        self.durable = session_state(self.session)

    @property
    def mode(self) -> str:
        return "manual" if self.manual else "always"

    def end(self) -> None:
        self.session.close()
        shutil.rmtree(self.folder)

    # -- the oracle ---------------------------------------------------------------------------------------------------

    def attempt(self, call):
        """Make a call: it works, or it fails with a clear error and leaves no trace. Return what it returned."""
        tried("session")
        before, rows = session_state(self.session), journal_content(self.session)
        filled, self.full = self.full, False
        disk = full_disk(self.session) if filled else contextlib.nullcontext()
        try:
            with disk:
                return call()
        except SelectorError:
            raise  # none of ours may break the protocol
        except FedcohortError as error:
            failed = str(error)
        assert len(failed) > 10, "an error that says nothing"
        if filled and self.manual and self.lost():
            return None
        changed = differences(before, session_state(self.session)) + differences(rows, journal_content(self.session))
        assert not changed, f"an error changed {changed}: {failed}"
        return None

    def lost(self) -> bool:
        """Whether SQLite gave up all that was not committed; then opened again, the session is as it was committed."""
        try:
            journal_content(self.session)
        except JournalError as error:
            said = str(error)
        else:
            return False
        assert "has lost what was not committed" in said
        self.session.close()
        self.open_again(self.durable, "the session after a loss")
        return True

    def open_again(self, expected: dict, how: str) -> None:
        """Open what was closed: it is as expected, and that is durable."""
        self.session = Session.open(self.path, commit=self.mode)
        self.same_as(self.session, expected, how)
        self.durable = expected

    def same_as(self, other: Session, expected: dict, how: str) -> None:
        changed = differences(expected, session_state(other))
        assert not changed, f"{how} differs in {changed}"

    # -- rounds -------------------------------------------------------------------------------------------------------

    def request(self, r: Random, wild: bool) -> RoundRequest:
        n = self.session.table.n
        size = r.choice([1, None, min(n, 2), min(n, 3), n])
        some = [i for i in range(n) if r.random() < 0.7]
        available = r.choice([None, None, some, np.array(some, np.int64), [self.session.table.name(i) for i in some],
                              np.isin(np.arange(n), some)])  # fmt: skip
        if wild:
            size, available = r.choice(
                [(odd(r), available), (size, odd(r)), (odd(r), odd(r)), (n + 1, None), (0, None)]
            )
        return RoundRequest(size, available)

    def answer(self, r: Random, query, wild: bool):
        if query is None:
            return Answer(Losses([0]), {Signal.LOSS: [1.0]}) if wild and r.random() < 0.3 else None
        numbers = ODD_NUMBERS if r.random() < 0.3 else [0.2, 0.7, 1.0, 1.3]
        if isinstance(query, Losses):
            values = {s: [r.choice(numbers) for _ in query.clients] for s in query.signals}
        else:
            values = {
                query.answered_with: [
                    [r.choice(numbers) - 1 for _ in range(self.session.table.n)] for _ in query.cohorts
                ]
            }
        if wild:
            key = r.choice(list(values))
            values = r.choice(
                [{}, odd(r), {**values, key: odd(r)}, {**values, key: [1.0]}, {**values, odd_key(r): [1.0]}]
            )
        return Answer(query, values)

    def ask(self, r: Random) -> None:
        wild = r.random() < 0.25
        request = self.request(r, wild and r.random() < 0.6)

        def call():
            session = self.session
            query = session.query(request)
            if wild and r.random() < 0.2:
                return session.ask(request)
            return session.ask(request, self.answer(r, query, wild))

        self.attempt(call)

    def metrics(self, r: Random, count: int, wild: bool) -> dict:
        numbers = ODD_NUMBERS if r.random() < 0.3 else [0.2, 0.7, 1.0, 1.3]
        found = {}
        for signal in sorted(s for s in Signal.all() if s.is_metric):
            if signal.width is None:
                found[signal] = [r.choice(numbers) for _ in range(count)]
            else:
                width = signal.numbers(CLASSES)
                rows = [
                    [r.choice(numbers) for _ in range(min(width, 4))] * (width // min(width, 4)) for _ in range(count)
                ]
                found[signal] = [row + [0.0] * (width - len(row)) for row in rows]
        if wild:
            for _ in range(r.randint(1, 3)):
                key = r.choice(list(found))
                if r.random() < 0.3:
                    del found[key]
                else:
                    found[odd_key(r) if r.random() < 0.2 else key] = odd(r)
        return found

    def tell(self, r: Random) -> None:
        session = self.session
        wild = r.random() < 0.3
        pending = session.pending
        cohort = r.choice(pending) if pending and r.random() < 0.9 else None
        ticket = cohort.ticket if cohort is not None else r.randrange(-1, session.journal.last()[1] + 3)
        clients = [] if cohort is None else cohort.clients.tolist()
        complete = r.random() < 0.7
        if cohort is None:
            clients = [i for i in range(session.table.n) if r.random() < 0.3]
        elif r.random() < 0.4:
            told = {c for b in session.journal.reply_blocks(ticket) for c in b.clients.tolist()}
            clients = [c for c in clients if c not in told and r.random() < 0.7]
        if cohort is not None and r.random() < 0.2:
            clients = [session.table.name(c) for c in clients]
        status = None if r.random() < 0.5 else [r.choice([0, 0, 1, 2, 3, 4]) for _ in clients]
        kept = None if r.random() < 0.5 else [r.random() < 0.5 for _ in clients]
        metrics = self.metrics(r, len(clients), wild)
        host = {"at": ticket} if r.random() < 0.3 else None
        if wild:
            match r.randrange(6):
                case 0:
                    ticket = odd(r)
                case 1:
                    clients = odd(r)
                case 2:
                    status = odd(r)
                case 3:
                    kept = odd(r)
                case 4:
                    metrics = odd(r)
                case _:
                    host = odd(r)
        self.attempt(
            lambda: self.session.tell(RoundReport(ticket, clients, status, metrics, kept, complete), host=host)
        )

    def abandon(self, r: Random) -> None:
        pending = self.session.pending
        ticket = r.choice(pending).ticket if pending and r.random() < 0.8 else odd(r)
        reason = "gone" if r.random() < 0.8 else odd(r)
        self.attempt(lambda: self.session.abandon(ticket, reason))

    def record(self, r: Random) -> None:
        round_ = r.randrange(self.session.round + 1) if r.random() < 0.8 else odd(r)
        numbers = {"accuracy": r.choice([0.5, None, 1, np.float32(0.25), float("nan")]), "loss": 1e9}
        if r.random() < 0.3:
            numbers = r.choice([odd(r), {"accuracy": odd(r)}, {odd_key(r): 1.0}])
        self.attempt(lambda: self.session.record(round_, numbers))

    def note(self, r: Random) -> None:
        kind = r.choice(["mine", "flower", "abandoned", "rules", "selector", "join", "shadow", "excluded", odd(r)])
        body = r.choice([{}, {"why": "rain"}, odd(r), {"x": odd(r)}])
        self.attempt(lambda: self.session.note(kind, body))

    def explain(self, r: Random) -> None:
        round_ = r.randrange(self.session.round + 1) if r.random() < 0.7 else odd(r)
        client = r.choice([None, 0, self.session.table.name(0), odd(r)])
        self.attempt(lambda: self.session.explain(round_, client))

    # -- what stands --------------------------------------------------------------------------------------------------

    def set_rules(self, r: Random) -> None:
        self.attempt(lambda: self.session.set_rules(rules(r, self.session.table.names) if r.random() < 0.9 else odd(r)))

    def set_attributes(self, r: Random) -> None:
        names = self.session.table.names
        said = {r.choice(names): {"battery": r.choice([5, 20, 50]), "region": r.choice(["n", "s"])} for _ in range(3)}
        if r.random() < 0.3:
            said = r.choice(
                [odd(r), {**said, "stranger": {"battery": 3}}, {names[0]: odd(r)}, {names[0]: {"battery": odd(r)}}]
            )
        self.attempt(lambda: self.session.set_attributes(said))

    def join(self, r: Random) -> None:
        table = self.session.table
        if table.n >= MOST and r.random() < 0.9:
            return
        more = federation(r, r.randint(1, 2), first=table.n, like=table)
        if r.random() < 0.2:
            more = r.choice([odd(r), federation(r, 2), table])
        self.attempt(lambda: self.session.join(more))

    def leave(self, r: Random) -> None:
        who = [i for i in range(self.session.table.n) if r.random() < 0.3] if r.random() < 0.8 else odd(r)
        self.attempt(lambda: self.session.leave(who))

    def rejoin(self, r: Random) -> None:
        who = np.flatnonzero(~self.session.active) if r.random() < 0.8 else odd(r)
        self.attempt(lambda: self.session.rejoin(who))

    def update_facts(self, r: Random) -> None:
        table = self.session.table
        sizes = [r.randrange(50) for _ in range(table.n)]
        names = table.names if table.has_names else None
        new = ClientTable(names=names, sizes=sizes, labels=table.labels)
        if r.random() < 0.2:
            new = r.choice([odd(r), federation(r, 2), ClientTable(sizes=sizes)])
        self.attempt(lambda: self.session.update_facts(new))

    def forget(self, r: Random) -> None:
        self.full = False  # the name is gone by then; that the file cannot be written anew is another matter
        name = r.choice(self.session.table.names) if r.random() < 0.7 else odd(r)
        if self.attempt(lambda: self.session.forget(name)) is not None:
            self.durable = session_state(self.session)  # the file was written anew at once

    def change_selector(self, r: Random) -> None:
        new = selector(r) if r.random() < 0.9 else odd(r)
        self.attempt(lambda: self.session.change_selector(new))

    def add_shadow(self, r: Random) -> None:
        name = r.choice(["a", "b", "c"]) if r.random() < 0.85 else odd(r)
        shadow = selector(r) if r.random() < 0.9 else odd(r)
        if len(self.session.shadows) < 3:
            self.attempt(lambda: self.session.add_shadow(name, shadow))

    def try_selector(self, r: Random) -> None:
        rounds = r.randint(1, 3) if r.random() < 0.9 else odd(r)
        self.attempt(lambda: self.session.try_selector(selector(r), rounds, watch=r.random() < 0.3))

    def remove_shadow(self, r: Random) -> None:
        name = r.choice([*self.session.shadows, "nobody"]) if r.random() < 0.85 else odd(r)
        self.attempt(lambda: self.session.remove_shadow(name))

    # -- files --------------------------------------------------------------------------------------------------------

    def commit(self, _: Random) -> None:
        if self.attempt(lambda: self.session.commit() is None):
            self.durable = session_state(self.session)

    def reopen(self, r: Random) -> None:
        """Close and open again; in manual mode what was not committed is gone."""
        tried("session")
        expected = self.durable if self.manual else session_state(self.session)
        self.session.close()
        if r.random() < 0.3:
            self.manual = not self.manual
        self.open_again(expected, "the reopened session")

    def kill(self, r: Random) -> None:
        """Open a copy of the files as a kill at this instant would leave them; it goes on as the session does."""
        tried("session")
        copy = self.folder / "copy.sqlite"
        for file in self.folder.glob(f"{self.path.name}*"):
            if not file.name.endswith("-shm"):  # which lives in memory
                shutil.copyfile(file, copy.with_name(file.name.replace(self.path.name, copy.name)))
        with contextlib.closing(Session.open(copy)) as other:
            self.same_as(other, self.durable if self.manual else session_state(self.session), "a copy")
            if not self.manual:
                self._go_on(r, other)
        for file in self.folder.glob("copy.sqlite*"):
            file.unlink()

    def _go_on(self, r: Random, other: Session) -> None:
        request = self.request(r, wild=False)
        state = r.getstate()
        cohorts = []
        for session in (self.session, other):
            r.setstate(state)
            cohorts.append(session.ask(request, self.answer(r, session.query(request), wild=False)))
        ours, theirs = (
            (c.ticket, c.round, c.names, _bytes(c.weights), _bytes(c.work), dict(c.notes), c.stop) for c in cohorts
        )
        assert not differences(ours, theirs), "a copy chooses otherwise"
        picks = [
            {name: (picked.tolist(), note) for name, (picked, _, note) in s.journal.scores(ours[0]).items()}
            for s in (self.session, other)
        ]
        assert picks[0] == picks[1], "the shadows of a copy choose otherwise"
        self.same_as(other, session_state(self.session), "a copy that went on")

    def prune(self, r: Random) -> None:
        """Let old details go while the session is stopped; it goes on as it was."""
        tried("session")
        expected = self.durable if self.manual else session_state(self.session)
        self.session.close()
        with contextlib.closing(Journal.open(self.path)) as journal, contextlib.suppress(FedcohortError):
            prune(journal, r.choice([0, 1, 3]))
        self.open_again(expected, "the session after pruning")

    def fill_disk(self, _: Random) -> None:
        """Nothing more fits on the disk during the next event."""
        self.full = True

    def prove(self, _: Random) -> None:
        """Participation rules held in every round, and an audited journal follows from its inputs."""
        tried("session")
        if not self.manual:
            assert not prove_participation(self.session.journal).breaches
            if self.session.journal.meta()["audit"]:
                assert not (verdict := audit_journal(self.path)).wrong, verdict.problem


def _bytes(array) -> bytes | None:
    return None if array is None else np.asarray(array).tobytes()


EVENTS = {name: getattr(Life, name) for name in (
    "ask", "tell", "abandon", "record", "note", "explain", "set_rules", "set_attributes", "join", "leave", "rejoin",
    "update_facts", "forget", "change_selector", "add_shadow", "try_selector", "remove_shadow", "commit", "reopen",
    "kill", "prune", "fill_disk", "prove",
)}  # fmt: skip
