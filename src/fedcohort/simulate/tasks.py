"""Tasks: what is predicted, which loss is minimised, and which metric judges the model.

Compiled code trains classifiers with cross-entropy, whatever metric judges them. Stacks of models on a GPU and the
plain loop train any task.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedcohort.core.errors import InputError, ParameterError, UnknownNameError
from fedcohort.core.params import Boolean, Optional, Parameterized, Text, param
from fedcohort.core.registry import Registry, is_reference, resolve_reference, suggest
from fedcohort.core.text import short_repr
from fedcohort.simulate.data.dataset import Target
from fedcohort.simulate.metrics import Metric
from fedcohort.simulate.own_code import OwnCodeError, own_code

if TYPE_CHECKING:
    import torch

_LOSS = "a loss of torch.nn.functional, or your own function of (outputs, targets): file.py:function"
_METRIC = "what judges the model: a known metric, or your own function of (outputs, targets)"
_PREDICTS = {"class": "a class", "number": "numbers", "token": "a token for every position of a sequence"}


@dataclass(frozen=True, kw_only=True)
class Task(Parameterized):
    """What is predicted, the loss of a sample, and the metric of a model.

    Your own task, named as ``file.py:Class``, is a subclass and a frozen dataclass like those below. It sets ``target``
    and the defaults, and may override :meth:`losses`.
    """

    name: ClassVar[str]
    target: ClassVar[Target]

    loss: str = param(dataclasses.MISSING, Text(), _LOSS)
    metric: str = param(dataclasses.MISSING, Text(), _METRIC)
    # Of known metrics it is known, and filled in.
    higher_is_better: bool | None = param(None, Optional(Boolean()), "the direction of your own metric")

    def __post_init__(self) -> None:
        """Find the functions, and check that they fit the target."""
        super().__post_init__()
        for name in ("loss", "metric"):
            value = getattr(self, name)
            if is_reference(value):
                function, absolute = resolve_reference(value)
                if not callable(function):
                    raise InputError(f"The {name} {value!r} is not a function of (outputs, targets).")
                object.__setattr__(self, name, absolute)  # valid from any folder
        if not is_reference(self.loss):
            import torch.nn.functional as F

            # Only a loss with the parameter "reduction" can be computed per sample.
            known = [name for name in vars(F) if name.endswith("_loss") or name in ("cross_entropy", "kl_div")]
            if self.loss not in known or "reduction" not in inspect.signature(getattr(F, self.loss)).parameters:
                raise UnknownNameError(
                    f"torch.nn.functional has no loss {self.loss!r} of (outputs, targets).",
                    hint=suggest(self.loss, known) or "give your own function as file.py:function",
                )
        self._check_metric()

    def _check_metric(self) -> None:
        if is_reference(self.metric):
            if self.higher_is_better is None:
                raise ParameterError(
                    f"The metric {self.metric!r} needs a direction: is higher better?", hint="set task.higher_is_better"
                )
            return
        fitting = [name for name, (_, targets, _) in _METRICS.items() if self.target in targets]
        if self.metric not in fitting:
            raise UnknownNameError(
                f"The task {self.name!r} has no metric {self.metric!r}. Known: {', '.join(fitting)}.",
                hint=suggest(self.metric, fitting) or "give your own function as file.py:function",
            )
        # A known metric has one direction, so a contradiction is a mistake and no wish.
        direction = _METRICS[self.metric][0]
        if self.higher_is_better not in (None, direction):
            raise ParameterError(
                f"For the metric {self.metric!r}, {'higher' if direction else 'lower'} is better, but "
                f"task.higher_is_better is {self.higher_is_better}."
            )
        object.__setattr__(self, "higher_is_better", direction)

    # -- properties ------------------------------------------------------------------------------------------------

    @property
    def judged_by(self) -> Metric:
        """The metric's name and direction."""
        return Metric.of({"metric": self.metric, "higher_is_better": self.higher_is_better})

    @property
    def has_classes(self) -> bool:
        """Whether every sample has one class, as label counts, label skew and pseudo-labels require."""
        return self.target == "class"

    @property
    def fast(self) -> bool:
        """Whether compiled code can train this task; training does not depend on the metric."""
        return type(self) is Classification and self.loss == "cross_entropy"

    @property
    def standardises(self) -> bool:
        """Whether models learn targets scaled to mean 0 and deviation 1."""
        return False

    @property
    def predicts(self) -> str:
        """What is predicted, in words."""
        return _PREDICTS[self.target]

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample (n,), given outputs (n, ...) and targets."""
        import torch

        if is_reference(self.loss):
            function = resolve_reference(self.loss)[0]
            with own_code():
                values = function(outputs, targets)
        else:
            import torch.nn.functional as F

            # torch's losses over classes expect the classes on the second axis.
            scores = outputs if self.target == "number" else outputs.movedim(-1, 1)
            with own_code():  # it may be a loss for another purpose
                values = getattr(F, self.loss)(scores, targets, reduction="none")
        if not isinstance(values, torch.Tensor) or not values.ndim or len(values) != len(targets):
            got = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise OwnCodeError(
                f"The loss {self.loss!r} must give one number per sample, ({len(targets)}, ...). Got {got}.",
                hint="a loss of torch does that with reduction='none'",
            )
        return values.flatten(1).mean(1) if values.ndim > 1 else values

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> float:
        """Return the metric of a model from its outputs on the test set, and its losses there (n,)."""
        if is_reference(self.metric):
            function = resolve_reference(self.metric)[0]
            with own_code():
                value = function(outputs, targets)
            try:
                return float(value)
            except Exception:  # the function may return anything
                got = short_repr(value)
                raise OwnCodeError(f"The metric {self.metric!r} must give one number. Got {got}.") from None
        return float(_METRICS[self.metric][2](outputs, targets, losses))


TASKS: Registry[Task] = Registry("task", base=Task)


@TASKS.register("classification")
@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """One class per sample; by default cross-entropy and accuracy."""

    target = "class"
    loss: str = param("cross_entropy", Text(), _LOSS)
    metric: str = param("accuracy", Text(), _METRIC)


@TASKS.register("regression")
@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """One or several numbers per sample; by default squared error and its root.

    Models learn targets scaled to mean 0 and deviation 1, so that learning rates do not depend on the targets' unit.
    All reported numbers, including test losses, are in the original unit.
    """

    target = "number"
    loss: str = param("mse_loss", Text(), _LOSS)
    metric: str = param("rmse", Text(), _METRIC)
    standardise: bool = param(
        True, Boolean(), "scale targets to mean 0 and deviation 1, if the loss is mse_loss or l1_loss"
    )

    @property
    def standardises(self) -> bool:
        """Whether targets are scaled, which needs a loss that does not depend on their zero point or unit."""
        return self.standardise and self.loss in ("mse_loss", "l1_loss")


@TASKS.register("next-token")
@dataclass(frozen=True, kw_only=True)
class NextToken(Task):
    """A token for every position: inputs and targets are (n, length) integers, outputs (n, length, tokens)."""

    target = "token"
    loss: str = param("cross_entropy", Text(), _LOSS)
    metric: str = param("token-accuracy", Text(), _METRIC)


Measure = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def _r_squared(outputs: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    residual = (outputs - targets).double().square().sum()
    return 1 - residual / (targets - targets.mean(0)).double().square().sum()


def _perplexity(outputs: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(outputs.flatten(0, -2), targets.reshape(-1)).double().exp()


# Whether higher is better, the targets it is for, and the metric of (outputs, targets, losses). In double precision,
# because a mean over a large test set in single precision depends on the order of its terms.
_METRICS: dict[str, tuple[bool, tuple[Target, ...], Measure]] = {
    "accuracy": (True, ("class",), lambda out, y, losses: (out.argmax(-1) == y).double().mean()),
    "token-accuracy": (True, ("token",), lambda out, y, losses: (out.argmax(-1) == y).double().mean()),
    "perplexity": (False, ("class", "token"), _perplexity),
    "rmse": (False, ("number",), lambda out, y, losses: (out - y).double().square().mean().sqrt()),
    "mae": (False, ("number",), lambda out, y, losses: (out - y).double().abs().mean()),
    "r2": (True, ("number",), _r_squared),
    "loss": (False, ("class", "number", "token"), lambda out, y, losses: losses.double().mean()),
}
