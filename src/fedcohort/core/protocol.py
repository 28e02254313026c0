"""What a selector and its host exchange: request, query, answer, cohort, report.

Everything here is frozen and holds read-only arrays. Hosts build :class:`RoundRequest`, :class:`Answer` and
:class:`RoundReport`; selectors see a :class:`Slate` and return a :class:`Cohort`. Nothing depends on torch or flwr.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray, read_only
from fedcohort.core.clients import ClientTable, undeclared
from fedcohort.core.errors import InputError
from fedcohort.core.params import Parameterized, ParamSets
from fedcohort.core.plots import Picture
from fedcohort.core.registry import Registry
from fedcohort.core.signals import Signal
from fedcohort.core.validate import array, input_error, listing, numbers

State = TypeVar("State")
_EMPTY: Mapping[str, Any] = MappingProxyType({})


def _indices(clients: Any, what: str) -> IntArray:
    """Return clients as a read-only array of dense indices, which must be whole numbers."""
    indices = array(clients, what, "a list of whole numbers")
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise input_error(what, "a list of whole numbers", clients)
    return read_only(indices, np.int64)


class Status(IntEnum):
    """What became of a client that was asked to train."""

    OK = 0
    FAILED = 1  # it returned an error or was lost while training
    INVALID = 2  # it returned NaN, infinite numbers or arrays of another shape
    LATE = 3  # it replied after the deadline; its model is not in the average
    MISSING = 4  # it never replied


@dataclass(frozen=True)
class RoundRequest:
    """A host's request for a cohort: a number of clients, out of those available now.

    Parameters
    ----------
    size : int or None
        How many clients; None asks for all that are available.
    available : mask (N,) of bool, indices, or names; optional
        The clients that can take part now. Default: all clients of the federation.
    """

    size: int | None
    available: BoolArray | IntArray | Sequence[int] | Sequence[str] | None = None


@dataclass(frozen=True)
class Slate:
    """One round as a selector sees it.

    Attributes
    ----------
    round : int
        Counted from 0. It is the selector's clock: the number of global models before this choice. In an asynchronous
        session, many choices share one round.
    size : int
        How many clients to pick: at least 1, at most ``len(candidates)``.
    candidates : (c,) int array
        The clients that may be picked, as ascending dense indices.
    clients : ClientTable
        The federation; only declared signals can be read.
    busy : (b,) int array or None
        In an asynchronous session, the clients at work while one more is chosen. None in a session with rounds.
    """

    round: int
    size: int
    candidates: IntArray
    clients: ClientTable
    busy: IntArray | None = None

    @property
    def n(self) -> int:
        """Number of clients in the federation."""
        return self.clients.n

    @property
    def everyone(self) -> bool:
        """Whether every client of the federation is a candidate."""
        return len(self.candidates) == self.clients.n

    def of_candidates(self, values: AnyArray) -> AnyArray:
        """Return the candidates' rows of ``values`` (N, ...), without a copy if every client is a candidate."""
        return values if self.everyone else values.take(self.candidates, axis=0)


