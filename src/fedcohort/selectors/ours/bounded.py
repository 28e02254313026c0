"""Bound the influence of one client on any selector: clip what it reports, and limit how often it is picked.

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
from fedcohort.core.signals import LOSS_SIGNALS, TABLE_SIGNALS, LossOf, OnServer, Signal
from fedcohort.selectors.numerics.accounts import (
    HAD_ITS_SHARE,
    WAITS,
    Accounts,
    Choice,
    extended,
    names_for_note,
    open_accounts,
)

_ENOUGH = 10  # this many values reported together are also bounded by their own quantiles
_FAR = 6.0  # robust standard deviations (of logarithms) from the median beyond which a value is doubted
_SPREAD = 0.1  # the least such deviation, so that clients that all report the same leave room for 10%
SERVER_LOSS = Signal(
    "server-loss",
    meaning="loss of the received global model on the server's own samples, the same for every client of a round",
    how=OnServer(),
    supplied_by="give the server its own samples: scenario.server_validation, or ServerValidation on Flower",
)
_LAST, _SERVER, _ACCOUNT = "bounded_words", "bounded_server", "bounded_"


@dataclass(frozen=True)
class _ParameterTable(Constraint):
    """A table of parameters by name."""

    def admits(self, value: object) -> bool:
        """Return whether ``value`` is such a table."""
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)

    def describe(self) -> str:
        """Name the allowed values."""
        return "a table of the parameters of that selector"

    def bad_values(self) -> list[object]:
        """Return values that are not such tables."""
        return [3, {3: 1}, "x"]


@register("bounded")
@dataclass(frozen=True, kw_only=True)
class Bounded(Selector[Any]):
    r"""Wrap another selector so that no client gets too many places or distorts it by what it reports ([Dixon1960]_).

    **Places.** Whatever clients report, whoever is there and whatever the wrapped selector prefers, each client is
    asked at most S times its even share plus :math:`\ln(2N) / \mu`, and at least 1/S of it less
    :math:`\ln(2N) / \lambda` (see ``numerics.accounts``). The wrapped selector sees only candidates of whom any cohort
    is within these accounts. If it takes fewer than asked for and these do not fit, it chooses again with their
    number. Where clients are asked one by one, the cohort is empty if no free client fits: the place waits until a busy
    one is back.

    **Numbers.** For each number that clients report, the last value of every client is kept. Before the selector sees
    a value, it is clipped to :math:`[Q_\tau, Q_{1 - \tau}]`, quantiles of these last values. That applies to losses
    (reported or asked for), durations, norms, the length of vectors (a vector of length 0 takes the mean direction of
    the others), sizes, and with sizes the label counts. Label counts may also be no more balanced than a share
    :math:`\tau` of all clients claim. As long as fewer than a share :math:`\tau` of the clients lie, the largest number
    that counts comes from an honest client, and a liar is only one of the :math:`\tau N` clients that count alike. If
    many values arrive at the same time, their own quantiles bound them too, so that old values do not let extreme new
    ones pass.

    With ``audit``, losses of the received model are also compared with the server's own: they are clipped to within
    that factor of the last ``SERVER_LOSS``.

    A value more than 6 robust standard deviations (of logarithms) from the median of all is doubted. The candidates
    that reported it have 1 in the part "doubted" of the score, and a note names them. The journal keeps what was
    reported. Averages of models are not changed; see the aggregators for that.

    Symbols: S = share, tau = tail. Deviations: quantiles are reported values, so that all values beyond them count
    exactly alike. Not clipped, and so bounded only by places: the direction of vectors, the shares of classes, answers
    of "yes" or "no" (Signal.KEPT), and whether a client answers.

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
        "Clients that had their share of the places are hidden from the wrapped selector, which picks as usual."
    )
    part_meanings: ClassVar[Mapping[str, str]] = {
        "doubted": "1 if what it reports is far from the others",
    }

    checked_params: ClassVar[ParamSets] = {
        "around fedcor": {"of": "fedcor", "params": {"warmup": 2, "interval": 2, "steps": 2}},
        "around flash": {"of": "flash"},
        "no limit": {"of": "fedcbs", "share": None},
        "tight": {"of": "oort", "tail": 0.49, "share": 1.25},
    }

    of: str = param("power-of-choice", Text(), "name of the wrapped selector")
    params: Mapping[str, Any] | None = param(None, Optional(_ParameterTable()), "its parameters")
    tail: float = param(
        0.2, Interval(float, 0, 0.5, "neither"), "share of clients at each end whose values count alike (tau)"
    )
    share: float | None = param(
        2.0,
        Optional(Interval(float, 1, None, "neither")),
        "most a client is asked, as a multiple of its even share, and one over the least; None: no accounts (S)",
    )
    audit: float | None = param(
        None,
        Optional(Interval(float, 1, None, "right")),
        "largest ratio between a loss and the loss on the server's own samples; None: not compared",
    )
    is_wrapper: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of == self.name:
            raise ParameterError(f"The 'of' parameter of Bounded must be another selector. Got {self.of!r}.")
        params = {key: list(v) if isinstance(v, tuple) else v for key, v in (self.params or {}).items()}
        object.__setattr__(self, "params", params or None)
        for name in (
            "starves",
            "selects",
            "default_filter",
            "one_at_a_time",
        ):  # the same as those of the wrapped selector
            object.__setattr__(self, name, getattr(self.inner, name))

    @cached_property
    def inner(self) -> Selector[Any]:
        """The wrapped selector."""
        return SELECTORS.create(self.of, **(self.params or {}))

    @property
    def aggregator(self) -> str | None:
        """The aggregator of the wrapped selector."""
        return self.inner.aggregator

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals of the wrapped selector, and with ``audit`` the server's own loss."""
        return self.inner.requires | (frozenset() if self.audit is None else {SERVER_LOSS})

    def adapt(self, supplied: frozenset[Signal]) -> Bounded:
        """Adapt the wrapped selector."""
        fitted = self.inner.adapt(supplied)
        if fitted is self.inner:
            return self
        return dataclasses.replace(self, params={i.name: getattr(fitted, i.name) for i in parameters(type(fitted))})

    # -- the state: that of the wrapped selector, the last values of all clients, and their accounts ---------------

    @cached_property
    def _columns(self) -> tuple[Signal, ...]:
        """The numbers whose last values are kept, one column each."""
        asked = LOSS_SIGNALS if Signal.LOSS_QUERY in self.inner.requires else frozenset()
        return tuple(sorted({s for s in self.inner.requires if s.is_metric} | asked))

    def init(self, clients: ClientTable, rng: np.random.Generator) -> Any:
        """Start without reports."""
        last = np.full((clients.n, len(self._columns)), np.nan)
        own = _Own(last, np.nan, open_accounts(clients.n))
        return _join_state(self.inner.init(self.bounded_facts(clients)[0], rng), own)

    def grow(self, state: Any, clients: ClientTable, rng: np.random.Generator) -> Any:
        """Grow the state of the wrapped selector, and add clients without reports."""
        inner_state, own = _split_state(state)
        new = clients.n - len(own.last)
        last = np.concatenate([own.last, np.full((new, own.last.shape[1]), np.nan)])
        grown = self.inner.grow(inner_state, self.bounded_facts(clients)[0], rng)
        return _join_state(grown, _Own(last, own.server, extended(own.accounts, clients.n)))

    # -- a round -------------------------------------------------------------------------------------------------------

    def size(self, state: Any, asked: int, candidates: int) -> int:
        """Return the size that the wrapped selector wants."""
        return self.inner.size(_split_state(state)[0], asked, candidates)

    def query(self, state: Any, slate: Slate, rng: np.random.Generator) -> Query | None:
        """Ask the question of the wrapped selector."""
        inner_state, own = _split_state(state)
        table, _ = self.bounded_facts(slate.clients)
        shown = self._shown(own.accounts, slate)[0]
        if not len(shown.candidates):
            return None
        return self.inner.query(inner_state, dataclasses.replace(shown, clients=table), rng)

    def select(self, state: Any, slate: Slate, answer: Answer | None, rng: np.random.Generator) -> tuple[Cohort, Any]:
        """Choose by bounded values, and name the doubted clients."""
        inner_state, own = _split_state(state)
        table, odd_size = self.bounded_facts(slate.clients)
        last, accounts = own.last, own.accounts
        if answer is not None:
            answer, last = self._bounded_answer(answer, last, own.server)
        shown, choice = self._shown(accounts, slate)
        if not len(shown.candidates):
            return Cohort(shown.candidates, notes={"reason": WAITS}), state
        cohort, after = self.inner.select(inner_state, dataclasses.replace(shown, clients=table), answer, rng)
        # A selector that took fewer is asked again, because an even draw of so few gives everybody less.
        while choice is not None and cohort.size not in (0, shown.size):
            shown, choice = self._shown(accounts, dataclasses.replace(slate, size=cohort.size))
            if choice is None or choice.fits(cohort.clients):
                break
            cohort, after = self.inner.select(inner_state, dataclasses.replace(shown, clients=table), answer, rng)
        if choice is not None:
            accounts = choice.booked(cohort.clients, accounts)
        doubted = odd_size | _outliers(last)
        notes = dict(cohort.notes)
        for note, clients in (
            ("doubted", slate.candidates[doubted[slate.candidates]]),
            (HAD_ITS_SHARE, np.setdiff1d(slate.candidates, shown.candidates, assume_unique=True)),
        ):
            if len(clients):
                notes[note] = names_for_note(slate, clients)
        parts = dict(cohort.parts)
        if doubted.any() and cohort.candidates is not None:
            parts["doubted"] = doubted[cohort.candidates].astype(np.float64)
        cohort = dataclasses.replace(cohort, notes=notes, parts=parts)
        return cohort, _join_state(after, _Own(last, own.server, accounts))

    def update(self, state: Any, outcome: Outcome) -> Any:
        """Keep what was reported, and let the wrapped selector learn from the bounded values."""
        inner_state, own = _split_state(state)
        last, server = own.last, own.server
        if self.audit is not None:
            losses = outcome[SERVER_LOSS][outcome.ok]
            server = float(np.median(losses[np.isfinite(losses)])) if np.isfinite(losses).any() else server
        metrics = {}
        for signal in [s for s in self.inner.requires if s.is_metric]:
            values = outcome[signal]
            length = values if values.ndim == 1 else np.linalg.norm(values, axis=1)
            last = self._with_values(last, signal, outcome.clients, length)
            bounded = self._clip(length, self._column(last, signal), self._audit_range(signal, server))
            if values.ndim == 2:
                bounded = _rescale(values, length, bounded)
            metrics[signal] = freeze(bounded)
        shown = dataclasses.replace(
            outcome, table=self.bounded_facts(outcome.table)[0], _metrics=metrics, _granted=self.inner.requires
        )
        return _join_state(self.inner.update(inner_state, shown), _Own(last, server, own.accounts))

    def _shown(self, accounts: Accounts, slate: Slate) -> tuple[Slate, Choice | None]:
        """Return the slate with the candidates that the wrapped selector sees, and the accounts' choice."""
        if self.share is None:
            return slate, None
        choice = Choice(accounts, self.share, slate)
        shown = choice.all_permitted(turn=slate.round * slate.size)
        return dataclasses.replace(slate, candidates=slate.candidates[shown]), choice

    # -- values that count ---------------------------------------------------------------------------------------------

    def _bounded_answer(self, answer: Answer, last: FloatArray, server: float) -> tuple[Answer, FloatArray]:
        bounded = {}
        for signal, values in answer.values.items():
            if isinstance(answer.query, Losses) and signal not in self._columns:
                # A loss that the wrapped selector's author declared; there are no earlier values.
                bounded[signal] = self._clip(values, values, self._audit_range(signal, server))
            elif isinstance(answer.query, Losses):
                last = self._with_values(last, signal, answer.query.clients, values)
                bounded[signal] = self._clip(values, self._column(last, signal), self._audit_range(signal, server))
            else:
                bounded[signal] = np.stack([self._clip(row, row) for row in values]) if len(values) else values
        return Answer(answer.query, bounded), last

    def _column(self, last: FloatArray, signal: Signal) -> FloatArray:
        return last[:, self._columns.index(signal)]

    def _with_values(self, last: FloatArray, signal: Signal, clients: IntArray, values: FloatArray) -> FloatArray:
        last = last.copy()
        known = np.isfinite(values)
        last[clients[known], self._columns.index(signal)] = values[known]
        return last

    def _audit_range(self, signal: Signal, server: float) -> tuple[float, float] | None:
        """Return the range that the server's own loss admits; None if it does not apply to this signal."""
        compared = isinstance(signal.how, LossOf) and signal.how.model == "received"
        if self.audit is None or not compared or not np.isfinite(server):
            return None
        return server / self.audit, server * self.audit

    def _clip(self, values: FloatArray, last: FloatArray, admitted: tuple[float, float] | None = None) -> FloatArray:
        """Return reported values within their bounds; NaN stays NaN."""
        bounds = [tail_quantiles(last, self.tail)]
        if np.isfinite(values).sum() >= _ENOUGH:
            bounds.append(tail_quantiles(values, self.tail))
        low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
        if low > high:  # these reports have little to do with the earlier ones
            low, high = bounds[-1]
        if admitted is not None:
            low, high = np.clip(low, *admitted), np.clip(high, *admitted)
        return np.asarray(np.clip(values, low, high))

    def _skew_counts(self, counts: FloatArray, sizes: FloatArray) -> FloatArray:
        """Return label counts, none of them more balanced than a share ``tail`` of all clients claim.

        If a client is, part of its samples move to its largest class (of several, to the most common one).
        """
        full = sizes > 0
        shares = counts[full] / sizes[full, None]
        even = 1.0 / shares.shape[1]
        imbalance = np.square(shares - even).sum(axis=1)
        least, _ = tail_quantiles(imbalance, self.tail)
        near = np.flatnonzero(imbalance < least)
        if not len(near):
            return counts
        largest = (shares[near] + 1e-9 * shares.mean(axis=0)).argmax(axis=1)
        # The part a solves |(1 - a) u + a v|^2 = least, where u and v are the shares and the class minus even shares.
        own, cross, whole = imbalance[near], shares[near, largest] - even, 1.0 - even
        square, linear = own - 2.0 * cross + whole, cross - own
        part = (np.sqrt(linear**2 + square * (least - own)) - linear) / square
        shares[near] *= 1.0 - part[:, None]
        shares[near, largest] += part
        result = counts.copy()
        result[full] = shares * sizes[full, None]
        return result

    def bounded_facts(self, clients: ClientTable) -> tuple[ClientTable, BoolArray]:
        """Return the table with bounded sizes and label counts, and (N,) whether a client's size is doubted."""
        granted = self.inner.requires & TABLE_SIGNALS
        if not granted:
            return clients.granting(self.inner.requires), np.zeros(clients.n, np.bool_)
        known = clients.signals & granted
        sizes = clients.sizes if Signal.SIZES in known else None
        labels: LabelInfo | None = clients.labels if Signal.LABEL_PRODUCTS in known else None
        if labels is None and Signal.LABEL_COUNTS in known:
            labels = LabelCounts(clients.label_counts)
        reported = labels.counts.sum(axis=1) if isinstance(labels, LabelCounts) else sizes
        if reported is None:
            return clients.granting(self.inner.requires), np.zeros(clients.n, np.bool_)
        bounded = self._clip(reported, reported)
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = np.where(reported > 0, bounded / reported, 1.0)
        match labels:
            case LabelCounts():
                labels = LabelCounts(self._skew_counts(labels.counts, reported) * scale[:, None])
            case LabelFactor():
                labels = LabelFactor(labels.factor * scale[:, None], labels.classes)
            case LabelGram():
                labels = LabelGram(labels.gram * scale[:, None] * scale, labels.classes)
        table = ClientTable(clients.names if clients.has_names else None, None if sizes is None else bounded, labels)
        return table.granting(self.inner.requires), _outliers(reported[:, None])


