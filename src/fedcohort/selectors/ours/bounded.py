"""What one client's word can do, bounded: any selector, over clipped numbers and with a limit on places.

.. [Dixon1960] W. J. Dixon, "Simplified Estimation from Censored Normal Samples", Annals of Mathematical Statistics 31,
   1960 (winsorising).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray, freeze
from fedcohort.core.clients import ClientTable, LabelCounts, LabelFactor, LabelGram, LabelInfo
from fedcohort.core.errors import ParameterError
from fedcohort.core.params import Constraint, Interval, Optional, ParamSets, Text, param, parameters
from fedcohort.core.protocol import (
    SELECTORS,
    Answer,
    Cohort,
    Losses,
    Outcome,
    Query,
    Selector,
    Slate,
    per_client,
    register,
)
from fedcohort.core.signals import LOSS_SIGNALS, TABLE_SIGNALS, LossOf, Signal

_ENOUGH = 10  # numbers reported together whose own quantiles bound them as well
_FAR = 6.0  # robust standard deviations from the median, of logarithms, beyond which a word is doubted
_SPREAD = 0.1  # the least such deviation: clients that all say the same leave room for 10%
_NAMED = 20  # clients that a note names
_ROUNDING = 1e-9  # of sums of earned places
_SAVED = 2.0  # places that a client can save up
_WORDS, _SERVER, _PLACES = "bounded_words", "bounded_server", "bounded_places"


@dataclass(frozen=True)
class _ParameterTable(Constraint):
    """A table of parameters by name."""

    def admits(self, value: object) -> bool:
        """Whether ``value`` is such a table."""
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)

    def describe(self) -> str:
        """Name the allowed values."""
        return "a table of the parameters of that selector"

    def bad_values(self) -> list[object]:
        """Return things that are no such table."""
        return [3, {3: 1}, "x"]


@register("bounded")
@dataclass(frozen=True, kw_only=True)
class Bounded(Selector[Any]):
    r"""Another selector, which gives nobody too many places and is shown winsorised numbers ([Dixon1960]_).

    **Places.** Whatever a client says, in every span of rounds it takes part at most

    .. math:: 2 + c \sum_t \frac{k_t}{a_t}

    times: k of the a clients available are chosen in round t, so the sum is its fair share of the rounds in which it
    was available. Each such round brings it :math:`c \, k / a` places, of which it can save up two, and taking part
    costs one; who has less than one is no candidate. This needs no idea of what the lie is, and holds nobody back
    who would stay within it. With :math:`c \ge 2`, the same clients available and cohorts of one size,
    enough candidates are always left; where there are fewer, those with the most saved up fill the cohort, and owe the
    place.

    **Numbers.** Of each number that clients tell, the last word of everybody is kept. What is said is moved into
    :math:`[Q_\tau, Q_{1 - \tau}]`, quantiles of these words, before the selector sees it: reported and asked losses,
    durations, norms, the length of vectors (one of length 0 counts as the others' mean), sizes, and with sizes the
    label counts, which may also be no more balanced than a share :math:`\tau` of all are said to be. As long as fewer
    than a share :math:`\tau` of the clients lie, the largest number that counts was said by an honest client, and a
    liar is one among the :math:`\tau N` clients that count alike, whatever it says. Where many numbers come at one
    time, their own quantiles bound them too, so that old words do not let new ones pass.

    With ``audit``, losses of the received model are also held against the server's own: they must lie within that
    factor of Signal.SERVER_LOSS as last reported.

    A word more than 6 robust standard deviations (of logarithms) from the median of all is doubted: the candidates it
    is about have 1 in the score's part "doubted", and a note names them. What was said stays in the journal as it was
    said; averages of models are not touched, see the aggregators for those.

    Symbols: c = most, tau = tail. Deviations: quantiles are values that were said, so that those beyond them count
    exactly alike. Not clipped, and so bounded by places only: the direction of vectors, the shares of classes, answers
    of "yes" or "no" (Signal.KEPT), and who answers.

    Examples
    --------
    >>> from fedcohort import ClientTable, LabelCounts, Session
    >>> from fedcohort.core.protocol import RoundRequest
    >>> honest = [20.0] * 10
    >>> table = ClientTable(sizes=[*honest, 1e9])
    >>> session = Session(Bounded(of="size-weighted"), table, seed=1)
    >>> session.ask(RoundRequest(size=2)).notes["doubted"]
    '10'
    """

    picks_by: ClassVar[str] = (
        "Clients that had their share of the places are not shown to the selector inside, which picks as it does."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "doubted": "1 if what it says does not fit, so that its word counts less",
    }

    checked_params: ClassVar[ParamSets] = {
        "around fedcor": {"of": "fedcor", "params": {"warmup": 2, "interval": 2, "steps": 2}},
        "around flash": {"of": "flash"},
        "no limit": {"of": "fedcbs", "most": None},
        "tight": {"of": "oort", "tail": 0.49, "most": 1.0},
    }

    of: str = param("power-of-choice", Text(), "the selector that chooses, by its name")
    params: Mapping[str, Any] | None = param(None, Optional(_ParameterTable()), "its parameters")
    tail: float = param(
        0.2, Interval(float, 0, 0.5, "neither"), "share of clients at each end whose words count alike (tau)"
    )
    most: float | None = param(
        2.0,
        Optional(Interval(float, 1, None)),
        "how many times its fair share of the places a client can take; None: any number (c)",
    )
    audit: float | None = param(
        None,
        Optional(Interval(float, 1, None, "right")),
        "factor within which a loss must be of the loss on the server's own samples; None: not compared",
    )
    is_wrapper: ClassVar[bool] = True
    added: ClassVar[Mapping[str, object]] = MappingProxyType({"most": None})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of == self.name:
            raise ParameterError(f"The 'of' parameter of Bounded must be another selector. Got {self.of!r}.")
        given = {key: list(v) if isinstance(v, tuple) else v for key, v in (self.params or {}).items()}
        object.__setattr__(self, "params", given or None)
        for name in ("starves", "selects", "default_filter"):  # as the one that chooses has them
            object.__setattr__(self, name, getattr(self.inner, name))

    @cached_property
    def inner(self) -> Selector[Any]:
        """The selector that chooses."""
        return SELECTORS.create(self.of, **(self.params or {}))

    @property
    def aggregator(self) -> str | None:
        """That of the one that chooses."""
        return self.inner.aggregator

    @property
    def requires(self) -> frozenset[Signal]:
        """What the selector that chooses reads, and with ``audit`` the server's own loss."""
        return self.inner.requires | (frozenset() if self.audit is None else {Signal.SERVER_LOSS})

    def adapt(self, supplied: frozenset[Signal]) -> Bounded:
        """Adapt the selector that chooses."""
        fitted = self.inner.adapt(supplied)
        if fitted is self.inner:
            return self
        return dataclasses.replace(self, params={i.name: getattr(fitted, i.name) for i in parameters(type(fitted))})

    # -- the state: that of the selector that chooses, everybody's last words, and the places they have saved up ------

    @cached_property
    def _heard(self) -> tuple[Signal, ...]:
        """The numbers whose last words are kept, one column each."""
        asked = LOSS_SIGNALS if Signal.LOSS_QUERY in self.inner.requires else frozenset()
        return tuple(sorted({s for s in self.inner.requires if s.is_metric} | asked))

    def init(self, clients: ClientTable, rng: np.random.Generator) -> Any:
        """No client has reported anything yet."""
        words = np.full((clients.n, len(self._heard)), np.nan)
        places = None if self.most is None else np.full(clients.n, _SAVED)
        return _join_state(self.inner.init(self.bounded_facts(clients)[0], rng), _Own(words, np.nan, places))

    def grow(self, state: Any, clients: ClientTable, rng: np.random.Generator) -> Any:
        """Let the selector that chooses grow; new clients have reported nothing yet."""
        theirs, own = _split_state(state)
        new = clients.n - len(own.words)
        words = np.concatenate([own.words, np.full((new, own.words.shape[1]), np.nan)])
        places = None if own.places is None else np.concatenate([own.places, np.full(new, _SAVED)])
        grown = self.inner.grow(theirs, self.bounded_facts(clients)[0], rng)
        return _join_state(grown, _Own(words, own.server, places))

    # -- a round -------------------------------------------------------------------------------------------------------

    def size(self, state: Any, asked: int, candidates: int) -> int:
        """As the selector that chooses wants it."""
        return self.inner.size(_split_state(state)[0], asked, candidates)

    def query(self, state: Any, slate: Slate, rng: np.random.Generator) -> Query | None:
        """Ask what the selector that chooses asks."""
        theirs, own = _split_state(state)
        table, _ = self.bounded_facts(slate.clients)
        candidates = slate.candidates[self._able(self._add_earned_places(own.places, slate), slate)]
        return self.inner.query(theirs, dataclasses.replace(slate, candidates=candidates, clients=table), rng)

    def select(self, state: Any, slate: Slate, answer: Answer | None, rng: np.random.Generator) -> tuple[Cohort, Any]:
        """Choose by bounded reports, and name the clients in doubt."""
        theirs, own = _split_state(state)
        table, odd = self.bounded_facts(slate.clients)
        words, places = own.words, self._add_earned_places(own.places, slate)
        if answer is not None:
            answer, words = self._answer(answer, words, own.server)
        able = self._able(places, slate)
        shown = dataclasses.replace(slate, candidates=slate.candidates[able], clients=table)
        cohort, theirs = self.inner.select(theirs, shown, answer, rng)
        if places is not None:
            places[cohort.clients] -= 1.0
        doubted = odd | _outliers(words)
        notes = dict(cohort.notes)
        for note, who in (
            ("doubted", slate.candidates[doubted[slate.candidates]]),
            ("had its share", slate.candidates[~able]),
        ):
            if len(who):
                names = ", ".join(slate.clients.names_of(who[:_NAMED]))
                notes[note] = names + (f" and {len(who) - _NAMED} more" if len(who) > _NAMED else "")
        parts = {**cohort.parts, **(_part(doubted, cohort.candidates) if doubted.any() else {})}
        cohort = dataclasses.replace(cohort, notes=notes, parts=parts)
        return cohort, _join_state(theirs, _Own(words, own.server, places))

    def update(self, state: Any, outcome: Outcome) -> Any:
        """Hear what was reported, and let the selector that chooses learn from it, bounded."""
        theirs, own = _split_state(state)
        words, server = own.words, own.server
        if self.audit is not None:
            seen = outcome[Signal.SERVER_LOSS][outcome.ok]
            server = float(np.median(seen[np.isfinite(seen)])) if np.isfinite(seen).any() else server
        metrics = {}
        for signal in [s for s in self.inner.requires if s.is_metric]:
            said = outcome[signal]
            length = said if said.ndim == 1 else np.linalg.norm(said, axis=1)
            words = self._with_words(words, signal, outcome.clients, length)
            counted = self._clip(length, self._words(words, signal), self._range(signal, server))
            if said.ndim == 2:
                counted = _rescale(said, length, counted)
            metrics[signal] = freeze(counted)
        shown = dataclasses.replace(
            outcome, table=self.bounded_facts(outcome.table)[0], _metrics=metrics, _granted=self.inner.requires
        )
        return _join_state(self.inner.update(theirs, shown), _Own(words, server, own.places))

    # -- places --------------------------------------------------------------------------------------------------------

    def _add_earned_places(self, places: FloatArray | None, slate: Slate) -> FloatArray | None:
        """(N,) the places everybody has once this round has brought the available clients theirs."""
        if places is None or self.most is None:
            return None
        earned = places.copy()
        mine = earned[slate.candidates] + self.most * slate.size / len(slate.candidates)
        earned[slate.candidates] = np.minimum(mine, _SAVED)
        return earned

    def _able(self, places: FloatArray | None, slate: Slate) -> BoolArray:
        """(c,) which candidates have a place; where they are too few, also those that have the most of one."""
        if places is None:
            return np.ones(len(slate.candidates), np.bool_)
        mine = slate.of_candidates(places)
        able = np.asarray(mine >= 1.0 - _ROUNDING)
        if able.sum() < slate.size:
            able = np.zeros(len(mine), np.bool_)
            able[np.argsort(-mine, kind="stable")[: slate.size]] = True
        return able

    # -- what counts ---------------------------------------------------------------------------------------------------

    def _answer(self, answer: Answer, words: FloatArray, server: float) -> tuple[Answer, FloatArray]:
        values = {}
        for signal, said in answer.values.items():
            if isinstance(answer.query, Losses):
                words = self._with_words(words, signal, answer.query.clients, said)
                values[signal] = self._clip(said, self._words(words, signal), self._range(signal, server))
            else:
                values[signal] = np.stack([self._clip(row, row) for row in said]) if len(said) else said
        return Answer(answer.query, values), words

    def _words(self, words: FloatArray, signal: Signal) -> FloatArray:
        return words[:, self._heard.index(signal)]

    def _with_words(self, words: FloatArray, signal: Signal, clients: IntArray, said: FloatArray) -> FloatArray:
        words = words.copy()
        spoke = np.isfinite(said)
        words[clients[spoke], self._heard.index(signal)] = said[spoke]
        return words

    def _range(self, signal: Signal, server: float) -> tuple[float, float] | None:
        """Return what the server's own loss admits, None where it says nothing about this."""
        compared = isinstance(signal.how, LossOf) and signal.how.model == "received"
        if self.audit is None or not compared or not np.isfinite(server):
            return None
        return server / self.audit, server * self.audit

    def _clip(self, said: FloatArray, words: FloatArray, admitted: tuple[float, float] | None = None) -> FloatArray:
        """Return reported values within their bounds; NaN stays NaN."""
        bounds = [tail_quantiles(words, self.tail)]
        if np.isfinite(said).sum() >= _ENOUGH:
            bounds.append(tail_quantiles(said, self.tail))
        low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
        if low > high:  # today's reports have little to do with the earlier ones
            low, high = bounds[-1]
        if admitted is not None:
            low, high = np.clip(low, *admitted), np.clip(high, *admitted)
        return np.asarray(np.clip(said, low, high))

    def _skew_counts(self, counts: FloatArray, sizes: FloatArray) -> FloatArray:
        """Return label counts none of which is more balanced than a share ``tail`` of all are said to be.

        Who is gets a part of its samples moved to its largest class, or of several to the one that is commonest.
        """
        full = sizes > 0
        shares = counts[full] / sizes[full, None]
        even = 1.0 / shares.shape[1]
        found = np.square(shares - even).sum(axis=1)
        least, _ = tail_quantiles(found, self.tail)
        near = np.flatnonzero(found < least)
        if not len(near):
            return counts
        largest = (shares[near] + 1e-9 * shares.mean(axis=0)).argmax(axis=1)
        # The part a with |(1 - a) u + a v|^2 = least, where u and v are the shares and the class less even ones.
        own, cross, whole = found[near], shares[near, largest] - even, 1.0 - even
        square, linear = own - 2.0 * cross + whole, cross - own
        part = (np.sqrt(linear**2 + square * (least - own)) - linear) / square
        shares[near] *= 1.0 - part[:, None]
        shares[near, largest] += part
        result = counts.copy()
        result[full] = shares * sizes[full, None]
        return result

    def bounded_facts(self, clients: ClientTable) -> tuple[ClientTable, BoolArray]:
        """Return the table with sizes that count, label counts along with them, and whose size is doubted."""
        granted = self.inner.requires & TABLE_SIGNALS
        if not granted:
            return clients.granting(self.inner.requires), np.zeros(clients.n, np.bool_)
        known = clients.signals & granted
        sizes = clients.sizes if Signal.SIZES in known else None
        labels: LabelInfo | None = clients.labels if Signal.LABEL_PRODUCTS in known else None
        if labels is None and Signal.LABEL_COUNTS in known:
            labels = LabelCounts(clients.label_counts)
        told = labels.counts.sum(axis=1) if isinstance(labels, LabelCounts) else sizes
        if told is None:
            return clients.granting(self.inner.requires), np.zeros(clients.n, np.bool_)
        counted = self._clip(told, told)
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = np.where(told > 0, counted / told, 1.0)
        match labels:
            case LabelCounts():
                labels = LabelCounts(self._skew_counts(labels.counts, told) * scale[:, None])
            case LabelFactor():
                labels = LabelFactor(labels.factor * scale[:, None], labels.classes)
            case LabelGram():
                labels = LabelGram(labels.gram * scale[:, None] * scale, labels.classes)
        table = ClientTable(clients.names if clients.has_names else None, None if sizes is None else counted, labels)
        return table.granting(self.inner.requires), _outliers(told[:, None])


def tail_quantiles(values: FloatArray, tail: float) -> tuple[float, float]:
    """Return two of the values: a share ``tail`` of them lies below the one, and as many above the other.

    >>> tail_quantiles(np.array([5.0, 1.0, 3.0, 2.0, 4.0]), 0.2)
    (2.0, 4.0)
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return -np.inf, np.inf
    low = int(tail * len(known) + 1e-9)
    high = len(known) - 1 - low
    parted = np.partition(known, sorted({low, high}))
    return float(parted[low]), float(parted[high])


def _rescale(rows: FloatArray, length: FloatArray, wanted: FloatArray) -> FloatArray:
    """Return vectors with other lengths; one of length 0, which has no direction, takes that of the others' mean.

    Where nobody has a direction, or they cancel each other, it stays 0.

    >>> _rescale(np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([5.0, 0.0]), np.array([10.0, 5.0]))
    array([[6., 8.],
           [3., 4.]])
    >>> _rescale(np.zeros((2, 2)), np.zeros(2), np.array([10.0, 5.0]))
    array([[0., 0.],
           [0., 0.]])
    """
    some = length > 0
    units = rows[some] / length[some, None]
    middle = units.mean(axis=0) if some.any() else np.zeros(rows.shape[1])
    long = float(np.linalg.norm(middle))
    found = np.where(np.isfinite(length)[:, None], middle / (long or 1.0), np.nan)
    found[some] = units
    return np.asarray(found * wanted[:, None])


def _outliers(words: FloatArray) -> BoolArray:
    """(N,) whose words are far from what all say, in robust deviations of a scale that ends up logarithmic."""
    found = np.zeros(len(words), np.bool_)
    for column in words.T:
        known = np.isfinite(column)
        if known.sum() < _ENOUGH:
            continue
        unit = float(np.median(np.abs(column[known]))) or 1.0
        scaled = np.arcsinh(column[known] / unit)
        middle = np.median(scaled)
        spread = max(1.4826 * float(np.median(np.abs(scaled - middle))), _SPREAD)
        found[known] |= np.abs(scaled - middle) > _FAR * spread
    return found


def _part(doubted: BoolArray, candidates: IntArray | None) -> dict[str, FloatArray]:
    return {} if candidates is None else {"doubted": doubted[candidates].astype(np.float64)}


@dataclass(frozen=True)
class _Own:
    """What is remembered beside the state of the selector that chooses."""

    words: FloatArray  # (N, h) last words
    server: float  # the server's loss
    places: FloatArray | None  # (N,) saved up; None where they are not limited


@cache
def _state_class(theirs: Any, limited: bool) -> Any:
    """Return a state with the fields of another and ours; without a limit on places as version 0.2 had it."""
    fields: list[Any] = [
        (f.name, f.type, dataclasses.field(metadata=dict(f.metadata))) for f in dataclasses.fields(theirs)
    ]
    fields += [(_WORDS, Any, per_client()), (_SERVER, float)]
    if limited:
        fields.append((_PLACES, Any, per_client()))
    made: Any = dataclasses.make_dataclass(f"Bounded{theirs.__name__}", fields, frozen=True)
    made.theirs = theirs
    return made


def _join_state(theirs: Any, own: _Own) -> Any:
    cls: Any = type(theirs)
    values = {f.name: getattr(theirs, f.name) for f in dataclasses.fields(cls)}
    values |= {_WORDS: own.words, _SERVER: own.server}
    if own.places is not None:
        values[_PLACES] = own.places
    return _state_class(cls, own.places is not None)(**values)


def _split_state(state: Any) -> tuple[Any, _Own]:
    cls: Any = type(state).theirs
    values = {f.name: getattr(state, f.name) for f in dataclasses.fields(cls)}
    return cls(**values), _Own(getattr(state, _WORDS), getattr(state, _SERVER), getattr(state, _PLACES, None))
