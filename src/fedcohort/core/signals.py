"""Signals: the kinds of facts a selector may need, each declared before it is read.

A selector lists what it needs in ``requires``. A host lists what it can supply. If the host lacks something, the
session refuses to start instead of failing in round 300. A selector that reads an undeclared signal gets an error.

A signal is one object that says everything about itself. The simulator, the cost accounting, the Flower client and the
wire format ask it (``signal.how``, ``signal.passes``, ...) and keep no lists of signals. A selector and a host outside
the library can declare another one: ``DRAIN = Signal("battery-drain", meaning="...")``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray
from fedcohort.core.errors import InputError
from fedcohort.core.text import short_repr
from fedcohort.core.validate import input_error, instance, integer, numbers, one_of

FORWARD, BACKWARD = 1.0, 2.0  # sample passes
SKETCH_WIDTH = 64  # keeps squared distances to about 18%, sqrt(2 / 64), which tells clusters of clients apart

Model = Literal["received", "own"]  # the global model as the client receives it, or its own after local training
Part = Literal["train", "validation"]
Utility = Callable[[BoolArray], FloatArray]  # of coalitions (s, m) of a round's models: (s,)
Take = Literal["norm", "distance", "weighted-distance", "output-bias", "output-norm", "sketch"]


class Known(Enum):
    """When a signal is known."""

    TABLE = "before the first round, in the client table"
    REPORT = "after a round, in its report"
    QUERY = "before a cohort is chosen, by asking"
    TRIAL = "in the answer to a trial"


class Party(Enum):
    """Who measures a signal."""

    CLIENT = "the client, on its own data"
    SERVER = "the server, from what clients send"
    HOST = "the host"


@dataclass(frozen=True)
class LossMeasure:
    """The mean loss of a model on a client's samples, without any training.

    Parameters
    ----------
    part : "train" or "validation"
        Which of the client's samples.
    loss : "label", "pseudo" or "robust"
        Cross-entropy with the client's labels, with pseudo-labels (the classes that a reference model predicts), or
        FLASH's noise-robust loss, which combines both.
    mean : "mean" or "root-mean-square"
        How the samples' losses become one number.
    """

    part: Part = "train"
    loss: Literal["label", "pseudo", "robust"] = "label"
    mean: Literal["mean", "root-mean-square"] = "mean"

    def __post_init__(self) -> None:
        one_of(self.part, get_args(Part), "The samples of a LossMeasure")
        one_of(self.loss, ("label", "pseudo", "robust"), "The loss of a LossMeasure")
        one_of(self.mean, ("mean", "root-mean-square"), "The mean of a LossMeasure")


@dataclass(frozen=True)
class LossOf:
    """A loss of the received model or of the client's own. Pseudo-labels come from the received model."""

    measure: LossMeasure = LossMeasure()
    model: Model = "received"
    width: ClassVar[None] = None  # a single number

    def __post_init__(self) -> None:
        instance(self.measure, LossMeasure, "The measure of LossOf")
        one_of(self.model, get_args(Model), "The model of LossOf")


@dataclass(frozen=True)
class VectorOf:
    """A quantity derived from a vector of the model's size; :mod:`fedcohort.core.vectors` computes it.

    Parameters
    ----------
    vector : "update" or "gradient"
        The client's model minus the received one, or the full-batch gradient of its mean loss at the received model.
    take : "norm", "distance", "weighted-distance", "output-bias", "output-norm" or "sketch"
        L2 norm; L2 distance to the cohort's mean vector, unweighted or weighted by the clients' samples; the entries of
        the output layer's bias; the L2 norm of the output layer's entries; a random projection.
    """

    vector: Literal["update", "gradient"]
    take: Take

    def __post_init__(self) -> None:
        one_of(self.vector, ("update", "gradient"), "The vector of VectorOf")
        one_of(self.take, get_args(Take), "What VectorOf takes of it")

    @property
    def width(self) -> int | Literal["classes"] | None:
        """The length of the result for each client; None for a single number."""
        return "classes" if self.take == "output-bias" else SKETCH_WIDTH if self.take == "sketch" else None