def tail_quantiles(values: FloatArray, tail: float) -> tuple[float, float]:
    """Return two of the values: a share ``tail`` of them is below the first, and as many are above the second.

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


def _rescale(rows: FloatArray, length: FloatArray, new_length: FloatArray) -> FloatArray:
    """Return vectors with new lengths; a zero vector, which has no direction, takes that of the others' mean.

    If there is no such direction, or the others cancel out, it stays 0.

    >>> _rescale(np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([5.0, 0.0]), np.array([10.0, 5.0]))
    array([[6., 8.],
           [3., 4.]])
    >>> _rescale(np.zeros((2, 2)), np.zeros(2), np.array([10.0, 5.0]))
    array([[0., 0.],
           [0., 0.]])
    """
    nonzero = length > 0
    units = rows[nonzero] / length[nonzero, None]
    mean = units.mean(axis=0) if nonzero.any() else np.zeros(rows.shape[1])
    mean_length = float(np.linalg.norm(mean))
    directions = np.where(np.isfinite(length)[:, None], mean / (mean_length or 1.0), np.nan)
    directions[nonzero] = units
    return np.asarray(directions * new_length[:, None])


def _outliers(last: FloatArray) -> BoolArray:
    """(N,) whether a value is far from the median, in robust deviations on a scale that is logarithmic at the ends."""
    outlier = np.zeros(len(last), np.bool_)
    for column in last.T:
        known = np.isfinite(column)
        if known.sum() < _ENOUGH:
            continue
        unit = float(np.median(np.abs(column[known]))) or 1.0
        scaled = np.arcsinh(column[known] / unit)
        middle = np.median(scaled)
        spread = max(1.4826 * float(np.median(np.abs(scaled - middle))), _SPREAD)
        outlier[known] |= np.abs(scaled - middle) > _FAR * spread
    return outlier


@dataclass(frozen=True)
class _Own:
    """What is remembered in addition to the state of the wrapped selector."""

    last: FloatArray  # (N, h) last values
    server: float  # the server's last loss
    accounts: Accounts


@cache
def _state_class(inner: Any) -> Any:
    """Return a state class with the fields of ``inner`` and ours."""
    fields: list[Any] = [
        (f.name, f.type, dataclasses.field(metadata=dict(f.metadata))) for f in dataclasses.fields(inner)
    ]
    fields += [(_LAST, Any, per_client()), (_SERVER, float)]
    fields += [
        (_ACCOUNT + f.name, f.type, dataclasses.field(metadata=dict(f.metadata))) for f in dataclasses.fields(Accounts)
    ]
    joined: Any = dataclasses.make_dataclass(f"Bounded{inner.__name__}", fields, frozen=True)
    joined.inner = inner
    return joined


def _join_state(inner_state: Any, own: _Own) -> Any:
    cls: Any = type(inner_state)
    values = {f.name: getattr(inner_state, f.name) for f in dataclasses.fields(cls)}
    accounts = {_ACCOUNT + f.name: getattr(own.accounts, f.name) for f in dataclasses.fields(Accounts)}
    return _state_class(cls)(**values, **{_LAST: own.last, _SERVER: own.server}, **accounts)


def _split_state(state: Any) -> tuple[Any, _Own]:
    cls: Any = type(state).inner
    values = {f.name: getattr(state, f.name) for f in dataclasses.fields(cls)}
    accounts = Accounts(**{f.name: getattr(state, _ACCOUNT + f.name) for f in dataclasses.fields(Accounts)})
    return cls(**values), _Own(getattr(state, _LAST), getattr(state, _SERVER), accounts)
