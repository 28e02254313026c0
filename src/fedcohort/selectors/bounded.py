"""What one client's word can do, bounded: any selector over numbers clipped to what the others say.

.. [Dixon1960] W. J. Dixon, "Simplified Estimation from Censored Normal Samples", Annals of Mathematical Statistics 31,
   1960 (winsorising).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np

from fedcohort.arrays import BoolArray, FloatArray, IntArray, sealed
from fedcohort.clients import ClientTable, LabelCounts, LabelFactor, LabelGram, LabelInfo
from fedcohort.errors import ParameterError
from fedcohort.params import Constraint, Interval, Optional, Text, param, parameters
from fedcohort.protocol import (
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
from fedcohort.signals import LOSS_SIGNALS, METRIC_SIGNALS, TABLE_SIGNALS, LossOf, Signal

_ENOUGH = 10  # numbers said at one time whose own quantiles bound them as well
_FAR = 6.0  # robust standard deviations from the median, of logarithms, beyond which a word is doubted
_SPREAD = 0.1  # the least such deviation: clients that all say the same leave room for 10%
_NAMED = 20  # doubted clients that a note names
_WORDS, _SERVER = "bounded_words", "bounded_server"


@dataclass(frozen=True)
class _Table(Constraint):
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
    r"""Another selector, shown every number winsorised to what all clients say ([Dixon1960]_).

    Of each number that clients tell, the last word of everybody is kept. Whatever is said is moved into
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

    Symbols: tau = tail. Deviations: quantiles are values that were said, so that those beyond them count exactly alike.
    Not bounded: the shares of classes where only a factor or inner products of label counts are known, answers of "yes"
    or "no" (Signal.KEPT), and who answers.

    Examples
    --------
    >>> from fedcohort import ClientTable, LabelCounts, RoundRequest, Session
    >>> honest = [20.0] * 10
    >>> table = ClientTable(sizes=[*honest, 1e9])
    >>> session = Session(Bounded(of="size-weighted"), table, seed=1)
    >>> session.ask(RoundRequest(size=2)).notes["doubted"]
    '10'
    """

    of: str = param("power-of-choice", Text(), "the selector that chooses, by its name")
    params: Mapping[str, Any] | None = param(None, Optional(_Table()), "its parameters")
    tail: float = param(
        0.2, Interval(float, 0, 0.5, "neither"), "share of clients at each end whose words count alike (tau)"
    )
    audit: float | None = param(
        None,
        Optional(Interval(float, 1, None, "right")),
        "factor within which a loss must be of the loss on the server's own samples; None: not compared",
    )
    around: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of == self.name:
            raise ParameterError(f"The 'of' parameter of Bounded must be another selector. Got {self.of!r}.")
        given = {key: list(v) if isinstance(v, tuple) else v for key, v in (self.params or {}).items()}
        object.__setattr__(self, "params", given or None)
        for name in ("starves", "chooses", "default_filter"):  # as the one that chooses has them
            object.__setattr__(self, name, getattr(self.inner, name))

    @cached_property
    def inner(self) -> Selector[Any]:
        """The selector that chooses."""
        return SELECTORS.create(self.of, **(self.params or {}))

    @property
    def requires(self) -> frozenset[Signal]:
        """What the selector that chooses reads, and with ``audit`` the server's own loss."""
        return self.inner.requires | (frozenset() if self.audit is None else {Signal.SERVER_LOSS})

    def adapted(self, supplied: frozenset[Signal]) -> Bounded:
        """Adapt the selector that chooses."""
        fitted = self.inner.adapted(supplied)
        if fitted is self.inner:
            return self
        return dataclasses.replace(self, params={i.name: getattr(fitted, i.name) for i in parameters(type(fitted))})

    # -- the state: that of the selector that chooses, and everybody's last words ------------------------------------

    @cached_property
    def _heard(self) -> tuple[Signal, ...]:
        """The numbers whose last words are kept, one column each."""
        asked = LOSS_SIGNALS if Signal.LOSS_QUERY in self.inner.requires else frozenset()
        return tuple(sorted((self.inner.requires & METRIC_SIGNALS) | asked))

    def init(self, clients: ClientTable, rng: np.random.Generator) -> Any:
        """Nobody has said anything yet."""
        words = np.full((clients.n, len(self._heard)), np.nan)
        return _joined(self.inner.init(self.bounded_facts(clients)[0], rng), words, np.nan)

    def grow(self, state: Any, clients: ClientTable, rng: np.random.Generator) -> Any:
        """Let the selector that chooses grow; new clients have said nothing yet."""
        theirs, words, server = _parted(state)
        more = np.full((clients.n - len(words), words.shape[1]), np.nan)
        grown = self.inner.grow(theirs, self.bounded_facts(clients)[0], rng)
        return _joined(grown, np.concatenate([words, more]), server)

    # -- a round -------------------------------------------------------------------------------------------------------

    def size(self, state: Any, asked: int, candidates: int) -> int:
        """As the selector that chooses wants it."""
        return self.inner.size(_parted(state)[0], asked, candidates)

    def query(self, state: Any, slate: Slate, rng: np.random.Generator) -> Query | None:
        """Ask what the selector that chooses asks."""
        table, _ = self.bounded_facts(slate.clients)
        return self.inner.query(_parted(state)[0], dataclasses.replace(slate, clients=table), rng)

    def select(self, state: Any, slate: Slate, answer: Answer | None, rng: np.random.Generator) -> tuple[Cohort, Any]:
        """Choose by what was said, bounded, and say who is doubted."""
        theirs, words, server = _parted(state)
        table, odd = self.bounded_facts(slate.clients)
        if answer is not None:
            answer, words = self._answer(answer, words, server)
        cohort, theirs = self.inner.select(theirs, dataclasses.replace(slate, clients=table), answer, rng)
        doubted = odd | _doubted(words)
        if doubted.any():
            who = slate.candidates[doubted[slate.candidates]]
            names = slate.clients.names_of(who[:_NAMED])
            note = ", ".join(names) + (f" and {len(who) - _NAMED} more" if len(who) > _NAMED else "")
            cohort = dataclasses.replace(
                cohort,
                notes={**cohort.notes, **({"doubted": note} if len(who) else {})},
                parts={**cohort.parts, **_part(doubted, cohort.candidates)},
            )
        return cohort, _joined(theirs, words, server)

    def update(self, state: Any, outcome: Outcome) -> Any:
        """Hear what was reported, and let the selector that chooses learn from it, bounded."""
        theirs, words, server = _parted(state)
        if self.audit is not None:
            seen = outcome[Signal.SERVER_LOSS][outcome.ok]
            server = float(np.median(seen[np.isfinite(seen)])) if np.isfinite(seen).any() else server
        metrics = {}
        for signal in self.inner.requires & METRIC_SIGNALS:
            said = outcome[signal]
            length = said if said.ndim == 1 else np.linalg.norm(said, axis=1)
            words = self._with_words(words, signal, outcome.clients, length)
            counted = self._bounded(length, self._words(words, signal), self._range(signal, server))
            if said.ndim == 2:
                counted = _stretched(said, length, counted)
            metrics[signal] = sealed(counted)
        shown = dataclasses.replace(
            outcome, table=self.bounded_facts(outcome.table)[0], _metrics=metrics, _granted=self.inner.requires
        )
        return _joined(self.inner.update(theirs, shown), words, server)

    # -- what counts ---------------------------------------------------------------------------------------------------

    def _answer(self, answer: Answer, words: FloatArray, server: float) -> tuple[Answer, FloatArray]:
        values = {}
        for signal, said in answer.values.items():
            if isinstance(answer.query, Losses):
                words = self._with_words(words, signal, answer.query.clients, said)
                values[signal] = self._bounded(said, self._words(words, signal), self._range(signal, server))
            else:
                values[signal] = np.stack([self._bounded(row, row) for row in said]) if len(said) else said
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

    def _bounded(self, said: FloatArray, words: FloatArray, admitted: tuple[float, float] | None = None) -> FloatArray:
        """Return what counts of what was said; NaN stays NaN."""
        bounds = [said_quantiles(words, self.tail)]
        if np.isfinite(said).sum() >= _ENOUGH:
            bounds.append(said_quantiles(said, self.tail))
        low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
        if low > high:  # what is said now has little to do with what was said before
            low, high = bounds[-1]
        if admitted is not None:
            low, high = np.clip(low, *admitted), np.clip(high, *admitted)
        return np.asarray(np.clip(said, low, high))

    def _skewed(self, counts: FloatArray, sizes: FloatArray) -> FloatArray:
        """Return label counts none of which is more balanced than a share ``tail`` of all are said to be.

        Who is gets a part of its samples moved to its largest class, or of several to the one that is commonest.
        """
        full = sizes > 0
        shares = counts[full] / sizes[full, None]
        even = 1.0 / shares.shape[1]
        found = np.square(shares - even).sum(axis=1)
        least, _ = said_quantiles(found, self.tail)
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
        counted = self._bounded(told, told)
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = np.where(told > 0, counted / told, 1.0)
        match labels:
            case LabelCounts():
                labels = LabelCounts(self._skewed(labels.counts, told) * scale[:, None])
            case LabelFactor():
                labels = LabelFactor(labels.factor * scale[:, None], labels.classes)
            case LabelGram():
                labels = LabelGram(labels.gram * scale[:, None] * scale, labels.classes)
        table = ClientTable(clients.names if clients.has_names else None, None if sizes is None else counted, labels)
        return table.granting(self.inner.requires), _doubted(told[:, None])