@dataclass(frozen=True)
class OnServer:
    """The received model's loss on the server's own samples, or numbers that follow from such losses.

    Parameters
    ----------
    values : callable, optional
        ``values(utility, members, rng)`` returns one number for each of a round's models, (members,). ``utility`` takes
        coalitions of them, bool (s, members), and returns for each minus the loss of its members' average, (s,); the
        empty coalition has the received model. Only the simulator computes such averages. Default: the loss of the
        received model, the same for every client.
    stream : str
        The name of the stream of random numbers that ``rng`` draws from.
    """

    values: Callable[[Utility, int, np.random.Generator], FloatArray] | None = field(default=None, compare=False)
    stream: str = ""
    width: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not (self.values is None or callable(self.values)):
            raise input_error("The values of OnServer", "a function or None", self.values)
        instance(self.stream, str, "The stream of OnServer", "a string")

    def measure(self, utility: Utility, members: int, rng: np.random.Generator) -> FloatArray:
        """Return the (members,) numbers that ``values`` returns, checked."""
        assert self.values is not None
        found = numbers(self.values(utility, members, rng), "What OnServer's function returns")
        if found.shape != (members,):
            raise InputError(f"OnServer's function must return {members} numbers. Got shape {found.shape}.")
        return found


class Pass(NamedTuple):
    """One pass of a model over a part of a client's samples. Signals that need the same pass share it."""

    model: Model
    part: Part
    backward: bool = False

    @property
    def weight(self) -> float:
        """Sample passes for each sample."""
        return FORWARD + BACKWARD if self.backward else FORWARD


GRADIENT_PASS = Pass("received", "train", backward=True)  # for a full-batch gradient

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_DECLARED: dict[str, Signal] = {}  # by name: journals and messages hold names
_OF_METHODS = "fedcohort.selectors"  # the package whose modules define the signals of single methods


