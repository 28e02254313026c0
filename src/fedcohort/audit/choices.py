"""Check that every cohort was the selector's choice, by recomputing a journal's rounds from its seed and inputs.

A server that picks colluders on purpose breaks the promises of secure aggregation and differential privacy (Lotto,
USENIX Security 2024). A journal written with ``audit=True`` is a chain of digests that begins with a commitment to the
seed. :func:`audit_journal` checks the chain and replays the session with the same seed, clients, candidates, answers
and reports. Every cohort must come out as recorded.

A server has other ways to get the cohorts it likes: abandon draws until one suits it, change the selector, or exclude
all other clients by rules. All of these are recorded, so an audit counts, shows and judges them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.audit.replay import DoesNotFollow, Replay, compare_states
from fedcohort.core.arrays import AnyArray
from fedcohort.core.errors import InputError, JournalError
from fedcohort.core.files import read_file
from fedcohort.core.protocol import Selector, Status
from fedcohort.core.selector_spec import described_name, rebuild_selector, selector_name
from fedcohort.core.validate import instance, integer, mapping, text
from fedcohort.journal import CohortRow, Journal, ReplyBlock, read_journal
from fedcohort.journal.chain import PARTS, START, Link, links, next_link, payload_of, start_payload, strays, with_news
from fedcohort.journal.codec import unpack_many
from fedcohort.journal.events import (
    ABANDONED,
    ATTRIBUTES,
    CHANGED,
    FAILURES,
    FORGOTTEN,
    NEW_MODEL,
    PRUNED,
    RECOVERED,
    SELECTOR,
)
from fedcohort.journal.signing import is_signed
from fedcohort.journal.tables import table_of
from fedcohort.session.rules import Rules

_SHARE = 0.1  # the share of draws that may be abandoned without a recorded failure
_NAMED = 12  # at most this many clients are named in a remark
_SIGNED = "signed "  # comes before the signature in a receipt
_SIGNATURE = 128  # hexadecimal digits


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
    path: str | Path,
    selector: Selector[Any] | None = None,
    *,
    seed: int | None = None,
    receipts: Mapping[str, str] | None = None,
    public: str | None = None,
) -> AuditResult:
    """Check a journal's chain and recompute all its cohorts.

    Parameters
    ----------
    path : path
        The journal; it must have been written with ``audit=True``.
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
    if selector is not None:
        instance(selector, Selector, "'selector'")  # type: ignore[type-abstract]
    if seed is not None:
        integer(seed, "'seed'", least=0)
    if receipts is not None:
        mapping(receipts, "'receipts'")
    if public is not None:
        text(public, "'public'")
    with contextlib.closing(read_journal(path)) as journal:
        return confirm(journal, selector, seed=seed, receipts=receipts, public=public)


def confirm(
    journal: Journal,
    selector: Selector[Any] | None = None,
    *,
    seed: int | None = None,
    receipts: Mapping[str, str] | None = None,
    public: str | None = None,
) -> AuditResult:
    """Check an open journal; see :func:`audit_journal`."""
    meta = journal.meta()
    if meta.get("audit") is None:
        raise JournalError(
            f"The journal {journal.path} was written without a chain, so nothing can be confirmed.",
            hint="start sessions with audit=True",
        )
    audit = _Audit(journal, meta, rebuild_selector(meta["selector"], selector, journal.path))
    return audit.run(seed, receipts or {}, public)


class CannotBeConfirmed(DoesNotFollow):
    """The record follows, or is not complete enough to tell, but it does not show that the server was honest."""


