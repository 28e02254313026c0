"""Check that every cohort was the selector's choice, by recomputing a journal's rounds from its seed and inputs.

A server that picks colluders on purpose breaks the promises of secure aggregation and differential privacy (Lotto,
USENIX Security 2024). The first link of a journal's chain of digests commits to the seed, because the digest of a row
is salted. With ``audit=True`` the journal also has everything that a replay needs. :func:`audit_journal` replays the
session with the same seed, clients, candidates, answers and reports. Every cohort must come out as recorded.

A server has other ways to get the cohorts it likes: abandon draws until one suits it, change the selector, or exclude
all other clients by rules. All of these are recorded, so an audit counts, shows and judges them.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.audit.replay import DoesNotFollow, Replay, compare_states
from fedcohort.core.arrays import AnyArray, BoolArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError, JournalError
from fedcohort.core.files import read_file
from fedcohort.core.protocol import Selector, Status
from fedcohort.core.selector_spec import described_name, selector_name
from fedcohort.core.validate import instance, integer
from fedcohort.journal import Journal, ReplyBlock, events, read_journal
from fedcohort.journal.chain import TAGS, links, table_of
from fedcohort.journal.codec import unpack_many
from fedcohort.journal.schema import TABLES
from fedcohort.journal.signing import is_signed
from fedcohort.journal.tables import client_table, version_facts
from fedcohort.session.rules import Rules

_SHARE = 0.1  # the share of draws that may be abandoned without a recorded failure
_NAMED = 12  # at most this many clients are named in a remark
_SIGNED = "signed "  # comes before the signature in a receipt
_SIGNATURE = 128  # hexadecimal digits
_ONCE = frozenset({"cohorts", "candidates", "closed", "replies", "scores", "events", "answers", "versions"})
"""Tables whose rows are written once; the others hold what changes."""
_REPLAYED = frozenset({"versions", "answers", "cohorts", "replies", "closed", "events"})
"""Tables whose rows say what the session did next."""
_FIXED = frozenset({"seed", "selector", "signals", "signer", "audit", "asynchronous", "created", "fedcohort"})
"""Keys of the metadata that the first link covers for good."""


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes
    ----------
    problem : str or None
        Why the journal is not confirmed, in words.
    rounds : int
        How many draws follow from seed and inputs, up to the first that does not.
    commitment : str
        The newest link of the chain, in hexadecimal.
    draws, abandoned, unexplained : int
        The number of draws, how many of them were abandoned, and how many of those without a recorded failure.
    remarks : tuple of str
        How the server could have influenced the cohorts, although everything follows.
    excluded : mapping of str to int
        By client, from how many draws rules excluded it.
    candidate, picked : mapping of str to int
        By client, in how many draws it was a candidate, and in how many it was picked.
    signer : str or None
        The public key of the newest link's signature, in hexadecimal.
    wrong : bool
        Whether the record was changed or does not follow. False if the server only took too much freedom, or if the
        record is not complete enough to tell.
    """

    problem: str | None
    rounds: int
    commitment: str
    draws: int = 0
    abandoned: int = 0
    unexplained: int = 0
    remarks: tuple[str, ...] = ()
    excluded: Mapping[str, int] = field(default_factory=dict)
    candidate: Mapping[str, int] = field(default_factory=dict)
    picked: Mapping[str, int] = field(default_factory=dict)
    signer: str | None = None
    wrong: bool = False

    @property
    def confirmed(self) -> bool:
        """Whether the audit found no problem; there may be remarks."""
        return self.problem is None

    @property
    def kept(self) -> int:
        """How many draws were not abandoned."""
        return self.draws - self.abandoned

    @property
    def word(self) -> str:
        """The verdict: 'confirmed', 'confirmed with remarks' or 'NOT confirmed'."""
        if not self.confirmed:
            return "NOT confirmed"
        return "confirmed with remarks" if self.remarks else "confirmed"