@dataclass(frozen=True)
class Signal:
    """A kind of fact about clients.

    Creating a signal declares it: selectors then name it in ``requires``, and hosts put it into reports. Journals and
    messages hold its name. fedcohort's own signals are attributes (``Signal.LOSS``); one that a single method needs is
    defined beside that method. To add another, declare it once, at the top of a module.

    Parameters
    ----------
    name : str
        Lower-case letters, digits and hyphens.
    meaning : str
        What it is, in one sentence.
    known : Known
        When it is known. Signals declared outside the library are known after a round, in its report.
    by : Party
        Who measures it. Default: the server, if it is computed from updates or compares clients with each other; the
        host, if it is computed on the server's own samples; otherwise the client.
    how : LossOf, VectorOf, OnServer or None
        How it is computed; None if no host can compute it from models and data.
    width : int, "classes" or None
        The length of the vector for each client; "classes" means one number per class, None a single number. It
        follows from ``how``, if that is given.
    supplied_by : str
        What a host must do to supply it.

    Examples
    --------
    >>> Signal.LOSS
    Signal.LOSS
    >>> battery = Signal("battery-drop", meaning="percent of the battery that the round took")
    >>> Signal.by_name("battery-drop") == battery
    True
    """

    name: str
    _: KW_ONLY
    meaning: str
    known: Known = Known.REPORT
    by: Party | None = None
    how: LossOf | VectorOf | OnServer | None = None
    width: int | Literal["classes"] | None = None
    supplied_by: str = "add it to RoundReport.metrics for the clients of the cohort"

    # A class cannot contain its own instances, so the library's signals are added below, as in datetime.timezone.utc.

    SIZES: ClassVar[Signal]
    LABEL_COUNTS: ClassVar[Signal]
    LABEL_PRODUCTS: ClassVar[Signal]
    KEPT: ClassVar[Signal]
    DURATION: ClassVar[Signal]
    STALENESS: ClassVar[Signal]
    LOSS: ClassVar[Signal]
    LOSS_AFTER: ClassVar[Signal]
    LOSS_RMS: ClassVar[Signal]
    VALIDATION_LOSS: ClassVar[Signal]
    ROBUST_LOSS: ClassVar[Signal]
    ROBUST_LOSS_AFTER: ClassVar[Signal]
    PSEUDO_LOSS: ClassVar[Signal]
    PSEUDO_LOSS_AFTER: ClassVar[Signal]
    UPDATE_NORM: ClassVar[Signal]
    UPDATE_DISTANCE: ClassVar[Signal]
    WEIGHTED_UPDATE_DISTANCE: ClassVar[Signal]
    OUTPUT_BIAS_UPDATE: ClassVar[Signal]
    OUTPUT_UPDATE_NORM: ClassVar[Signal]
    UPDATE_SKETCH: ClassVar[Signal]
    GRADIENT_NORM: ClassVar[Signal]
    GRADIENT_DISTANCE: ClassVar[Signal]
    WEIGHTED_GRADIENT_DISTANCE: ClassVar[Signal]
    LOSS_QUERY: ClassVar[Signal]
    TRIAL_QUERY: ClassVar[Signal]
    LOSS_CHANGE: ClassVar[Signal]

    def __post_init__(self) -> None:
        name, how = self.name, self.how
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise input_error("The name of a signal", "of lower-case letters, digits and hyphens", name)
        if not isinstance(self.meaning, str) or not self.meaning:
            raise input_error(f"The meaning of the signal {name!r}", "one sentence", self.meaning)
        if self.width not in (None, "classes"):
            integer(self.width, f"The width of the signal {name!r}", least=1)
        if not (how is None or isinstance(how, LossOf | VectorOf | OnServer)):
            raise input_error(f"How the signal {name!r} is computed", "LossOf, VectorOf, OnServer or None", how)
        if how is not None and self.width != how.width:
            if self.width is not None:
                raise input_error(
                    f"The width of the signal {name!r}", f"{how.width!r}, because of how it is computed", self.width
                )
            object.__setattr__(self, "width", how.width)
        if self.by is None:
            by = Party.HOST if isinstance(how, OnServer) else Party.CLIENT
            if isinstance(how, VectorOf) and (how.vector == "update" or how.take.endswith("distance")):
                by = Party.SERVER
            object.__setattr__(self, "by", by)
        # A module may be imported twice under two names, so an equal declaration is not a clash.
        declared = _DECLARED.setdefault(name, self)
        if declared != self:
            raise InputError(
                f"There is already a signal {name!r}: {declared.meaning}.",
                hint="give yours another name, or use the existing one",
            )

    def __hash__(self) -> int:
        return hash(self.name)

    def __lt__(self, other: Signal) -> bool:
        return self.name < other.name

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        constant = self.name.replace("-", "_").upper()
        return f"Signal.{constant}" if hasattr(Signal, constant) else f"Signal({self.name!r})"

    @classmethod
    def by_name(cls, name: str | Signal) -> Signal:
        """Return the signal with this name; the error suggests the nearest name."""
        # A journal may name the signal of a method whose module nobody has imported yet.
        if cls.get(name) is None:
            importlib.import_module(_OF_METHODS)
        signal = cls.get(name)
        if signal is None:
            close = difflib.get_close_matches(name, list(_DECLARED), 1) if isinstance(name, str) else []
            raise InputError(
                f"There is no signal {short_repr(name)}. Known: {', '.join(sorted(_DECLARED))}.",
                hint=f"did you mean {close[0]!r}?" if close else "import the module that declares it",
            )
        return signal

    @classmethod
    def get(cls, name: object) -> Signal | None:
        """Return the signal with this name, or None if nobody has declared one."""
        return name if isinstance(name, Signal) else _DECLARED.get(name) if isinstance(name, str) else None

    @classmethod
    def all(cls) -> tuple[Signal, ...]:
        """Return all signals declared so far, fedcohort's own and others."""
        return tuple(_DECLARED.values())

    @property
    def reported(self) -> bool:
        """Whether it is part of a round's report."""
        return self.known is Known.REPORT

    @property
    def is_metric(self) -> bool:
        """Whether it is one of the report's metrics; ``Signal.KEPT`` is not, because it has its own field."""
        return self.reported and self != Signal.KEPT

    @property
    def passes(self) -> frozenset[Pass]:
        """What a client computes for it beyond training."""
        match self.how:
            case LossOf(measure, model):
                return frozenset({Pass(model, measure.part)})
            case VectorOf("gradient"):
                return frozenset({GRADIENT_PASS})
        return frozenset()

    @property
    def models_sent(self) -> int:
        """How many vectors of the model's size a client sends for it."""
        # The server can compute something from gradients only if clients send them.
        return int(isinstance(self.how, VectorOf) and self.how.vector == "gradient" and self.by is Party.SERVER)

    @property
    def unaided(self) -> bool:
        """Whether a server knows it about any client that trains, without the client's help."""
        match self.how:
            case VectorOf("update"):
                return self.reported
            case OnServer(values):
                return values is None
        return self in (Signal.KEPT, Signal.DURATION, Signal.STALENESS)

    def numbers(self, classes: int) -> int:
        """How many numbers it has for each client."""
        return 1 if self.width is None else classes if self.width == "classes" else self.width

    def numbers_sent(self, classes: int) -> int:
        """How many numbers a client sends for it."""
        return self.numbers(classes) if self.by is Party.CLIENT and self.known is not Known.TABLE else 0

    @property
    def measure(self) -> LossMeasure | None:
        """The measure of a loss; None for other signals."""
        return self.how.measure if isinstance(self.how, LossOf) else None

    @property
    def of_received(self) -> bool:
        """Whether it is a loss of the received model, which a client can also be asked for before it is chosen."""
        return self.reported and isinstance(self.how, LossOf) and self.how.model == "received"

    @property
    def sent_by_clients(self) -> bool:
        """Whether clients send it as a number or a list; the server computes everything that comes from vectors."""
        return self.reported and self.by is Party.CLIENT and not isinstance(self.how, VectorOf)

    @property
    def held_out(self) -> bool:
        """Whether clients must hold out part of their data for it."""
        return self.measure is not None and self.measure.part == "validation"

    @property
    def pseudo(self) -> bool:
        """Whether it is a loss that needs pseudo-labels."""
        return self.measure is not None and self.measure.loss != "label"


