"""The base class of aggregators, and the types they share.

An aggregator combines the kept models. It may also change local training, and it may have a memory.

Models are flat vectors of parameters. The formulas use only arithmetic, indexing and
:mod:`fedcohort.training.arithmetic`, so they accept NumPy arrays and torch tensors. Most aggregators are a
:class:`WeightedSum`, for which the simulator averages all runs of a lock-step group in one operation. All others
implement :meth:`Aggregator.combine`.

Running statistics of normalisation layers are not parameters, and a step beyond the clients' models could make a
variance negative. So aggregators do not see them, and hosts average them by the aggregator's weights
(:meth:`Mix.convex`). Only those that compute on the server's samples or set ``whole_models`` get whole models; they
must not leave the range of the models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, final

import numpy as np

from fedcohort.core.arrays import AnyArray, FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.core.params import Parameterized
from fedcohort.core.registry import Registry
from fedcohort.core.signals import Signal
from fedcohort.training.aggregators.client_rows import ClientRows
from fedcohort.training.arithmetic import as_like, average


@dataclass(frozen=True, eq=False)
class Members:
    """The clients whose models are averaged in one round: those that arrived and that the filter kept.

    Attributes
    ----------
    clients : (k,) int array
    share : (k,) float array
        p_k, each client's share of the federation's training samples.
    steps : (k,) float array
        Number of local SGD steps of each client.
    federation : int
        N, the number of clients in the whole federation.
    multiplicity : (k,) float array
        How often each client counts (1 unless the selector drew with replacement).
    momentum : float
        Momentum of local training; FedNova's normalisation depends on it.
    rates : (k,) float array
        Sum of the learning rates over the local steps of each client (K times eta). Default: ``steps``, an eta of 1.
    metrics : mapping of Signal to (k,) float array
        The values that the clients reported for the signals in :attr:`~Aggregator.requires`. Empty for a trial cohort,
        which reports nothing.
    round : int
        Number of this round, from 0. Rounds without any model count too, so an aggregator can tell how long a client
        was absent.
    staleness : (k,) float array
        Number of global models made while each client was working (tau). Default: 0, as in rounds.
    decay : (k,) float array
        The learning rate of this round divided by that of the round in which the client began. Default: 1.
    """

    clients: IntArray
    share: FloatArray
    steps: FloatArray
    federation: int
    multiplicity: FloatArray
    momentum: float = 0.0
    rates: FloatArray = None  # type: ignore[assignment]  # filled in below
    metrics: Mapping[Signal, FloatArray] = field(default_factory=lambda: MappingProxyType({}))
    round: int = 0
    staleness: FloatArray = None  # type: ignore[assignment]  # filled in below
    decay: FloatArray = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self) -> None:
        if self.rates is None:
            object.__setattr__(self, "rates", self.steps)
        if self.staleness is None:
            object.__setattr__(self, "staleness", np.zeros(len(self.clients)))
        if self.decay is None:
            object.__setattr__(self, "decay", np.ones(len(self.clients)))

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def by_size(self) -> FloatArray:
        """(k,) shares times multiplicities, summing to 1; equal weights if no client has any data."""
        raw = self.share * self.multiplicity
        total = raw.sum()
        # A filter or failures can leave only clients without data, and their models must still give a model.
        if total > 0:
            return np.asarray(raw / total)
        return np.full(len(raw), 1.0 / len(raw))

    @property
    def learning_rates(self) -> FloatArray:
        """(k,) mean learning rate of each client's local steps; 1 for a client without steps."""
        return np.divide(self.rates, self.steps, out=np.ones(len(self)), where=self.steps > 0)

    @property
    def by_count(self) -> FloatArray:
        """(k,) multiplicities, summing to 1."""
        return np.asarray(self.multiplicity / self.multiplicity.sum())

    def weights_by(self, weighting: str, exponent: float = 0.0) -> FloatArray:
        """(k,) :attr:`by_size` if ``weighting`` is "size", else :attr:`by_count`.

        Stale updates are discounted by (1 + staleness) to the power of ``-exponent``. The weights still sum to 1.
        """
        weights = self.by_size if weighting == "size" else self.by_count
        if not exponent:
            return weights
        discounted = weights * polynomial(self.staleness, exponent)
        return np.asarray(discounted / discounted.sum())

    def shares_by(self, weighting: str) -> FloatArray:
        """(k,) each member's share of the federation: of its samples if ``weighting`` is "size", else 1 / N."""
        return self.share if weighting == "size" else np.full(len(self), 1.0 / self.federation)


