"""The words a selector and its host exchange: request, query, answer, cohort, report.

Everything here is frozen and holds read-only arrays. Hosts build :class:`RoundRequest`, :class:`Answer` and
:class:`RoundReport`; selectors see a :class:`Slate` and return a :class:`Cohort`. Nothing depends on torch or flwr.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray, read_only
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError, SignalError
from fedcohort.core.params import Parameterized, ParamSets
from fedcohort.core.plots import Picture
from fedcohort.core.registry import Registry
from fedcohort.core.signals import LOSS_SIGNALS, Signal
from fedcohort.core.validate import array, listing, numbers, refuse

State = TypeVar("State")
_EMPTY: Mapping[str, Any] = MappingProxyType({})


def _indices(clients: Any, what: str) -> IntArray:
    """Return clients as a read-only array of dense indices; 0.5 is none of them."""
    found = array(clients, what, "a list of whole numbers")
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise refuse(what, "a list of whole numbers", clients)
    return read_only(found, np.int64)


class Status(IntEnum):
    """What became of a client that was asked to train."""

    OK = 0
    FAILED = 1  # it answered with an error, or was lost while training
    INVALID = 2  # it answered with NaN, infinite numbers or arrays of another shape
    LATE = 3  # it answered after the deadline; its model is not in the average
    MISSING = 4  # it never answered


@dataclass(frozen=True)
class RoundRequest:
    """What a host asks of a session: so many clients, out of those available now.

    Parameters
    ----------
    size : int or None
        How many clients; None asks for everybody available.
    available : mask (N,) of bool, indices, or names; optional
        Who can take part now. Default: everybody in the federation.
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
        session many choices have the same.
    size : int
        How many clients to pick: at least 1, at most ``len(candidates)``.
    candidates : (c,) int array
        Who may be picked, ascending dense indices.
    clients : ClientTable
        The federation; only declared signals can be read.
    busy : (b,) int array or None
        In an asynchronous session, who is at work while one more is chosen; None where cohorts come in rounds.
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
        """Whether every client of the federation is a candidate, so that no indexing is needed."""
        return len(self.candidates) == self.clients.n

    def of_candidates(self, values: AnyArray) -> AnyArray:
        """Return the rows of ``values`` (N, ...) that belong to the candidates, without a copy when all do."""
        return values if self.everyone else values.take(self.candidates, axis=0)


@dataclass(frozen=True)
class Losses:
    """Ask for losses of the current global model on some clients.

    Parameters
    ----------
    clients : (q,) int array
        Whom to ask.
    signals : frozenset of Signal
        Which losses: any of :data:`~fedcohort.core.signals.LOSS_SIGNALS`.
    """

    clients: IntArray
    signals: frozenset[Signal] = frozenset({Signal.LOSS})
    needs: ClassVar[Signal] = Signal.LOSS_QUERY  # what a host that answers such questions supplies

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", _indices(self.clients, "A Losses query's clients"))
        if not isinstance(self.signals, frozenset) or not self.signals or not self.signals <= LOSS_SIGNALS:
            raise refuse("A Losses query's signals", f"among {', '.join(sorted(LOSS_SIGNALS))}", self.signals)


@dataclass(frozen=True)
class Trial:
    """Ask what every client's loss change would be if each of ``cohorts`` were trained and averaged, then dropped."""

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
        For :class:`Losses` one (q,) array per asked signal, in the order of ``query.clients``; for :class:`Trial`
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
                raise refuse("The query of an Answer", "Losses or Trial", self.query)
        if not isinstance(self.values, Mapping):
            raise refuse("The values of an Answer", "a mapping from signals to arrays", self.values)
        clean: dict[Signal, FloatArray] = {}
        for signal, shape in expected.items():
            if signal not in self.values:
                given = ", ".join(map(str, self.values)) or "nothing"
                raise InputError(f"The answer lacks '{signal}', which was asked for. Got {given}.")
            answers = numbers(self.values[signal], f"The answer's '{signal}'")
            if answers.shape[: len(shape)] != shape:
                raise InputError(f"The answer's '{signal}' must have shape {shape}. Got {answers.shape}.")
            answers[~np.isfinite(answers)] = np.nan  # selectors are tested with NaN for "no answer", not with infinity
            clean[signal] = read_only(answers)
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
        Whom ``score`` is about, usually the slate's candidates.
    score : (c,) float array, optional
        The number the choice was made by, higher is better.
    parts : mapping of str to (c,) float array
        What the score was made of, by name (loss, balance, latency, exploration, ...).
    weights : (k,) float array, optional
        Multiplicity of each client in the average, beside its share of the data; default 1 each. Which
        aggregator makes an unbiased average of them, the selector says: :attr:`Selector.aggregator`.
    work : (k,) float array, optional
        Local work of each client as a multiple of the default number of local steps.
    notes : mapping of str to str or number
        Anything worth recording about this choice.
    stop : str, optional
        Set when the selector declares the run finished; says why.
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
        object.__setattr__(self, "clients", _indices(self.clients, "A cohort's clients"))  # frozen, so past the setter
        for name in ("weights", "work"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, read_only(numbers(value, f"A cohort's {name}")))
        for name in ("parts", "notes"):
            value = getattr(self, name)
            if value is _EMPTY:
                continue
            # Asking a Mapping is slow, and a session makes two cohorts in every round.
            if type(value) not in (dict, MappingProxyType) and not isinstance(value, Mapping):
                raise refuse(f"A cohort's {name}", "a mapping", value)
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
        Whom this report is about; with ``complete`` all others of the cohort are recorded as missing.
    status : sequence of Status, optional
        One per client; default all OK.
    metrics : mapping of Signal to (r,) or (r, V) array
        Numbers per client, in the order of ``clients``, or a row of V numbers per client for a signal that is a vector
        (``signal.width``). NaN, infinity or a row of another length makes an OK client INVALID.
    kept : (r,) bool array, optional
        Whether the filter kept the client's model in the average; default: every OK client.
    complete : bool
        Whether this closes the round. Partial reports are collected until a complete one comes.
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
        """(k,) whether the client's model arrived in time and is sound."""
        return np.asarray(self.status == Status.OK)

    @property
    def kept(self) -> BoolArray:
        """(k,) whether the client's model entered the average."""
        self._check(Signal.KEPT)
        return self._kept

    def __getitem__(self, signal: Signal) -> FloatArray:
        """(k,) numbers of a declared signal, or (k, V) rows where it is a vector; NaN for clients that are not OK."""
        self._check(signal)
        return self._metrics[signal]

    def _check(self, signal: Signal) -> None:
        if signal not in self._granted:
            raise SignalError(
                f"The selector read the signal '{signal}' ({signal.meaning}) without declaring it.",
                hint=f"add {signal!r} to the selector's 'requires'",
            )