def audit_journal(
    journal: str | Path | Journal,
    selector: Selector[Any] | None = None,
    *,
    seed: int | None = None,
    receipts: Mapping[str, str] | None = None,
    public: str | None = None,
) -> AuditResult:
    """Recompute all cohorts of a journal. One whose rows do not match its chain cannot be opened at all.

    Parameters
    ----------
    journal : path or Journal
        It must have been written with ``audit=True``.
    selector : Selector, optional
        Only needed for a selector that is not registered.
    seed : int, optional
        The seed that was agreed on, for example from a public beacon.
    receipts : mapping of commitment to its source, optional
        Commitments that clients kept while the session ran, alone or as the server sent them. Each must be a link of
        the chain.
    public : str, optional
        The public key that must have signed the journal, in hexadecimal.
    """
    if not isinstance(journal, Journal):
        with contextlib.closing(read_journal(journal)) as opened:
            return audit_journal(opened, selector, seed=seed, receipts=receipts, public=public)
    if selector is not None:
        instance(selector, Selector, "'selector'")  # type: ignore[type-abstract]
    if seed is not None:
        integer(seed, "'seed'", least=0)
    if not journal.meta()["audit"]:
        raise JournalError(
            f"The journal {journal.path} was written without audit=True, so not everything that its cohorts depend on "
            "is on record.",
            hint="start sessions with audit=True",
        )
    return _Audit(journal, selector).run(seed, receipts or {}, public)


class _CannotBeConfirmed(DoesNotFollow):
    """The record follows, or is not complete enough to tell, but it does not show that the server was honest."""