def said_quantiles(values: FloatArray, tail: float) -> tuple[float, float]:
    """Return two of the values: a share ``tail`` of them lies below the one, and as many above the other.

    >>> said_quantiles(np.array([5.0, 1.0, 3.0, 2.0, 4.0]), 0.2)
    (2.0, 4.0)
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return -np.inf, np.inf
    low = int(tail * len(known) + 1e-9)
    high = len(known) - 1 - low
    parted = np.partition(known, sorted({low, high}))
    return float(parted[low]), float(parted[high])


def _stretched(rows: FloatArray, length: FloatArray, wanted: FloatArray) -> FloatArray:
    """Return vectors with other lengths; one of length 0, which has no direction, takes that of the others' mean.

    Where nobody has a direction, or they cancel each other, it stays 0.

    >>> _stretched(np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([5.0, 0.0]), np.array([10.0, 5.0]))
    array([[6., 8.],
           [3., 4.]])
    >>> _stretched(np.zeros((2, 2)), np.zeros(2), np.array([10.0, 5.0]))
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


def _doubted(words: FloatArray) -> BoolArray:
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


@cache
def _state_class(theirs: Any) -> Any:
    """Return a state with the fields of another, the last words of every client and the server's loss."""
    fields: list[Any] = [
        (f.name, f.type, dataclasses.field(metadata=dict(f.metadata))) for f in dataclasses.fields(theirs)
    ]
    fields += [(_WORDS, Any, per_client()), (_SERVER, float)]
    made: Any = dataclasses.make_dataclass(f"Bounded{theirs.__name__}", fields, frozen=True)
    made.theirs = theirs
    return made


def _joined(theirs: Any, words: FloatArray, server: float) -> Any:
    cls: Any = type(theirs)
    values = {f.name: getattr(theirs, f.name) for f in dataclasses.fields(cls)}
    return _state_class(cls)(**values, **{_WORDS: words, _SERVER: server})


def _parted(state: Any) -> tuple[Any, FloatArray, float]:
    cls: Any = type(state).theirs
    values = {f.name: getattr(state, f.name) for f in dataclasses.fields(cls)}
    return cls(**values), getattr(state, _WORDS), getattr(state, _SERVER)