# -- the client table, known before the first round ---------------------------------------------------------

Signal.SIZES = Signal(
    "sizes",
    meaning="number of training samples of each client",
    known=Known.TABLE,
    supplied_by="pass sizes=... to ClientTable",
)
Signal.LABEL_COUNTS = Signal(
    "label-counts",
    meaning="samples per class of each client",
    known=Known.TABLE,
    width="classes",
    supplied_by="pass labels=LabelCounts(...) to ClientTable",
)
Signal.LABEL_PRODUCTS = Signal(
    "label-products",
    meaning="inner products of the clients' label counts",
    known=Known.TABLE,
    supplied_by="pass labels=LabelCounts(...), LabelFactor(...) or LabelGram(...) to ClientTable",
)

# -- a round's report, for each client of the cohort --------------------------------------------------------

Signal.KEPT = Signal(
    "kept",
    meaning="whether the filter kept the client's model in the average",
    by=Party.HOST,
    supplied_by="set RoundReport.kept",
)
Signal.DURATION = Signal("duration", meaning="seconds from sending the model to receiving the update", by=Party.HOST)
Signal.STALENESS = Signal(
    "staleness",
    meaning="how many global models came while the client was at work; 0 in a session with rounds",
    by=Party.HOST,
    supplied_by="nothing: the session knows it",
)
Signal.LOSS = Signal(
    "loss", meaning="mean training loss of the received global model on the client's data", how=LossOf()
)
Signal.LOSS_AFTER = Signal(
    "loss-after",
    meaning="mean training loss of the client's own model after local training",
    how=LossOf(model="own"),
)
Signal.LOSS_RMS = Signal(
    "loss-rms",
    meaning="root of the mean squared loss of the samples, received global model on the client's data",
    how=LossOf(LossMeasure(mean="root-mean-square")),
)
Signal.VALIDATION_LOSS = Signal(
    "validation-loss",
    meaning="loss of the received global model on the client's held-out data",
    how=LossOf(LossMeasure(part="validation")),
)
Signal.ROBUST_LOSS = Signal(
    "robust-loss",
    meaning="noise-robust loss of the received global model on the client's data",
    how=LossOf(LossMeasure(loss="robust")),
)
Signal.ROBUST_LOSS_AFTER = Signal(
    "robust-loss-after",
    meaning="noise-robust loss of the client's own model after local training",
    how=LossOf(LossMeasure(loss="robust"), "own"),
)
Signal.PSEUDO_LOSS = Signal(
    "pseudo-loss",
    meaning="cross-entropy of the received global model against its own pseudo-labels",
    how=LossOf(LossMeasure(loss="pseudo")),
)
Signal.PSEUDO_LOSS_AFTER = Signal(
    "pseudo-loss-after",
    meaning="cross-entropy of the client's own model after training against the received model's pseudo-labels",
    how=LossOf(LossMeasure(loss="pseudo"), "own"),
)
Signal.UPDATE_NORM = Signal(
    "update-norm",
    meaning="L2 norm of the client's model update",
    by=Party.SERVER,
    how=VectorOf("update", "norm"),
)
Signal.UPDATE_DISTANCE = Signal(
    "update-distance",
    meaning="L2 distance of the client's update to the mean update of the cohort",
    by=Party.SERVER,
    how=VectorOf("update", "distance"),
)
Signal.WEIGHTED_UPDATE_DISTANCE = Signal(
    "weighted-update-distance",
    meaning="L2 distance of the client's update to the cohort's mean update weighted by samples",
    by=Party.SERVER,
    how=VectorOf("update", "weighted-distance"),
)
Signal.OUTPUT_BIAS_UPDATE = Signal(
    "output-bias-update",
    meaning="the client's update of the output layer's bias, one number per class",
    by=Party.SERVER,
    how=VectorOf("update", "output-bias"),
    width="classes",
)
Signal.OUTPUT_UPDATE_NORM = Signal(
    "output-update-norm",
    meaning="L2 norm of the client's update of the output layer, weights and bias",
    by=Party.SERVER,
    how=VectorOf("update", "output-norm"),
)
Signal.UPDATE_SKETCH = Signal(
    "update-sketch",
    meaning=f"random projection of the client's update to {SKETCH_WIDTH} numbers, which keeps distances and angles",
    by=Party.SERVER,
    how=VectorOf("update", "sketch"),
    width=SKETCH_WIDTH,
)
Signal.GRADIENT_NORM = Signal(
    "gradient-norm",
    meaning="L2 norm of the client's full-batch gradient at the received model",
    how=VectorOf("gradient", "norm"),
)
Signal.GRADIENT_DISTANCE = Signal(
    "gradient-distance",
    meaning="L2 distance of the client's full-batch gradient at the received model to the cohort's mean gradient",
    by=Party.SERVER,
    how=VectorOf("gradient", "distance"),
)
Signal.WEIGHTED_GRADIENT_DISTANCE = Signal(
    "weighted-gradient-distance",
    meaning="L2 distance of the client's full-batch gradient to the cohort's mean gradient weighted by samples",
    by=Party.SERVER,
    how=VectorOf("gradient", "weighted-distance"),
)

