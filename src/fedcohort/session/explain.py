"""Explain from a journal why a client was or was not picked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray, IntArray
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import Cohort, Status
from fedcohort.core.selector_spec import class_of
from fedcohort.core.top import top_k
from fedcohort.core.validate import integer
from fedcohort.journal.events import FAILURES, WAITED
from fedcohort.journal.store import CohortRow, Journal
from fedcohort.session.coverage import Tally

_ALL_SCORES = 1024  # up to this many candidates, every score is recorded
_RUNNERS_UP = 64  # with more candidates, only those of the picked clients and this many of the next best


class ScoreRow(NamedTuple):
    """One candidate's score in one round.

    Attributes
    ----------
    rank : the first of the ranks that all candidates with this score share; None if no rank was recorded
    last_rank : the last of these ranks, equal to ``rank`` without ties; None if the record ends among the ties
    """

    client: int
    name: str
    picked: bool
    rank: int | None
    last_rank: int | None
    score: float | None
    parts: Mapping[str, float]

    def place(self, of: int | None = None) -> str:
        """Return the rank in words, or '' if there is none.

        >>> ScoreRow(7, "7", True, 3, 17, 0.5, {}).place(of=100)
        '3-17 of 100, tied'
        """
        if self.rank is None:
            return ""
        last = "+" if self.last_rank is None else "" if self.last_rank == self.rank else f"-{self.last_rank}"
        return f"{self.rank}{last}" + (f" of {of}" if of is not None else "") + (", tied" if last else "")


@dataclass(frozen=True)
class Explanation:
    """The explanation of one round, or of one client's part in it.

    Attributes
    ----------
    client, name : the client, or None for the whole round
    picked : whether it was picked
    reason : one sentence
    rows : recorded scores, best first; only the client's own if there is a client
    threshold : the lowest score of a picked client
    status : what became of the client, if it was picked and has reported
    failures : by name, what became of picked clients that returned no valid model, and why
    shadows : by shadow selector, the names it would have picked (or a note why it could not)
    notes : the selector's notes about the choice
    coverage : a warning if few clients carried the training up to this round, else None
    rule : how the selector picks, in its own words; empty if it does not say
    meanings : by name, what the parts of its scores are
    """

    round: int
    ticket: int
    client: int | None
    name: str | None
    picked: bool
    reason: str
    rows: tuple[ScoreRow, ...]
    threshold: float | None
    status: str | None
    failures: Mapping[str, str]
    shadows: Mapping[str, tuple[str, ...] | str]
    notes: Mapping[str, Any]
    coverage: str | None = None
    rule: str = ""
    meanings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        return f"{self.reason} {self.rule}".strip()

    @property
    def outcome(self) -> str:
        """What became of a picked client, and why; for another client, why it was not picked."""
        if not self.picked:
            return self.reason
        return self.failures.get(self.name or "", self.status or "not reported yet")


def recorded_scores(cohort: Cohort) -> dict[str, AnyArray] | None:
    """Return the scores to record: all if there are few, else those of the picked clients and of the next best."""
    if cohort.score is None or cohort.candidates is None or len(cohort.candidates) == 0:
        return None
    score: FloatArray = np.asarray(cohort.score, np.float64)
    candidates: IntArray = cohort.candidates
    if len(candidates) <= _ALL_SCORES:
        order = np.argsort(-score, kind="stable")
        ranks = np.arange(1, len(order) + 1)
    else:
        count = min(len(candidates), cohort.size + _RUNNERS_UP)
        best = top_k(score, count)
        at = np.searchsorted(candidates, cohort.clients)
        at = at[candidates.take(at, mode="clip") == cohort.clients]  # a selector may score only some clients
        others = sorted({*at.tolist()}.difference(best.tolist()))
        order = np.array([*best.tolist(), *others], np.int64)
        ranks = np.concatenate([np.arange(1, count + 1), np.full(len(others), -1)])
    # Picks below the recorded best get the rank -1, because their true rank is not computed.
    arrays: dict[str, AnyArray] = {"client": candidates[order], "rank": ranks, "score": score[order]}
    for name, values in cohort.parts.items():
        arrays[f"part:{name}"] = np.asarray(values, np.float64)[order]
    return arrays


def _rows(table: ClientTable, picked: IntArray, arrays: Mapping[str, AnyArray], n: int) -> tuple[ScoreRow, ...]:
    """Return the recorded scores, each with the first and the last rank of the scores equal to it."""
    if not arrays:
        return tuple(ScoreRow(int(c), table.name(int(c)), True, None, None, None, MappingProxyType({})) for c in picked)
    score = np.where(np.isnan(arrays["score"]), -np.inf, arrays["score"])  # NaN is ranked last
    ranked = score[arrays["rank"] > 0]  # best first
    # If not all scores were recorded, the end of the last tie is not known.
    cut = n > max(_ALL_SCORES, len(ranked)) and len(ranked) == len(picked) + _RUNNERS_UP
    first = np.searchsorted(-ranked, -score, side="left") + 1
    last = np.searchsorted(-ranked, -score, side="right")
    chosen = set(picked.tolist())
    parts = {name[5:]: values for name, values in arrays.items() if name.startswith("part:")}
    rows = []
    for i, (client, rank, a, b) in enumerate(
        zip(arrays["client"].tolist(), arrays["rank"].tolist(), first.tolist(), last.tolist(), strict=True)
    ):
        # A pick below the recorded best has no rank, unless its score equals a recorded one.
        has_rank = a <= b
        open_end = cut and b == len(ranked) and (a < b or rank < 0)
        rows.append(
            ScoreRow(
                client=client,
                name=table.name(client),
                picked=client in chosen,
                rank=a if has_rank else None,
                last_rank=b if has_rank and not open_end else None,
                score=float(arrays["score"][i]),
                parts=MappingProxyType({name: float(values[i]) for name, values in parts.items()}),
            )
        )
    return tuple(rows)


def reasons_of(journal: Journal) -> dict[int, dict[str, str]]:
    """Return by ticket and name the host's reasons why clients returned no valid model."""
    reasons: dict[int, dict[str, str]] = {}
    for body in journal.events(FAILURES):
        if "ticket" not in body:  # another host may use this kind for notes of its own
            continue
        reasons.setdefault(int(body["ticket"]), {}).update(body["failures"])
    return reasons