def per_client() -> Any:
    """Mark a state field whose first axis is the clients, so that it can grow, be saved by rows and be relabelled."""
    return field(metadata={"per_client": True})


def is_per_client(state_field: dataclasses.Field[Any]) -> bool:
    """Whether a state field was marked with :func:`per_client`."""
    return bool(state_field.metadata.get("per_client"))


class Selector(Parameterized, ABC, Generic[State]):
    """One strategy: frozen hyper-parameters and pure functions over an explicit state.

    Derive a frozen dataclass, declare hyper-parameters with :func:`fedcohort.core.params.param`, and fill in ``init``,
    ``select`` and ``update``. The state is a frozen dataclass of arrays and scalars; fields with one row per client
    are marked with :func:`per_client`. Functions never modify what they are given.
    """

    name: ClassVar[str]
    starves: ClassVar[str | None] = None  # why some clients may never be picked, for selectors that mean it
    picks_by: ClassVar[str] = ""  # how scores lead to picks, in a sentence or two for explanations
    part_meanings: ClassVar[Mapping[str, str]] = _EMPTY  # by name, what a part of its score is
    is_wrapper: ClassVar[bool] = False  # True for one that only changes what another is shown
    selects: ClassVar[bool] = True  # False for one that always takes everybody
    # Whether it can choose one client while others are at work, and learn from one client's report: for asynchronous
    # sessions. Its clock is then the number of models, slate.round; who is at work is slate.busy.
    one_at_a_time: ClassVar[bool] = False
    pictures: ClassVar[tuple[Picture, ...]] = ()  # what a report draws of what it learned
    # Parameters that older versions did not have, with the values under which it chooses as it did then.
    added: ClassVar[Mapping[str, object]] = _EMPTY
    # Parameters that the conformance suite checks besides the defaults: other forms of a paper, extremes.
    checked_params: ClassVar[ParamSets] = _EMPTY
    formerly: ClassVar[tuple[str, ...]] = ()  # names that older journals have for it, now those of other selectors
    default_filter: ClassVar[str] = "fedca"  # where no filter is configured and it learns from Signal.KEPT

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals this selector reads."""
        return frozenset()

    @property
    def aggregator(self) -> str | None:
        """The aggregator under which its weights are unbiased, taken where none is configured; None: any will do."""
        return None

    def adapt(self, supplied: frozenset[Signal]) -> Selector[State]:
        """Return this selector as it works with the signals that table and host supply; nearly always itself.

        A selector that can use a fact but does not need it turns that use on here; its ``requires`` says so then.
        """
        return self

    @abstractmethod
    def init(self, clients: ClientTable, rng: np.random.Generator) -> State:
        """Return the state before the first round."""

    def size(self, state: State, asked: int, candidates: int) -> int:
        """Return how many clients to pick when ``asked`` are wanted; nearly always ``asked``."""
        return asked

    def query(self, state: State, slate: Slate, rng: np.random.Generator) -> Query | None:
        """Return a question that must be answered before choosing, or None."""
        return None

    @abstractmethod
    def select(
        self, state: State, slate: Slate, answer: Answer | None, rng: np.random.Generator
    ) -> tuple[Cohort, State]:
        """Choose at most ``slate.size`` of ``slate.candidates``.

        ``answer`` is None when ``query`` returned None. The generator is not the one ``query`` was given.
        """

    @abstractmethod
    def update(self, state: State, outcome: Outcome) -> State:
        """Return the state after a round's outcome."""

    def grow(self, state: State, clients: ClientTable, rng: np.random.Generator) -> State:
        """Return the state after clients joined: old rows kept, new rows as ``init`` makes them."""
        fresh: Any = self.init(clients, rng)
        old: Any = state
        changes = {}
        for f in dataclasses.fields(fresh):
            ours = getattr(old, f.name)
            if is_per_client(f):
                ours = np.concatenate([ours, getattr(fresh, f.name)[len(ours) :]])
            changes[f.name] = ours
        return dataclasses.replace(fresh, **changes)  # type: ignore[no-any-return]


SELECTORS: Registry[Selector[Any]] = Registry("selector", package="fedcohort.selectors", base=Selector)
register = SELECTORS.register
