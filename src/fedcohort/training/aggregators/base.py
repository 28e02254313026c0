"""What an aggregator is: a rule for the kept models, perhaps one for local training, perhaps a memory.

Models are flat vectors of parameters; the formulas use only arithmetic, indexing and :mod:`.arithmetic`, so that NumPy
arrays and torch tensors both flow through. Most aggregators are a :class:`WeightedSum`: the simulator then averages
all runs of a lock-step group in one operation, from the weights alone. Whoever does more fills in
:meth:`Aggregator.combine`.
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
from fedcohort.training.aggregators.arithmetic import as_like
from fedcohort.training.aggregators.client_rows import ClientRows


@dataclass(frozen=True, eq=False)
class Members:
    """The clients whose models are averaged in one round (those that arrived and that the filter kept).

    Attributes
    ----------
    clients : (k,) int array
    share : (k,) float array
        p_k, each client's part of all training samples of the federation.
    steps : (k,) float array
        Local SGD steps each client made.
    federation : int
        Number of clients N of the whole federation.
    multiplicity : (k,) float array
        How often each client counts (1 unless the selector drew with replacement).
    momentum : float
        Of local training; FedNova's normalisation depends on it.
    rates : (k,) float array
        Sum of the learning rates over the local steps of each client (K times eta); by default ``steps``, an eta of 1.
    metrics : mapping of Signal to (k,) float array
        What the clients reported of the signals the aggregator :attr:`~Aggregator.requires`; empty for a trial cohort,
        which reports nothing.
    round : int
        Which round this is, from 0; rounds without any model count, so that an aggregator can tell how long a client
        was away.
    staleness : (k,) float array
        How many global models came while each client was at work (tau); by default 0, as in rounds.
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

    def __post_init__(self) -> None:
        if self.rates is None:
            object.__setattr__(self, "rates", self.steps)
        if self.staleness is None:
            object.__setattr__(self, "staleness", np.zeros(len(self.clients)))

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def by_size(self) -> FloatArray:
        """(k,) shares times multiplicities, summing to 1; equal shares when nobody has any data."""
        raw = self.share * self.multiplicity
        total = raw.sum()
        if total > 0:
            return np.asarray(raw / total)
        return np.full(len(raw), 1.0 / len(raw))

    @property
    def learning_rates(self) -> FloatArray:
        """(k,) mean learning rate of each client's local steps; 1 where it made none."""
        return np.divide(self.rates, self.steps, out=np.ones(len(self)), where=self.steps > 0)

    @property
    def by_count(self) -> FloatArray:
        """(k,) multiplicities, summing to 1."""
        return np.asarray(self.multiplicity / self.multiplicity.sum())

    def weights_by(self, weighting: str, exponent: float = 0.0) -> FloatArray:
        """(k,) :attr:`by_size` or :attr:`by_count`, by the name that aggregators' ``weighting`` has.

        ``exponent`` discounts stale ones by (1 + staleness) to the power of minus that; the weights still sum to 1.
        """
        weights = self.by_size if weighting == "size" else self.by_count
        if not exponent:
            return weights
        discounted = weights * polynomial(self.staleness, exponent)
        return np.asarray(discounted / discounted.sum())


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
        result = self.old * old if self.old else 0.0
        # One after the other, not as a matrix product: the sum is the same on every machine.
        for weight, model in zip(self.weights.tolist(), models, strict=True):
            result = result + weight * model
        return result


@dataclass(frozen=True, eq=False)
class Combined:
    """What an aggregator made of a round.

    Attributes
    ----------
    model : (P,) the next global model
    weights : (k,) float array
        What each kept model counted for; it goes on record, beside the client.
    """

    model: Any
    weights: FloatArray


Made = TypeVar("Made", Mix, Combined)
Own = TypeVar("Own", bound="Memory")


class Memory:
    """What an aggregator remembers of one run between rounds; :mod:`fedcohort.simulate` saves it in checkpoints.

    A class whose attributes are arrays or :class:`ClientRows` names them in ``saved``; any other fills in
    :meth:`arrays` and :meth:`restore`.
    """

    saved: ClassVar[tuple[str, ...]] = ()  # attributes; None in the place of an array is not saved

    def arrays(self) -> dict[str, Any]:
        """Return everything worth saving, by name."""
        found: dict[str, Any] = {}
        for name in self.saved:
            value = getattr(self, name)
            if isinstance(value, ClientRows):
                found.update(value.arrays())
            elif value is not None:
                found[name] = value
        return found

    def restore(self, arrays: Mapping[str, AnyArray]) -> None:
        """Take over what :meth:`arrays` returned, as NumPy arrays, to the last bit."""
        for name in self.saved:
            value = getattr(self, name)
            if isinstance(value, ClientRows):
                value.restore(arrays)
            elif value is not None:
                # A copy: memories change their arrays in place, and the checkpoint may be read again.
                setattr(self, name, as_like(np.array(arrays[name]), value))