def polynomial(staleness: FloatArray, exponent: float) -> FloatArray:
    """Return (k,) the discount of stale updates, 1 for fresh ones.

    >>> polynomial(np.array([0.0, 3.0]), 0.5)
    array([1. , 0.5])
    """
    return np.asarray((1.0 + staleness) ** -exponent)


@dataclass(frozen=True, eq=False)
class Mix:
    """A weighted sum: ``old`` times the global model plus ``weights`` (k,) times the clients' models."""

    weights: FloatArray
    old: float = 0.0

    def of(self, old: Any, models: Any) -> Any:
        """Return the sum (P,) for the global model (P,) and the clients' models (k, P)."""
        return average(self.weights, models, self.old * old if self.old else 0.0)

    def convex(self) -> Mix:
        """Return the weights with negative ones left out, divided by their sum, for numbers that are not parameters.

        >>> Mix(np.array([0.9, 0.6]), -0.5).convex()
        Mix(weights=array([0.6, 0.4]), old=0.0)
        """
        # A variance averaged with a negative weight could become negative.
        weights, old = np.maximum(self.weights, 0.0), max(self.old, 0.0)
        total = float(weights.sum()) + old
        return Mix(weights / total, old / total) if total > 0 else Mix(weights, 1.0)


@dataclass(frozen=True, eq=False)
class Combined:
    """The result of an aggregator.

    Attributes
    ----------
    model : (P,) the next global model
    weights : (k,) float array
        The weight of each kept model, which is recorded with its client.
    old : float
        The weight of the old model, if the next one is a weighted sum that includes it.
    """

    model: Any
    weights: FloatArray
    old: float = 0.0


ResultT = TypeVar("ResultT", Mix, Combined)
MemoryT = TypeVar("MemoryT", bound="Memory")


class Memory:
    """What an aggregator remembers between the rounds of one run. The simulator saves it in checkpoints.

    A class whose attributes are arrays or :class:`ClientRows` lists their names in ``saved``. Any other class overrides
    :meth:`arrays` and :meth:`restore`.
    """

    saved: ClassVar[tuple[str, ...]] = ()

    def arrays(self) -> dict[str, Any]:
        """Return everything that a checkpoint must hold, by name."""
        arrays: dict[str, Any] = {}
        for name in self.saved:
            value = getattr(self, name)
            arrays |= value.arrays() if isinstance(value, ClientRows) else {name: value}
        return arrays

    def restore(self, arrays: Mapping[str, AnyArray]) -> None:
        """Restore exactly what :meth:`arrays` returned, from NumPy arrays."""
        for name in self.saved:
            value = getattr(self, name)
            if isinstance(value, ClientRows):
                value.restore(arrays)
            else:
                # A copy, because memories change their arrays in place and the checkpoint may be read again.
                setattr(self, name, as_like(np.array(arrays[name]), value))


class Corrections(Memory, ABC):
    """A memory that also changes local training, for aggregators with ``corrects = True``."""

    @abstractmethod
    def corrections(self, clients: IntArray) -> Any:
        """(k, P) vectors that ``clients`` add to each of their local gradients."""

    @abstractmethod
    def absorb(self, clients: IntArray, old: Any, models: Any, rates: FloatArray, gradients: Any | None) -> None:
        """Learn from the models that arrived, whether or not they were kept.

        Parameters
        ----------
        clients : (k,) int array
        old : (P,) the global model they started from
        models : (k, P) their models after training
        rates : (k,) float array
            Sum of the learning rates over the local steps of each client (K times eta).
        gradients : (k, P), optional
            Full-batch gradients at ``old``, if the aggregator needs them.
        """


class OwnModels(Memory, ABC):
    """A memory of the models that clients train from, for aggregators with ``own_models = True``."""

    @abstractmethod
    def starts(self, clients: IntArray) -> Any:
        """(k, P) the models from which ``clients`` train in the next round."""


class Server(ABC):
    """The server's own V samples, and what can be computed on them, for aggregators with ``needs_server = True``."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples V."""

    @property
    @abstractmethod
    def labels(self) -> Any:
        """(V, C) the samples' classes, one-hot. Aggregators for unlabelled samples do not read it."""

    @abstractmethod
    def batches(self, size: int, steps: int) -> Iterable[IntArray]:
        """Yield ``steps`` random batches of at most ``size`` places 0..V-1, different in each round of each run."""

    @abstractmethod
    def logits(self, models: Any) -> Any:
        """(m, V, C) outputs of models (m, P) on the samples."""

    @abstractmethod
    def gradient(self, model: Any, targets: Any, places: IntArray) -> Any:
        r"""(P,) gradient at ``model`` of the cross-entropy with soft targets.

        :math:`-\frac{1}{b} \sum_{v, c} t_{vc} \log \sigma(f(w, x_v))_c`, with sigma the softmax.

        Parameters
        ----------
        model : (P,)
        targets : (b, C) probabilities
        places : (b,) int array
            Which samples, 0..V-1.
        """