@dataclass(frozen=True)
class Losses:
    """Ask for losses of the current global model on some clients.

    Parameters
    ----------
    clients : (q,) int array
        The clients to ask.
    signals : frozenset of Signal
        Which losses of the received model: any of :data:`~fedcohort.core.signals.LOSS_SIGNALS`, or your own.
    """

    clients: IntArray
    signals: frozenset[Signal] = frozenset({Signal.LOSS})
    _names_of: Callable[[IntArray], tuple[str, ...]] | None = field(default=None, init=False, repr=False, compare=False)
    needs: ClassVar[Signal] = Signal.LOSS_QUERY  # the signal of a host that can answer such a query

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", _indices(self.clients, "A Losses query's clients"))
        losses_only = isinstance(self.signals, frozenset) and all(
            isinstance(signal, Signal) and signal.of_received for signal in self.signals
        )
        if not losses_only or not self.signals:
            losses = ", ".join(sorted(s.name for s in Signal.all() if s.of_received))
            raise input_error("A Losses query's signals", f"among {losses}", self.signals)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clients to ask, in the order of ``clients``; only the session knows them."""
        return () if self._names_of is None else self._names_of(self.clients)

    def with_names(self, names_of: Callable[[IntArray], tuple[str, ...]]) -> Losses:
        """Return the same question, whose :attr:`names` come from a function of clients."""
        named = copy.copy(self)  # without checking a million clients again
        object.__setattr__(named, "_names_of", names_of)
        return named


@dataclass(frozen=True)
class Trial:
    """Ask how every client's loss would change if each of ``cohorts`` were trained and averaged, then dropped."""

    cohorts: tuple[IntArray, ...]
    needs: ClassVar[Signal] = Signal.TRIAL_QUERY
    measured: ClassVar[Signal] = Signal.LOSS  # before and after
    answered_with: ClassVar[Signal] = Signal.LOSS_CHANGE

    def __post_init__(self) -> None:
        cohorts = listing(self.cohorts, "A Trial's cohorts", "lists of whole numbers")
        object.__setattr__(self, "cohorts", tuple(_indices(c, "A Trial's cohorts") for c in cohorts))


Query = Losses | Trial


@dataclass(frozen=True)
class Answer:
    """A host's answer to a query.

    Parameters
    ----------
    query : Losses or Trial
        The question.
    values : mapping of Signal to array
        For :class:`Losses` one (q,) array per requested signal, in the order of ``query.clients``; for :class:`Trial`
        ``{Signal.LOSS_CHANGE: (S, N)}``. NaN stands for a client that did not answer.
    """

    query: Query
    values: Mapping[Signal, FloatArray]

    def __post_init__(self) -> None:
        match self.query:
            case Losses(clients=clients, signals=signals):
                expected: dict[Signal, tuple[int, ...]] = {s: (len(clients),) for s in signals}
            case Trial(cohorts=cohorts):
                expected = {Trial.answered_with: (len(cohorts),)}
            case _:
                raise input_error("The query of an Answer", "Losses or Trial", self.query)
        if not isinstance(self.values, Mapping):
            raise input_error("The values of an Answer", "a mapping from signals to arrays", self.values)
        given = {str(signal): values for signal, values in self.values.items()}  # hosts may use names
        clean: dict[Signal, FloatArray] = {}
        for signal, shape in expected.items():
            if signal.name not in given:
                raise InputError(
                    f"The answer lacks '{signal}', which was asked for. Got {', '.join(given) or 'nothing'}."
                )
            column = numbers(given[signal.name], f"The answer's '{signal}'")
            if column.shape[: len(shape)] != shape:
                raise InputError(f"The answer's '{signal}' must have shape {shape}. Got {column.shape}.")
            column[~np.isfinite(column)] = np.nan  # selectors expect NaN for "no answer", never infinity
            clean[signal] = read_only(column)
        object.__setattr__(self, "values", MappingProxyType(clean))

    def __getitem__(self, signal: Signal) -> FloatArray:
        return self.values[signal]