def history(journal: Journal, client: int | str) -> list[Explanation]:
    """Return one client's part in every recorded round, oldest first."""
    rounds = dict.fromkeys(row.round for row in journal.cohorts())
    return [explain_round(journal, round_, client) for round_ in rounds]


def explain_round(journal: Journal, round_: int, client: int | str | None = None) -> Explanation:
    """Explain one round, or one client's part in it, from a journal.

    Parameters
    ----------
    round_ : int
        Counted from 0.
    client : int or str, optional
        Its dense index or name.
    """
    round_ = integer(round_, "A round")
    table, active = journal.table()
    index = None if client is None else table.index(client if isinstance(client, str) else table.name(client))
    cohort = _find_cohort(journal, round_, index)
    rule, meanings = about_selector(journal.meta().get("selector"))
    scores = journal.scores(cohort.ticket)
    picked, arrays, _ = scores.pop("", (cohort.clients, {}, None))
    if not arrays and meanings:  # the selector usually scores, but not in this round, for example in a warm-up
        rule = "This choice was made without scores."
    rows = _rows(table, picked, arrays, cohort.n_candidates)
    threshold = min((row.score for row in rows if row.picked and row.score is not None), default=None)
    name = None if index is None else table.name(index)
    shown = rows if index is None else tuple(row for row in rows if row.client == index)
    replies = journal.replies(cohort.ticket)
    status = next((Status(reply.status).name for reply in replies if reply.client == index), None)
    is_picked = index is not None and index in picked.tolist()
    if index is None:
        reason = f"Round {round_}: {len(picked)} of {cohort.n_candidates} candidates were picked."
    elif is_picked:
        reason = f"Client {name} was picked in round {round_}{_place(shown, cohort.n_candidates)}."
    elif (absent := _absence(journal, cohort, index, table.n)) is not None:
        reason, rule = f"Client {name} was not a candidate in round {round_}: {absent}.", ""
    elif journal.candidates(cohort.ticket, table.n) is None:
        reason = f"Client {name} was not picked in round {round_}. The reason was pruned from the journal."
    elif not shown:
        recorded = len(arrays.get("client", ()))
        rest = f"; only the {recorded} best scores are recorded." if recorded else "."
        reason = f"Client {name} was a candidate in round {round_} but not picked{rest}"
    else:
        reason = f"Client {name} was not picked in round {round_}{_place(shown, cohort.n_candidates)}."
        if threshold is not None:
            score = shown[0].score
            # Some selectors draw at random or take turns, so a higher score than that of a picked client is no error.
            end = ": scores alone do not decide." if score is not None and score > threshold else "."
            reason += f" The lowest score picked was {threshold:.5g}{end}"
    reasons = reasons_of(journal).get(cohort.ticket, {})
    failures = {}
    for reply in replies:
        if reply.status != Status.OK:
            why = reasons.get(table.name(reply.client))
            failures[table.name(reply.client)] = Status(reply.status).name + ("" if why is None else f": {why}")
    return Explanation(
        round=round_,
        ticket=cohort.ticket,
        client=index,
        name=name,
        picked=is_picked,
        reason=reason,
        rows=shown,
        threshold=threshold,
        status=status if is_picked else None,
        failures=MappingProxyType(failures),
        shadows=MappingProxyType(
            {name: note or table.names_of(clients) for name, (clients, _, note) in scores.items()}
        ),
        notes=MappingProxyType({**cohort.notes, **_waits(journal, round_)}),
        coverage=Tally.of(table.n, journal.picks(round_)).coverage(active).warning,
        rule=rule,
        meanings=meanings,
    )