class Aggregator(Parameterized, ABC):
    """Turns the kept models into the next global model. Derive a frozen dataclass and implement :meth:`combine`."""

    name: ClassVar[str]
    model_copies: ClassVar[int] = 1  # vectors of the model's size sent each way per client (SCAFFOLD: 2)
    corrects: ClassVar[bool] = False  # whether its memory is Corrections
    own_models: ClassVar[bool] = False  # whether its memory is OwnModels
    needs_server: ClassVar[bool] = False  # whether it computes on the server's own samples
    whole_models: ClassVar[bool] = False  # whether it also gets running statistics, as with needs_server
    mixes_models: ClassVar[bool] = False  # whether it gets stale models as they are, not their updates on the newest

    @property
    def prox(self) -> float:
        """Weight mu of the proximal term mu/2 ||w - w_global||^2 in local training; 0 means no such term."""
        return 0.0

    @property
    def needs_gradients(self) -> bool:
        """Whether clients also compute the full-batch gradient at the received model."""
        return False

    @property
    def discounts_staleness(self) -> bool:
        """Whether it gives stale models less weight itself, from ``members.staleness``; otherwise the host does it."""
        return False

    @property
    def public(self) -> str | None:
        """A .npy file of unlabelled samples for the server; None means the host's own samples."""
        return None

    @property
    def requires(self) -> frozenset[Signal]:
        """Signals that clients report for it, in addition to those that the selector requires."""
        return frozenset()

    def memory(self, federation: int, model: Any) -> Memory | None:
        """Return the memory before the first round; None if there is nothing to remember."""
        return None

    @abstractmethod
    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Return the next global model.

        Parameters
        ----------
        old : (P,) the global model
        models : (k, P) the kept ones, at least one
        members : Members
            The clients that trained them.
        memory : Memory, optional
            The memory from :meth:`memory`, which this call updates. Hosts pass a copy if they discard the result.
        server : Server, optional
            For aggregators with ``needs_server = True``.
        """

    def _server(self, server: Server | None) -> Server:
        """Return the server, or raise an error if it is missing."""
        if server is None or len(server) == 0:
            raise InputError(
                f"The aggregator {self.name!r} computes on the server's own samples, but there are none.",
                hint="in the simulator, set scenario.server_validation, the number of samples of each class kept there",
            )
        return server

    def _own(self, memory: Memory | None, kind: type[MemoryT]) -> MemoryT:
        """Return the memory, or raise an error if it is missing or belongs to another aggregator."""
        if not isinstance(memory, kind):
            raise InputError(
                f"The aggregator {self.name!r} remembers things between rounds and needs its own memory. "
                f"Got {memory!r}.",
                hint="create it once with aggregator.memory(federation, model) and pass it to every call of combine",
            )
        return memory


class WeightedSum(Aggregator):
    """An aggregator that is a weighted sum. Derive a frozen dataclass and implement :meth:`mix`."""

    @abstractmethod
    def mix(self, members: Members) -> Mix:
        """Return the weights of the kept models, of which there is at least one."""

    @final
    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Return the weighted sum."""
        mix = self.mix(members)
        return Combined(mix.of(old, models), mix.weights, mix.old)


def fitting(result: ResultT, kind: type[ResultT], members: Members, old: Any = None) -> ResultT:
    """Return an aggregator's result after checking its type and shape; for hosts, which run other people's code.

    >>> two = Members(np.arange(2), np.ones(2), np.ones(2), 9, np.ones(2))
    >>> fitting(Mix(np.ones(1)), Mix, two)
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.InputError: It must return one weight per model, an array of shape (2,). Got shape (1,).
    """
    if not isinstance(result, kind):
        raise InputError(f"It must return a {kind.__name__}. Got {type(result).__name__}.")
    if np.shape(result.weights) != (len(members),):
        raise InputError(
            f"It must return one weight per model, an array of shape ({len(members)},). Got shape "
            f"{np.shape(result.weights)}."
        )
    # A model of another library or shape would only fail later, in the simulator's batch.
    if isinstance(result, Combined) and (type(result.model), np.shape(result.model)) != (type(old), np.shape(old)):
        raise InputError(
            f"It must return a model like the one it was given, {_form(old)}. Got {_form(result.model)}.",
        )
    return result


def _form(value: Any) -> str:
    return f"a {type(value).__name__} of shape {np.shape(value)}"


AGGREGATORS: Registry[Aggregator] = Registry("aggregator", package="fedcohort.training.aggregators", base=Aggregator)