@dataclass(frozen=True)
class Cohort:
    """The clients chosen for one round, and why.

    Parameters
    ----------
    clients : (k,) int array
        In the order they were picked.
    candidates : (c,) int array, optional
        The clients that ``score`` is about, usually the slate's candidates.
    score : (c,) float array, optional
        The number that decided the choice; higher is better.
    parts : mapping of str to (c,) float array
        The parts of the score, by name (loss, balance, latency, exploration, ...).
    weights : (k,) float array, optional
        A factor for each client in the average, on top of its share of the data; default 1. The aggregator that makes
        an unbiased average of them is the selector's :attr:`Selector.aggregator`.
    work : (k,) float array, optional
        Local work of each client as a multiple of the default number of local steps.
    notes : mapping of str to str or number
        Anything worth recording about this choice.
    stop : str, optional
        Why the selector declares the run finished; None to continue.
    round, ticket, names
        Filled in by the session.
    """

    clients: IntArray
    candidates: IntArray | None = None
    score: FloatArray | None = None
    parts: Mapping[str, FloatArray] = field(default_factory=lambda: _EMPTY)
    weights: FloatArray | None = None
    work: FloatArray | None = None
    notes: Mapping[str, str | float | int] = field(default_factory=lambda: _EMPTY)
    stop: str | None = None
    round: int = -1
    ticket: int = -1
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", _indices(self.clients, "A cohort's clients"))
        for name in ("weights", "work"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, read_only(numbers(value, f"A cohort's {name}")))
        for name in ("parts", "notes"):
            value = getattr(self, name)
            if value is _EMPTY:
                continue
            # isinstance with Mapping is slow, and a session makes two cohorts in every round.
            if type(value) not in (dict, MappingProxyType) and not isinstance(value, Mapping):
                raise input_error(f"A cohort's {name}", "a mapping", value)
            object.__setattr__(self, name, MappingProxyType(dict(value)))

    @property
    def size(self) -> int:
        """Number of clients in the cohort."""
        return len(self.clients)

    def __len__(self) -> int:
        return len(self.clients)


@dataclass(frozen=True)
class RoundReport:
    """What came back from a round.

    Parameters
    ----------
    ticket : int
        The cohort's ticket.
    clients : indices or names
        The clients in this report; if it is ``complete``, all others of the cohort are recorded as missing.
    status : sequence of Status, optional
        One per client; default all OK.
    metrics : mapping of Signal to (r,) or (r, V) array
        Numbers per client, in the order of ``clients``, or a row of V numbers per client for a signal that is a vector
        (``signal.width``). NaN, infinity or a row of another length makes an OK client INVALID.
    kept : (r,) bool array, optional
        Whether the filter kept the client's model in the average; default: every OK client.
    complete : bool
        Whether this closes the round. Partial reports are collected until a complete one arrives.
    """

    ticket: int
    clients: Sequence[str] | Sequence[int] | IntArray
    status: Sequence[int] | AnyArray | None = None
    metrics: Mapping[Signal, Any] = field(default_factory=lambda: MappingProxyType({}))
    kept: Sequence[bool] | BoolArray | None = None
    complete: bool = True


@dataclass(frozen=True)
class Outcome:
    """A whole round as a selector sees it in ``update``: every client of the cohort exactly once, in cohort order.

    Attributes
    ----------
    clients : (k,) int array
    status : (k,) int8 array of :class:`Status`
    kept : (k,) bool array
        Requires Signal.KEPT.
    table : ClientTable
        The federation; only declared signals can be read.
    """

    round: int
    clients: IntArray
    status: AnyArray
    table: ClientTable
    _kept: BoolArray
    _metrics: Mapping[Signal, FloatArray]
    _granted: frozenset[Signal]

    @property
    def ok(self) -> BoolArray:
        """(k,) whether a valid model of the client arrived in time."""
        return np.asarray(self.status == Status.OK)

    @property
    def kept(self) -> BoolArray:
        """(k,) whether the client's model entered the average."""
        self._check(Signal.KEPT)
        return self._kept

    def __getitem__(self, signal: Signal) -> FloatArray:
        """(k,) numbers of a declared signal, or (k, V) rows if it is a vector; NaN for clients that are not OK."""
        self._check(signal)
        return self._metrics[signal]

    def _check(self, signal: Signal) -> None:
        if signal not in self._granted:
            raise undeclared(signal)


def per_client() -> Any:
    """Mark a state field with one row per client, so that it can grow and be saved by rows."""
    return field(metadata={"per_client": True})