# -- queries that a host can answer before a cohort is chosen, and the answer to a trial --------------------

Signal.LOSS_QUERY = Signal(
    "loss-query",
    meaning="losses of the current global model on clients the selector names, before it chooses",
    known=Known.QUERY,
    supplied_by="answer the Losses that session.query returns and list this signal in the session's signals",
)
Signal.TRIAL_QUERY = Signal(
    "trial-query",
    meaning="the loss change of every client if given cohorts were trained and averaged, then thrown away",
    known=Known.QUERY,
    supplied_by="answer the Trial that session.query returns and list this signal in the session's signals",
)
Signal.LOSS_CHANGE = Signal(
    "loss-change",
    meaning="change of a client's loss caused by a trial cohort",
    known=Known.TRIAL,
    supplied_by="answer a Trial",
)

SIGNALS = tuple(_DECLARED.values())
"""The signals that several methods share; see :meth:`Signal.all`."""
TABLE_SIGNALS = frozenset(s for s in SIGNALS if s.known is Known.TABLE)
QUERY_SIGNALS = frozenset(s for s in SIGNALS if s.known is Known.QUERY)
LOSS_SIGNALS = frozenset(s for s in SIGNALS if s.of_received)
"""Losses of the received model, which a client can also be asked for before it is chosen."""


def unaided_signals() -> frozenset[Signal]:
    """Return what a server knows about any client that trains, without the client's help."""
    return _unaided(len(_DECLARED))


@functools.lru_cache(maxsize=1)  # a server asks for every client, and signals are seldom declared
def _unaided(declared: int) -> frozenset[Signal]:
    return frozenset(s for s in Signal.all() if s.unaided)


def metrics_of(signals: Iterable[Signal]) -> frozenset[Signal]:
    """Return those of the ``signals`` that are metrics of a round's report."""
    return frozenset(s for s in signals if s.is_metric)


def losses_of(signals: Iterable[Signal], model: Model) -> dict[Signal, LossMeasure]:
    """Return the ``signals`` that are losses of ``model``, each with its measure."""
    return {s: s.how.measure for s in signals if isinstance(s.how, LossOf) and s.how.model == model}


def vectors_of(signals: Iterable[Signal], vector: Literal["update", "gradient"]) -> dict[Signal, VectorOf]:
    """Return the ``signals`` that are derived from clients' updates or gradients, each with its derivation."""
    return {s: s.how for s in signals if isinstance(s.how, VectorOf) and s.how.vector == vector}