class _Audit(Replay):
    """A replay of a chained journal, in the order of the chain's links."""

    def __init__(self, journal: Journal, meta: Mapping[str, Any], selector: Selector[Any]) -> None:
        super().__init__(journal, meta, selector)
        self.facts: dict[str, bytes] = {}
        self.abandoned = {int(b["ticket"]): str(b["reason"]) for b in journal.events(ABANDONED)}
        self.answers: dict[int, Mapping[str, AnyArray]] = {}
        self.replies: dict[int, list[ReplyBlock]] = {}
        self.candidate = np.zeros(self.final.n, np.int64)
        self.picked = np.zeros(self.final.n, np.int64)
        self.excluded: Counter[str] = Counter()
        self.failed = {int(b["ticket"]) for b in journal.events(FAILURES) if "ticket" in b}
        self.forced = 0  # draws in which rules left no choice
        self.narrow = 0  # draws in which no more clients were available than asked for
        self.singled_out = False  # whether rules treat some clients differently
        self.recorded_again = 0  # metrics of the model that were recorded again
        self.remarks: list[str] = []
        self.replaying = True
        self.tip = START  # the newest link so far

    def run(self, seed: int | None, receipts: Mapping[str, str], public: str | None) -> AuditResult:
        """Check everything; later checks rely on earlier ones."""
        problem, wrong = None, False
        try:
            if seed is not None and seed != self.meta["seed"]:
                raise DoesNotFollow(f"The recorded seed is {self.meta['seed']}, but {seed} was agreed on.")
            chain = self._chain()
            removed = sum(link.removed for link in chain)
            # A session cannot be replayed past a gap, but the chain can still be checked.
            self.replaying = not removed
            self._follow(chain)
            self._check_rest(chain)
            self._check_signature(self.tip.hex(), public)
            # Receipts prove something only against a chain that holds.
            self._check_receipts(receipts, {link.link.hex() for link in chain}, public)
            self._count()
            if removed:
                raise self._removed_error(removed)
            if self.session is not None:
                compare_states(self.journal, self.playing)
            self._judge()
        except CannotBeConfirmed as broken:
            problem = str(broken)
        except DoesNotFollow as broken:
            problem, wrong = str(broken), True
        return self._result(problem, wrong)

    def _follow(self, chain: list[Link]) -> None:
        """Check that each link follows from the one before, and replay what it covers."""
        newest = {(link.kind, link.key): link.number for link in chain if not link.removed}
        for link in chain:
            if next_link(self.tip, link.kind, link.digest) != link.link:
                raise DoesNotFollow(
                    f"{self._link_name(link)} was changed after it was recorded: the chain breaks there."
                )
            self.tip = link.link
            if not link.removed:
                self._check(link, newest[link.kind, link.key])
            if self.replaying:
                self._step(link)

    def _result(self, problem: str | None, wrong: bool) -> AuditResult:
        names = self.final.names
        drawn, abandoned, unexplained = self._draws()
        return AuditResult(
            problem,
            self.rounds,
            self.tip.hex(),
            draws=len(drawn),
            abandoned=len(abandoned),
            unexplained=len(unexplained),
            remarks=tuple(self.remarks),
            excluded=dict(self.excluded.most_common()),
            candidate=dict(zip(names, self.candidate.tolist(), strict=True)),
            picked=dict(zip(names, self.picked.tolist(), strict=True)),
            signer=self.meta.get("signer"),
            wrong=wrong,
        )

    def _draws(self) -> tuple[list[int], list[int], list[int]]:
        """Return the tickets of all draws, of the abandoned ones, and of those abandoned without a recorded failure."""
        drawn = [row.ticket for row in self.cohorts.values() if len(row.clients)]
        abandoned = [ticket for ticket in drawn if ticket in self.abandoned]
        return drawn, abandoned, [ticket for ticket in abandoned if not self._has_failure(ticket)]

    # -- is the record complete? ---------------------------------------------------------------------------------------

    def _chain(self) -> list[Link]:
        try:
            chain = list(links(self.journal.database))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DoesNotFollow(f"The chain cannot be read: {type(error).__name__}: {error}.") from error
        if not chain or chain[0].kind != "start" or chain[0].kept != start_payload(self.meta):
            raise DoesNotFollow("The commitment to seed, selector and signals was changed after it was recorded.")
        return chain

    def _check(self, link: Link, newest: int) -> None:
        """Raise an error if a link does not match what is on record."""
        if link.number != newest:
            # If something was recorded several times, only its newest link matches. Most things are recorded once.
            if link.kind in PARTS and not PARTS[link.kind].repeatable:
                raise DoesNotFollow(f"{self._link_name(link)} is in the chain twice.")
            if link.kind in PARTS:
                self.recorded_again += link.kind == "metrics"
                return
        if not link.fits(payload_of(self.journal.database, link)):
            raise DoesNotFollow(f"{self._link_name(link)} was changed after it was recorded.")
        try:
            if link.kind == "table":
                self.facts = with_news(self.facts, link.kept)
            elif link.kind == "answer":
                self.answers[link.key[0]] = unpack_many(link.kept)
        except (ValueError, TypeError, LookupError) as error:
            raise DoesNotFollow(f"{self._link_name(link)} cannot be read: {type(error).__name__}: {error}.") from error

    def _check_rest(self, chain: list[Link]) -> None:
        """Raise an error if something is on record but not in the chain."""
        for kind, key in strays(self.journal.database, chain):
            raise DoesNotFollow(f"{self._record_name(kind, key)} is on record but not in the chain.")
        stored = {name: data for name, data in self.journal.facts().items() if name != "attributes"}
        if {name: data for name, data in self.facts.items() if name in stored} != stored:
            raise DoesNotFollow("The table of clients was changed after it was recorded.")

    def _check_receipts(self, receipts: Mapping[str, str], seen: set[str], public: str | None) -> None:
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

    def _check_signature(self, tip: str, public: str | None) -> None:
        signer = self.meta.get("signer")
        if public is not None and signer != public:
            state = "is not signed, and so not" if signer is None else f"is signed with the key {signer}, not"
            raise DoesNotFollow(f"The journal {state} with {public}.")
        if signer is not None:
            head, signature = self.meta.get("signature") or ("", "")
            if head != tip or not is_signed(tip, signature, signer):
                raise DoesNotFollow(f"The newest link is not signed with the key {signer}; every link must be.")

    def _removed_error(self, removed: int) -> DoesNotFollow:
        causes = {FORGOTTEN: "clients were forgotten", PRUNED: "details of old rounds were pruned"}
        reasons = [text for kind, text in causes.items() if self.journal.events(kind)]
        if not reasons:
            return DoesNotFollow(
                f"{removed} parts of the record are gone, and no event says that they were pruned or forgotten."
            )
        return CannotBeConfirmed(
            f"No round can be recomputed: {' and '.join(reasons)}. The chain itself holds; audit an earlier copy, or "
            "rely on an earlier audit."
        )

    def _link_name(self, link: Link) -> str:
        return self._record_name(link.kind, link.key)

    def _record_name(self, kind: str, key: tuple[Any, ...]) -> str:
        match kind, key:
            case ("start", _):
                return "The commitment to seed, selector and signals"
            case ("table" | "attributes", _):
                return "The table of clients"
            case ("cohort" | "candidates" | "answer" | "close" | "scores", (int(ticket), *_)):
                return f"Round {self.cohorts[ticket].round}" if ticket in self.cohorts else f"Ticket {ticket}"
            case ("replies", (number,)):
                return f"A report (row {number})"
            case ("metrics", (round_, name)):
                return f"The number {name!r} of round {round_}"
            case ("event", (number,)):
                return f"An event (row {number})"
            case ("meta", (name,)):
                return f"What is stored under {name!r}"
            case _:
                return f"Something that was removed ({kind})"

    # -- does it follow? ---------------------------------------------------------------------------------------------

    def _step(self, link: Link) -> None:
        match link.kind:
            case "table":
                self._table()
            case "cohort":
                self.choose(link.key[0], self.answers.pop(link.key[0], None))
            case "replies":
                block = self.journal.reply_block(link.key[0])
                if not block.late:
                    self.replies.setdefault(block.ticket, []).append(block)
            case "close":
                ticket = link.key[0]
                if len(self.cohorts[ticket].clients):
                    self.tell(ticket, self.replies.pop(ticket, []), self.abandoned.get(ticket))
            case "event":
                self._apply_event(*self.journal.numbered_event(link.key[0]))

    def _apply_event(self, kind: str, body: Mapping[str, Any]) -> None:
        try:
            if kind == CHANGED:
                self.change_rules(body)
            elif kind == SELECTOR:
                self.change_selector(body)
            elif kind == NEW_MODEL:
                self.advance(body)
            elif kind == ATTRIBUTES:
                self.playing.set_attributes(body["clients"])
        except JournalError as error:
            raise DoesNotFollow(
                f"From round {body.get('round')} on: {error.message} {error.hint or ''}".strip()
            ) from error

    def _table(self) -> None:
        table, active = table_of(self.facts)
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
        changes = [(int(body["ticket"]), Rules(**body["rules"])) for body in self.journal.events(CHANGED)]
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
                self._count_choice(row, rules, row.wanted, bool(excluded))

    def _count_choice(self, row: CohortRow, rules: Rules, size: int, excluded: bool) -> None:
        """Count a draw in which there was nothing, or nearly nothing, to choose."""
        narrow = row.n_candidates <= size and row.n_candidates < self.final.n
        if (narrow and excluded) or set(self.final.names_of(row.clients)) <= set(rules.pinned):
            self.forced += 1
        elif narrow:
            self.narrow += 1

    def _has_failure(self, ticket: int) -> bool:
        """Whether a client's failure is on record for an abandoned draw. A client without a reply has not failed."""
        if ticket in self.failed:
            return True
        fine = (Status.OK, Status.MISSING)  # if a server abandons a draw at once, all its clients are missing
        return any((~np.isin(block.status, fine)).any() for block in self.journal.reply_blocks(ticket))

    def _judge(self) -> None:
        """Remark on every freedom that the server took, and raise an error if it took too much."""
        drawn, abandoned, unexplained = self._draws()
        self._remark_on_events()
        self._remark_on_draws(len(drawn), len(abandoned), len(unexplained))
        self._refuse_freedom(len(drawn), abandoned, unexplained)

    def _remark_on_events(self) -> None:
        """Remark on changes of the selector, of the rules, and of the record itself."""
        self.remarks += [
            f"From round {body['round']} on {described_name(body['to'])!r} chose, in place of "
            f"{described_name(body['from'])!r}."
            for body in self.journal.events(SELECTOR)
        ]
        # The server's own selector may follow from the seed and still prefer some clients.
        if not type(self.playing.selector).__module__.startswith("fedcohort."):
            self.remarks.append(
                f"The selector {selector_name(self.playing.selector)} is not one of fedcohort's. To know what it "
                "prefers, read its code."
            )
        changed = [int(body["round"]) for body in self.journal.events(CHANGED)]
        self.remarks += [f"The rules were changed before round {round_}." for round_ in changed if round_ > 0]
        if self.singled_out:
            self.remarks.append(self._exclusion_remark())
        lost = [int(body["round"]) for body in self.journal.events(RECOVERED)]
        self.remarks += [
            f"The newest commits were lost, and the session continued from round {round_}." for round_ in lost
        ]

    def _exclusion_remark(self) -> str:
        most = ", ".join(f"{name} ({count})" for name, count in self.excluded.most_common(_NAMED))
        more = f" and {len(self.excluded) - _NAMED} more" if len(self.excluded) > _NAMED else ""
        return (
            f"The rules single out clients, by name or by what clients report. They excluded "
            f"{len(self.excluded)} of {self.final.n} clients (number of draws): {most or 'nobody'}{more}."
        )

    def _remark_on_draws(self, drawn: int, abandoned: int, unexplained: int) -> None:
        """Remark on draws that were repeated, were empty, or had little choice."""
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

    def _refuse_freedom(self, drawn: int, abandoned: list[int], unexplained: list[int]) -> None:
        """Raise an error if the server could have had any cohort by drawing again, by waiting, or by its rules."""
        empty = len(self.cohorts) - drawn
        # Even with recorded failures, at most half of all draws may be abandoned, because a client may be made to fail.
        if len(abandoned) > drawn - len(abandoned):
            raise CannotBeConfirmed(
                f"Of {drawn} draws {len(abandoned)} were abandoned: whoever can abandon draws can get any cohort. "
                f"They are: {_list_of(abandoned, self.abandoned)}."
            )
        if len(unexplained) > max(1.0, _SHARE * drawn):
            raise CannotBeConfirmed(
                f"Of {drawn} draws {len(unexplained)} were abandoned without a failure on record: whoever can "
                f"abandon draws can get any cohort. They are: {_list_of(unexplained, self.abandoned)}."
            )
        if empty > drawn > 0:
            raise CannotBeConfirmed(
                f"{empty} rounds passed without a cohort, and {drawn} had one: whoever can let rounds pass can get any "
                "cohort."
            )
        if self.forced > drawn / 2:
            raise CannotBeConfirmed(
                f"In {self.forced} of {drawn} draws the rules left no more clients than asked for, or demanded all "
                "that were picked, so nothing was chosen."
            )


def _list_of(tickets: Sequence[int], reasons: Mapping[int, str]) -> str:
    more = f" and {len(tickets) - 3} more" if len(tickets) > 3 else ""
    return "; ".join(f"ticket {t} ({reasons[t]})" for t in tickets[:3]) + more


def receipt(journal: Journal, ticket: int, round_: int) -> str | None:
    """Return the receipt that a client gets with every task: the newest link, the draw, and the signature."""
    if journal.commitment is None:
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