def _absence(journal: Journal, cohort: CohortRow, client: int, n: int) -> str | None:
    """Return why a client was not a candidate, or None if it was, or if the candidates were pruned."""
    candidates = journal.candidates(cohort.ticket, n)
    if candidates is None or client in candidates.tolist():
        return None
    absent = "not available, already training, or gone"
    if journal.meta().get("asynchronous"):
        absent = "not available, already training, gone, or it had given enough of the newest answers"
    return journal.exclusions(cohort.ticket).get(client, absent)


def _waits(journal: Journal, round_: int) -> dict[str, str]:
    """Return the places that stayed free during a model, and why, as a note."""
    found = [body for body in journal.events(WAITED) if body["round"] == round_]
    reasons = dict.fromkeys(f"{', '.join(body['clients'])} had given enough of the newest answers" for body in found)
    return {"a place waited": "; ".join(reasons)} if found else {}


def _find_cohort(journal: Journal, round_: int, client: int | None) -> CohortRow:
    """Return a round's cohort; if it was drawn several times, the last one."""
    last, _ = journal.last()
    rows = journal.cohorts(round_=round_) if 0 <= round_ <= last else []
    if not rows and round_ <= last:
        why = "".join(f": {reason}" for reason in _waits(journal, round_).values())
        raise InputError(f"No client was asked to train model {round_}{why}.", hint="choose another round")
    if not rows:
        raise InputError(f"There is no round {round_}; the journal holds rounds 0 to {last}.")
    if client is None or not journal.meta().get("asynchronous"):
        return rows[-1]
    # A round of an asynchronous session has many cohorts of one client each.
    return next((row for row in reversed(rows) if client in row.clients.tolist()), rows[-1])


def _place(rows: Sequence[ScoreRow], candidates: int) -> str:
    """Return a client's score, rank and parts as the end of a sentence; '' if no score is recorded."""
    if not rows or rows[0].score is None:
        return ""
    rank = f", rank {rows[0].place(of=candidates)}" if rows[0].rank else ""
    parts = " (" + ", ".join(f"{k} {v:.4g}" for k, v in rows[0].parts.items()) + ")" if rows[0].parts else ""
    return f"; it scored {rows[0].score:.5g}{rank}{parts}"


def about_selector(spec: Any) -> tuple[str, Mapping[str, str]]:
    """Return how a selector picks, in its own words, and what the parts of its scores are; empty if it is unknown.

    ``spec`` is the journal's description of the selector. Nothing is imported just because a journal names it.
    """
    nothing: tuple[str, Mapping[str, str]] = ("", MappingProxyType({}))
    try:
        kind = class_of(spec)
    except (TypeError, KeyError, AttributeError):  # the journal is old or damaged
        return nothing
    if kind is None:
        return nothing
    inner = spec["params"].get("of") if kind.is_wrapper else None
    rule, meanings = about_selector({"name": inner, "params": {}}) if isinstance(inner, str) else nothing
    return f"{kind.picks_by} {rule}".strip(), MappingProxyType({**meanings, **kind.part_meanings})