class Corrections(Memory, ABC):
    """A memory that also changes local training: of aggregators that say ``corrects``."""

    @abstractmethod
    def corrections(self, clients: IntArray) -> Any:
        """(k, P) vectors added to every local gradient of ``clients``."""

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
            Full-batch gradients at ``old``, where the aggregator asked for them.
        """


class OwnModels(Memory, ABC):
    """A memory of what clients train from, where that is not the global model: of aggregators with ``own_models``."""

    @abstractmethod
    def starts(self, clients: IntArray) -> Any:
        """(k, P) the models from which ``clients`` train in the next round."""


class Server(ABC):
    """What the server can compute on V samples of its own; a host hands it to aggregators that say ``needs_server``."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples V."""

    @property
    @abstractmethod
    def labels(self) -> Any:
        """(V, C) the samples' classes, one-hot; aggregators that call the samples unlabelled do not read it."""

    @abstractmethod
    def batches(self, size: int, steps: int) -> Iterable[IntArray]:
        """Yield ``steps`` batches of places 0..V-1, at most ``size`` each, drawn anew for every round of every run."""

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
    """Turns the kept models into the next global model. Derive a frozen dataclass and fill in :meth:`combine`."""

    name: ClassVar[str]
    model_copies: ClassVar[int] = 1  # vectors of the model's size sent each way per client (SCAFFOLD: 2)
    corrects: ClassVar[bool] = False  # whether its memory is Corrections
    own_models: ClassVar[bool] = False  # whether its memory is OwnModels
    needs_server: ClassVar[bool] = False  # whether it computes on samples of the server's own
    mixes_models: ClassVar[bool] = False  # whether it wants stale models as they are, not their updates on the newest

    @property
    def prox(self) -> float:
        """Weight mu of the proximal term mu/2 ||w - w_global||^2 in local training; 0 for none."""
        return 0.0

    @property
    def needs_gradients(self) -> bool:
        """Whether clients also compute the full-batch gradient at the received model."""
        return False

    @property
    def public(self) -> str | None:
        """A .npy file of unlabelled samples for the server; None: what the host keeps there."""
        return None

    @property
    def requires(self) -> frozenset[Signal]:
        """Which numbers clients report for it, beside what the selector requires."""
        return frozenset()

    def memory(self, federation: int, model: Any) -> Memory | None:
        """Return what is remembered between rounds, before the first one; None for most."""
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
            Whose they are.
        memory : Memory, optional
            What :meth:`memory` returned, brought up to date here; hosts pass a copy for what is thrown away.
        server : Server, optional
            For aggregators that say ``needs_server``.
        """

    def _check(self, models: Any, members: Members) -> None:
        """Refuse to combine nothing."""
        if len(members) == 0:
            raise InputError("An average needs at least one model. Got none; keep the old global model instead.")
        if len(models) != len(members):
            raise InputError(f"There must be one model per member. Got {len(models)} models of {len(members)} members.")

    def _server(self, server: Server | None) -> Server:
        """Return the server, or say that it is missing."""
        if server is None or len(server) == 0:
            raise InputError(
                f"The aggregator {self.name!r} computes on samples of the server's own, and there are none.",
                hint="in the simulator set scenario.server_validation, the number of samples of each class kept there",
            )
        return server

    def _own(self, memory: Memory | None, kind: type[Own]) -> Own:
        """Return the memory, or say that it is missing or another aggregator's."""
        if not isinstance(memory, kind):
            raise InputError(
                f"The aggregator {self.name!r} remembers things between rounds and needs its own memory. "
                f"Got {memory!r}.",
                hint="make it once with aggregator.memory(federation, model) and pass it to every combine",
            )
        return memory


class WeightedSum(Aggregator):
    """An aggregator that is a weighted sum. Derive a frozen dataclass and fill in :meth:`mix`."""

    @abstractmethod
    def mix(self, members: Members) -> Mix:
        """Return the weights of the kept models, at least one."""

    @final
    def combine(
        self, old: Any, models: Any, members: Members, memory: Memory | None = None, server: Server | None = None
    ) -> Combined:
        """Return the weighted sum."""
        self._check(models, members)
        mix = self.mix(members)
        return Combined(mix.of(old, models), mix.weights)


def fitting(made: Made, kind: type[Made], members: Members, old: Any = None) -> Made:
    """Return what an aggregator made, if it is a ``kind`` that fits its members; for hosts, who run others' code.

    >>> two = Members(np.arange(2), np.ones(2), np.ones(2), 9, np.ones(2))
    >>> fitting(Mix(np.ones(1)), Mix, two)
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.InputError: It must return one weight per model, an array of shape (2,). Got shape (1,).
    """
    if not isinstance(made, kind):
        raise InputError(f"It must return a {kind.__name__}. Got {type(made).__name__}.")
    if np.shape(made.weights) != (len(members),):
        raise InputError(
            f"It must return one weight per model, an array of shape ({len(members)},). Got shape "
            f"{np.shape(made.weights)}."
        )
    # A model of another library or shape would fail far from here, in the simulator's batch.
    if isinstance(made, Combined) and (type(made.model), np.shape(made.model)) != (type(old), np.shape(old)):
        raise InputError(
            f"It must return a model like the one it was given, {_form(old)}. Got {_form(made.model)}.",
        )
    return made


def _form(value: Any) -> str:
    return f"a {type(value).__name__} of shape {np.shape(value)}"


AGGREGATORS: Registry[Aggregator] = Registry("aggregator", package="fedcohort.training.aggregators", base=Aggregator)