class _Audit(Replay):
    """A replay of a journal in the order of its chain's links."""

    def __init__(self, journal: Journal, selector: Selector[Any] | None) -> None:
        super().__init__(journal, selector)
        self.chain = list(links(journal.database.connection))
        # The chain says in which order rows were written, and the rows what was in them.
        # By tagged digest, the table and the key of each row.
        self.rows = {
            TAGS[name] + table.digest(salt, row): (name, tuple(row[: len(table.key)]))
            for name, table in TABLES.items()
            for salt, *row in journal.database.fetch(f"SELECT salt, {table.names} FROM {name}")
        }
        self.facts: dict[str, bytes] = {}
        self.abandoned = {int(b["ticket"]): str(b["reason"]) for b in journal.events(events.ABANDONED)}
        failed = {int(b["ticket"]) for b in journal.events(events.FAILURES) if "ticket" in b}
        fine = (Status.OK, Status.MISSING)  # if a server abandons a draw at once, all its clients are missing
        # The tickets of all draws, of the abandoned ones, and of those abandoned without a recorded failure.
        self.drawn = [row.ticket for row in self.cohorts.values() if len(row.clients)]
        self.given_up = [ticket for ticket in self.drawn if ticket in self.abandoned]
        for ticket in self.given_up:
            blocks = journal.reply_blocks(ticket)
            failed |= {block.ticket for block in blocks if (~np.isin(block.status, fine)).any()}
        self.unexplained = [ticket for ticket in self.given_up if ticket not in failed]
        self.answers: dict[int, Mapping[str, AnyArray]] = {}
        self.replies: dict[int, list[ReplyBlock]] = {}
        self.candidate = np.zeros(self.final.n, np.int64)
        self.picked = np.zeros(self.final.n, np.int64)
        self.excluded: Counter[str] = Counter()
        self.forced = 0  # draws in which rules left no choice
        self.narrow = 0  # draws in which no more clients were available than asked for
        self.singled_out = False  # whether rules treat some clients differently
        self.recorded_again = 0  # metrics of the model that were recorded again
        self.remarks: list[str] = []

    def run(self, seed: int | None, receipts: Mapping[str, str], public: str | None) -> AuditResult:
        """Check everything; later checks rely on earlier ones."""
        problem, wrong = None, False
        try:
            if seed is not None and seed != self.meta["seed"]:
                raise DoesNotFollow(f"The recorded seed is {self.meta['seed']}, but {seed} was agreed on.")
            begun = {self.rows[digest] for digest in self.chain[0].added if digest in self.rows}
            for key in sorted(self.meta.keys() & _FIXED):
                if ("meta", (key,)) not in begun:
                    raise DoesNotFollow(f"What is stored under {key!r} was changed after it was recorded.")
            gone = Counter(table_of(d) for link in self.chain for d in link.added if d not in self.rows)
            # A link that replaces metrics adds as many as it removes.
            deleted = 0
            for link in self.chain:
                added, less = (Counter(map(table_of, digests))["metrics"] for digests in (link.added, link.removed))
                deleted += max(less - added, 0)
            self.recorded_again = gone["metrics"] - deleted
            removed = sum(gone[table] for table in _ONCE) + deleted
            # The rest of the checks does not need the gaps.
            if not removed:  # a session cannot be replayed past a gap
                self._replay()
            self._check_commitments(receipts, public)
            self._count()
            causes = {events.FORGOTTEN: "clients were forgotten", events.PRUNED: "details of old rounds were pruned"}
            reasons = [text for kind, text in causes.items() if self.journal.events(kind)]
            if removed and not reasons:
                raise DoesNotFollow(
                    f"{removed} parts of the record are gone, and no event says that they were pruned or forgotten."
                )
            if removed:
                raise _CannotBeConfirmed(
                    f"No round can be recomputed: {' and '.join(reasons)}. The chain itself holds; audit an earlier "
                    "copy, or rely on an earlier audit."
                )
            if self.session is not None:
                compare_states(self.journal, self.playing)
            self._remark()
            self._refuse_freedom()
        except _CannotBeConfirmed as broken:
            problem = str(broken)
        except DoesNotFollow as broken:
            problem, wrong = str(broken), True
        # The counts are returned whatever was found: readers judge for themselves how often they were left out.
        names = self.final.names
        return AuditResult(
            problem,
            self.rounds,
            self.chain[-1].head.link.hex(),
            draws=len(self.drawn),
            abandoned=len(self.given_up),
            unexplained=len(self.unexplained),
            remarks=tuple(self.remarks),
            excluded=dict(self.excluded.most_common()),
            candidate=dict(zip(names, self.candidate.tolist(), strict=True)),
            picked=dict(zip(names, self.picked.tolist(), strict=True)),
            signer=self.meta.get("signer"),
            wrong=wrong,
        )

    # -- is the record complete? ---------------------------------------------------------------------------------------

    def _check_commitments(self, receipts: Mapping[str, str], public: str | None) -> None:
        """Check that the journal is signed with the right key, and that clients' receipts belong to it."""
        signer = self.meta["signer"]
        if public is not None and signer != public:
            state = "is not signed, and so not" if signer is None else f"is signed with the key {signer}, not"
            raise DoesNotFollow(f"The journal {state} with {public}.")
        if signer is not None:
            # Whoever copies a journal adds an empty link, and needs no key for that.
            newest = next(link for link in reversed(self.chain) if not link.empty)
            if not is_signed(newest.head.link.hex(), (newest.signature or b"").hex(), signer):
                raise DoesNotFollow(f"The newest link is not signed with the key {signer}; every link must be.")
        seen = {link.head.link.hex() for link in self.chain}
        for line, origin in receipts.items():
            commitment, _, details = line.partition(" ")  # there are no details if only the commitment was kept
            source = f"{details}; {origin}" if details else origin
            if commitment.lower() not in seen:
                raise DoesNotFollow(
                    f"The commitment {commitment} ({source}) is not in this journal, so this is not the journal that "
                    "was shown."
                )
            _, signed, signature = source.partition(_SIGNED)
            if public is not None and signed and not is_signed(commitment, signature[:_SIGNATURE], public):
                raise DoesNotFollow(f"The commitment {commitment} ({source}) was not signed with the key {public}.")

    # -- does it follow? ---------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        for link in self.chain:
            for name, key in [self.rows[digest] for digest in link.added if digest in self.rows]:
                if name not in _REPLAYED:
                    continue
                table = TABLES[name]
                # Read one by one, because all answers and replies of a long run may not fit in memory.
                (row,) = self.journal.database.fetch(f"SELECT {table.names} FROM {name} WHERE {table.where_key}", key)
                try:
                    self._step(name, *row)
                except (JournalError, ValueError, TypeError, LookupError) as error:
                    raise DoesNotFollow(f"The row {(name, key)} does not fit the others: {error}") from error
        # Readers see the table of clients, and the replay its versions; they must end alike.
        stored = {name: data for name, data in self.journal.facts().items() if name != "attributes"}
        if self.facts != stored:
            raise DoesNotFollow("The table of clients is not the newest version of it.")

    def _step(self, table: str, number: int, *row: Any) -> None:
        """Do what the session did when it wrote a row; ``number`` is the row's key."""
        match table:
            case "versions":
                self.facts = version_facts(self.facts, *row)
                self._change_table(*client_table(self.facts))
            case "answers":
                self.answers[number] = unpack_many(*row)
            case "cohorts":
                self.choose(number, self.answers.pop(number, None))
            case "replies":
                ticket, at, late, data = row
                if not late:
                    self.replies.setdefault(ticket, []).append(ReplyBlock.decode(ticket, at, False, data))
            case "closed":
                if len(self.cohorts[number].clients):
                    self.tell(number, self.replies.pop(number, []), self.abandoned.get(number))
            case "events":
                _, kind, text = row
                body = json.loads(text)
                try:
                    match kind:
                        case events.CHANGED:
                            self.change_rules(body)
                        case events.SELECTOR:
                            self.change_selector(body)
                        case events.NEW_MODEL:
                            self.advance(body)
                        case events.ATTRIBUTES:
                            self.playing.set_attributes(body["clients"])
                except JournalError as error:
                    text = f"From round {body.get('round')} on: {error.message} {error.hint or ''}".strip()
                    raise DoesNotFollow(text) from error

    def _change_table(self, table: ClientTable, active: BoolArray) -> None:
        if self.session is None:
            self.start(table)
        session = self.playing
        if table.n > session.table.n:
            self.grow(table)
        if len(session.table.differing(table)):
            session.update_facts(table)
        gone, back = session.active & ~active, active & ~session.active
        if gone.any():
            session.leave(np.flatnonzero(gone))
        if back.any():
            session.rejoin(np.flatnonzero(back))

    # -- could the server have influenced the cohorts? ---------------------------------------------------------------

    def _count(self) -> None:
        """Count how often each client was a candidate, picked and excluded, and the draws without a real choice."""
        changes = [(int(body["ticket"]), Rules(**body["rules"])) for body in self.journal.events(events.CHANGED)]
        for ticket, row in self.cohorts.items():
            rules = next((rules for since, rules in reversed(changes) if since <= ticket), Rules())
            candidates = self.journal.candidates(ticket, self.final.n)
            if candidates is not None:
                self.candidate[candidates] += 1
            self.picked[row.clients] += 1
            excluded = self.journal.exclusions(ticket)
            self.excluded.update(self.final.names_of(np.array(sorted(excluded), np.int64)))
            self.singled_out |= bool(rules.blocked or rules.paused or rules.pinned or rules.eligible)
            if len(row.clients) and row.wanted is not None:
                # Was there nothing, or nearly nothing, to choose?
                narrow = row.n_candidates <= row.wanted and row.n_candidates < self.final.n
                if (narrow and excluded) or set(self.final.names_of(row.clients)) <= set(rules.pinned):
                    self.forced += 1
                elif narrow:
                    self.narrow += 1

    def _remark(self) -> None:
        """Remark on every freedom that the server took: changed selector, rules or record, repeated or empty draws."""
        self.remarks += [
            f"From round {body['round']} on {described_name(body['to'])!r} chose, in place of "
            f"{described_name(body['from'])!r}."
            for body in self.journal.events(events.SELECTOR)
        ]
        # The server's own selector may follow from the seed and still prefer some clients.
        if not type(self.playing.selector).__module__.startswith("fedcohort."):
            self.remarks.append(
                f"The selector {selector_name(self.playing.selector)} is not one of fedcohort's. To know what it "
                "prefers, read its code."
            )
        changed = [int(body["round"]) for body in self.journal.events(events.CHANGED)]
        self.remarks += [f"The rules were changed before round {round_}." for round_ in changed if round_ > 0]
        if self.singled_out:
            most = ", ".join(f"{name} ({count})" for name, count in self.excluded.most_common(_NAMED))
            more = f" and {len(self.excluded) - _NAMED} more" if len(self.excluded) > _NAMED else ""
            self.remarks.append(
                "The rules single out clients, by name or by what clients report. They excluded "
                f"{len(self.excluded)} of {self.final.n} clients (number of draws): {most or 'nobody'}{more}."
            )
        lost = [int(body["round"]) for body in self.journal.events(events.RECOVERED)]
        self.remarks += [
            f"The newest events were lost, and the session continued from round {round_}." for round_ in lost
        ]

        drawn, abandoned, unexplained = len(self.drawn), len(self.given_up), len(self.unexplained)
        few, empty = _SHARE * drawn, len(self.cohorts) - drawn
        if unexplained or abandoned > few:
            self.remarks.append(
                f"{abandoned} of {drawn} draws were abandoned and drawn again, {unexplained} of them without a failure "
                "on record."
            )
        if empty > few:
            self.remarks.append(f"{empty} rounds passed without a cohort, because nobody was available or admitted.")
        if self.narrow > few:
            self.remarks.append(f"In {self.narrow} of {drawn} draws no more clients were available than asked for.")
        if self.recorded_again:
            self.remarks.append(f"Metrics of the model that were recorded again later: {self.recorded_again}.")

    def _refuse_freedom(self) -> None:
        """Raise an error if the server could have had any cohort by drawing again, by waiting, or by its rules."""
        drawn, abandoned, unexplained = len(self.drawn), self.given_up, self.unexplained
        empty = len(self.cohorts) - drawn
        # Even with recorded failures, at most half of all draws may be abandoned, because a client may be made to fail.
        if len(abandoned) > drawn - len(abandoned):
            raise _CannotBeConfirmed(
                f"Of {drawn} draws {len(abandoned)} were abandoned: whoever can abandon draws can get any cohort. "
                f"They are: {_list_of(abandoned, self.abandoned)}."
            )
        if len(unexplained) > max(1.0, _SHARE * drawn):
            raise _CannotBeConfirmed(
                f"Of {drawn} draws {len(unexplained)} were abandoned without a failure on record: whoever can "
                f"abandon draws can get any cohort. They are: {_list_of(unexplained, self.abandoned)}."
            )
        if empty > drawn > 0:
            raise _CannotBeConfirmed(
                f"{empty} rounds passed without a cohort, and {drawn} had one: whoever can let rounds pass can get any "
                "cohort."
            )
        if self.forced > drawn / 2:
            raise _CannotBeConfirmed(
                f"In {self.forced} of {drawn} draws the rules left no more clients than asked for, or demanded all "
                "that were picked, so nothing was chosen."
            )


def _list_of(tickets: Sequence[int], reasons: Mapping[int, str]) -> str:
    more = f" and {len(tickets) - 3} more" if len(tickets) > 3 else ""
    return "; ".join(f"ticket {t} ({reasons[t]})" for t in tickets[:3]) + more


def receipt(journal: Journal, ticket: int, round_: int) -> str | None:
    """Return what a client of an audited run gets with every task: the newest link, the draw, the signature."""
    if not journal.audited:
        return None
    signature = journal.signature
    signed = "" if signature is None else f", {_SIGNED}{signature}"
    return f"{journal.commitment} draw {ticket + 1} for round {round_}{signed}"


def read_receipts(path: Path) -> dict[str, str]:
    """Return the commitments in a file by their source; a line is a commitment, then optionally its source."""
    try:
        text = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(f"The commitments in {path} cannot be read: {reason}.") from error
    receipts = {}
    for line in text.splitlines():
        if line.strip():
            commitment, _, source = line.strip().partition(" ")
            receipts[commitment] = source.strip() or path.name
    return receipts