def is_per_client(state_field: dataclasses.Field[Any]) -> bool:
    """Whether a state field was marked with :func:`per_client`."""
    return bool(state_field.metadata.get("per_client"))


class Selector(Parameterized, ABC, Generic[State]):
    """One strategy: frozen hyper-parameters and pure functions over an explicit state.

    Derive a frozen dataclass, declare hyper-parameters with :func:`fedcohort.core.params.param`, and define ``init``,
    ``select`` and ``update``. The state is a frozen dataclass of arrays and scalars; fields with one row per client
    are marked with :func:`per_client`. Methods never modify their arguments.
    """

    name: ClassVar[str]
    starves: ClassVar[str | None] = None  # why some clients may never be picked, if that is intended
    picks_by: ClassVar[str] = ""  # how scores lead to picks, in a sentence or two for explanations
    part_meanings: ClassVar[Mapping[str, str]] = _EMPTY  # by name, what a part of its score is
    is_wrapper: ClassVar[bool] = False  # True if it only changes what another selector sees
    selects: ClassVar[bool] = True  # False if it always takes every candidate
    # Whether it works in asynchronous sessions: it can choose one client while others (slate.busy) are at work, and
    # learn from one client's report. Its clock, slate.round, is then the number of global models.
    one_at_a_time: ClassVar[bool] = False
    pictures: ClassVar[tuple[Picture, ...]] = ()  # for reports: what it has learned
    # Parameter sets that the conformance suite checks besides the defaults: other forms of a paper, extremes.
    checked_params: ClassVar[ParamSets] = _EMPTY
    default_filter: ClassVar[str] = "fedca"  # used if no filter is configured and it learns from Signal.KEPT

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals this selector reads. If they are always the same, a class attribute will do."""
        return frozenset()

    @property
    def aggregator(self) -> str | None:
        """The aggregator to use unless one is configured: it makes an unbiased average of the weights. None: any."""
        return None

    def adapt(self, supplied: frozenset[Signal]) -> Selector[State]:
        """Return the selector to use with the signals that table and host supply; nearly always ``self``.

        A selector that can use a fact but does not need it turns that use on here, and then lists it in ``requires``.
        """
        return self

    @abstractmethod
    def init(self, clients: ClientTable, rng: np.random.Generator) -> State:
        """Return the state before the first round."""

    def size(self, state: State, asked: int, candidates: int) -> int:
        """Return how many clients to pick when the host asks for ``asked``; nearly always ``asked``."""
        return asked

    def query(self, state: State, slate: Slate, rng: np.random.Generator) -> Query | None:
        """Return a question that must be answered before choosing, or None."""
        return None

    @abstractmethod
    def select(
        self, state: State, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, State]:
        """Choose at most ``slate.size`` of ``slate.candidates``.

        ``answer`` is None when ``query`` returned None. The generator is not the one that ``query`` received.
        """

    @abstractmethod
    def update(self, state: State, outcome: Outcome) -> State:
        """Return the state after a round's outcome."""

    def grow(self, state: State, clients: ClientTable, rng: np.random.Generator) -> State:
        """Return the state after clients joined: the old rows, then new rows from ``init``.

        Rows that ``init`` cannot know the length of have no entries there. Once others have, new rows are zeros.
        """
        fresh: Any = self.init(clients, rng)
        changes = {}
        for f in dataclasses.fields(fresh):
            value: Any = getattr(state, f.name)
            if is_per_client(f):
                rows = getattr(fresh, f.name)[len(value) :]
                if rows.shape[1:] == (0,):
                    rows = np.zeros((len(rows), *value.shape[1:]), rows.dtype)
                value = np.concatenate([value, rows])
            changes[f.name] = value
        return dataclasses.replace(fresh, **changes)  # type: ignore[no-any-return]


SELECTORS: Registry[Selector[Any]] = Registry("selector", package="fedcohort.selectors", base=Selector)
register = SELECTORS.register
