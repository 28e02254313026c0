"""A Flower strategy that decides who takes part and leaves everything else to the strategy it wraps.

Five lines add selection to an existing ServerApp::

    from fedcohort.hosts.flower import CohortStrategy
    from fedcohort.selectors import PowerOfChoice

    strategy = CohortStrategy(
        PowerOfChoice(), strategy=FedAvg(fraction_train=0.1), journal="run.sqlite", seed=1
    )
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=100)
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from scipy.special import logsumexp

from fedcohort.core.errors import ParameterError
from fedcohort.core.params import Boolean, Constraint, Interval, Optional, check_values
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.core.registry import Registry
from fedcohort.core.signals import OnServer, Signal
from fedcohort.core.text import short_repr
from fedcohort.hosts.flower.checkpoint import Checkpoints
from fedcohort.hosts.flower.logs import also_log_to
from fedcohort.hosts.flower.run import EvaluateFn, FlowerRun, ShouldStop
from fedcohort.hosts.flower.wrapped_strategy import InnerStrategyError, WrappedStrategy
from fedcohort.hosts.live_run import RunSettings
from fedcohort.hosts.round import FederationTimeoutError, Policy, RoundError
from fedcohort.hosts.wire import normal_form, plain
from fedcohort.journal.lock import check_journal_path
from fedcohort.journal.signing import Signer
from fedcohort.privacy.label_decoders import LabelDecoder
from fedcohort.session.rules import Rules
from fedcohort.training.filters import FILTERS, Filter, KeepAll, Need

__all__ = ["CohortStrategy", "FederationTimeoutError", "InnerStrategyError", "RoundError", "ServerValidation"]
T = TypeVar("T")
log = logging.getLogger("flwr.fedcohort")
_COUNT = Interval(int, 1, None)
_MANY = 1_000_000  # clients, so that a small fraction of them does not round down to 0
_CONSTRAINTS: Mapping[str, Constraint] = {
    "seed": Interval(int, 0, None),
    "describe_every": Optional(Interval(float, 0, None, "neither")),
    "classes": Optional(_COUNT),
    "keep_checkpoints": _COUNT,
    "registered_only": Boolean(),
}


@dataclass(frozen=True)
class ServerValidation:
    """The server's own validation set, for filters that use it to judge models (FedCA).

    Parameters
    ----------
    logits : callable
        ``logits(arrays)`` returns the (V, C) outputs of a model on the validation inputs.
    labels : (V,) array
        The classes, 0 to C - 1.
    """

    logits: Callable[[ArrayRecord], Any]
    labels: Any

    def loss(self, arrays: ArrayRecord) -> float:
        """Return the mean cross-entropy of a model."""
        logits = np.asarray(plain(self.logits(arrays)), np.float64)
        labels = np.asarray(plain(self.labels), np.int64)
        return float(np.mean(logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]))


class CohortStrategy(Strategy):
    """Choose clients with a fedcohort selector; configure, aggregate and evaluate with any Flower strategy.

    Parameters
    ----------
    selector : Selector or str
        The selector, or its registered name.
    strategy : Strategy
        Any strategy of Flower's message API. DP wrappers go inside: ``CohortStrategy(s, strategy=DP(FedAvg()))``.
    journal : path, optional
        Where the record of the run is kept. A run that finds its journal continues it. Default: in memory only.
    seed : int
        Every choice follows from it.
    policy : Policy, optional
        How rounds run: how many clients, deadlines, what happens to late and missing models, limits. Its ``size`` is by
        default what the wrapped strategy's ``fraction_train`` and ``min_train_nodes`` say, and under differential
        privacy always the wrapper's ``num_sampled_clients``; ``wait_for`` is what the strategy wants to see, and
        ``deadline`` the ``timeout`` of :meth:`start`.
    describe_every : float, optional
        Seconds after which clients are asked again what they hold. Default: only when they connect.
    classes : int, optional
        Number of classes, if clients send plain label counts. The labels of a client with more classes are ignored.
        Default: as many as at least two clients, and more than a fifth of all, have.
    filter : Filter or str, optional
        Decides which models enter the average, or its name. Default: all valid ones, or the default filter of a
        selector that learns from which models are kept.
    validation : ServerValidation, optional
        For filters that need the models' outputs on the server's validation set.
    shadows : mapping of name to Selector, optional
        Selectors whose choices are recorded next to the real ones.
    labels : LabelDecoder, optional
        Reads protected label counts (``fedcohort.privacy``): ``EncryptedLabels``, ``RotatedLabels`` or
        ``NoisyLabels``.
    audit : bool
        Whether the journal is a chain of digests, for ``fedcohort journal audit``. Clients get the newest digest in
        every round.
    sign : path, optional
        The operator's private key (``fedcohort journal keygen``), which signs the newest digest; needs ``audit``.
    rules : Rules, optional
        Rules for every cohort of any selector. Attributes come from the clients' Facts. None keeps the journal's rules;
        ``Rules()`` drops them.
    registered_only : bool
        Whether to admit only nodes that are registered with the SuperLink under a name
        (``flwr supernode register KEY --name NAME``). Other names prove nothing: a node can take any.
    leases : path, optional
        A file that several runs of one federation share: a client that works for one run is not a candidate in
        another. Default: none.
    json_log : path, optional
        A file to which the log is also written, one JSON object per line.
    checkpoints : path, optional
        Folder of the model checkpoints. Default: ``<journal>.checkpoints``.
    keep_checkpoints : int
        How many of the newest checkpoints stay on disk.
    **moved
        Fields of the policy one by one, ``cohort_size`` for its ``size``: for one more release, with a warning.
    """

    asynchronous = False

    def __init__(
        self,
        selector: Selector[Any] | str,
        strategy: Strategy | None = None,
        *,
        journal: str | Path | None = None,
        seed: int = 0,
        policy: Policy | None = None,
        filter: Filter | str | None = None,
        validation: ServerValidation | None = None,
        shadows: Mapping[str, Selector[Any] | str] | None = None,
        labels: LabelDecoder | None = None,
        classes: int | None = None,
        describe_every: float | None = None,
        audit: bool = False,
        sign: str | Path | None = None,
        rules: Rules | None = None,
        registered_only: bool = False,
        leases: str | Path | None = None,
        json_log: str | Path | None = None,
        checkpoints: str | Path | None = None,
        keep_checkpoints: int = 2,
        **moved: Any,
    ) -> None:
        self.seed = seed
        self.describe_every = describe_every
        self.classes = classes
        self.validation = validation
        self.labels = labels
        self.audit = audit
        self.sign = sign
        self.registered_only = registered_only
        self.keep_checkpoints = keep_checkpoints
        check_values(self, _CONSTRAINTS)
        _check_kind("rules", rules, Rules)
        _check_kind("policy", policy, Policy)
        _check_kind("validation", validation, ServerValidation)
        # The warning names the line that creates the strategy, also for the subclass.
        policy = _with_moved(policy or Policy(), moved, 3 + self.asynchronous)
        self.selector = create_part("selector", selector, Selector, SELECTORS)
        self.wrapped = WrappedStrategy(FedAvg() if strategy is None else strategy)
        self.strategy = self.wrapped.strategy
        self._warn_of_bias()
        if filter is None and Signal.KEPT in self.selector.requires:
            filter = FILTERS.create(self.selector.default_filter)
        self.filter = KeepAll() if filter is None else create_part("filter", filter, Filter, FILTERS)
        self._check_strategy(policy)
        self._check_needs(validation)
        if self.sign is not None:  # a key that cannot be read is found before clients come online
            Signer(self.sign)
        self.journal = None if journal is None else check_journal_path(journal)
        private = self.wrapped.private_size
        # Under differential privacy, only the number of models for which the noise is made may be averaged.
        self.policy = replace(policy, size=private or policy.size, private=private is not None)
        self.shadows = {n: create_part("shadows", shadow, Selector, SELECTORS) for n, shadow in (shadows or {}).items()}
        # Like the names of clients, because an operator's editor may use another Unicode form.
        self.rules = None if rules is None else rules.with_names(normal_form)
        self.leases = None if leases is None else Path(leases)
        self.json_log = None if json_log is None else Path(json_log)
        if checkpoints is None and self.journal is not None:
            checkpoints = self.journal.with_name(f"{self.journal.name}.checkpoints")
        self.checkpoints = None if checkpoints is None else Checkpoints(checkpoints, keep_checkpoints)
        # Tests replace these, so that hours of waiting take no time.
        self.clock: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], None] = time.sleep

    @property
    def settings(self) -> RunSettings:
        """What each of its runs is started with."""
        return RunSettings(
            selector=self.selector,
            seed=self.seed,
            policy=self.policy,
            journal=self.journal,
            shadows=self.shadows,
            rules=self.rules,
            leases=self.leases,
            audit=self.audit,
            sign=self.sign,
            asynchronous=self.asynchronous,
        )

    def _check_strategy(self, policy: Policy) -> None:
        """Refuse a policy and a filter that do not fit the wrapped strategy."""
        wrapped, filtered = self.wrapped, not isinstance(self.filter, KeepAll)
        if wrapped.sample_size("train", _MANY) == 0:
            raise ParameterError("The wrapped strategy has fraction_train=0, so there is nobody to choose.")
        if policy.max_update_norm is not None and wrapped.adds_trees:
            raise ParameterError(
                "The 'max_update_norm' parameter of CohortStrategy needs a model that keeps its shape; "
                f"{wrapped} adds trees.",
                hint="leave max_update_norm out",
            )
        private = wrapped.private_size
        if policy.late == "count" and (filtered or wrapped.adds_trees or private is not None):
            reason = f"{wrapped} adds {'trees' if wrapped.adds_trees else 'noise for a cohort'}"
            raise ParameterError(
                "The 'late' parameter of CohortStrategy must be 'discard': "
                f"{'a filter compares the models of a round' if filtered else reason}. Got 'count'.",
                hint="models of earlier rounds can be counted with a plain average or an optimiser of the server",
            )
        if private is None:
            return
        if policy.size not in (None, private):
            raise ParameterError(
                f"The size of the policy must be {private}: the privacy wrapper makes its noise for "
                f"num_sampled_clients={private}. Got {policy.size}.",
                hint="leave it out, or give the wrapper the same number",
            )
        if policy.spares:
            raise ParameterError(
                f"There must be no spares under differential privacy: exactly {private} clients train. "
                f"Got {policy.spares}.",
                hint="a client that fails is replaced in the next try of the round",
            )
        if filtered:
            raise ParameterError(
                f"A filter cannot be used under differential privacy: it leaves models out, and the noise is "
                f"calibrated for {private} of them.",
                hint="pass filter='keep-all'",
            )

    def _check_needs(self, validation: ServerValidation | None) -> None:
        """Refuse a selector or filter that needs what this server does not have."""
        if Need.LOGITS in self.filter.needs and validation is None:
            raise ParameterError(
                f"The filter {self.filter.name!r} judges models on the server's own data; 'validation' is missing.",
                hint="pass validation=ServerValidation(logits=..., labels=...)",
            )
        for signal in sorted(s for s in self.selector.requires if isinstance(s.how, OnServer)):
            needs = f"The selector {self.selector.name!r} needs the signal '{signal}' ({signal.meaning})"
            if not signal.unaided:
                raise ParameterError(
                    f"{needs}, which Flower does not supply.",
                    hint="use it in the simulator; 'fedcohort list selectors' names what each selector needs",
                )
            if validation is None:
                raise ParameterError(
                    f"{needs}; 'validation' is missing.",
                    hint="pass validation=ServerValidation(logits=..., labels=...)",
                )

    def more_settings(self) -> dict[str, Any]:
        """Return a subclass's additional settings for the journal."""
        return {}

    def _warn_of_bias(self) -> None:
        if self.selector.aggregator not in (None, "fedavg"):  # like Flower's strategies
            log.warning(
                "the selector %r is unbiased with the aggregator %r, which Flower does not have; the wrapped strategy "
                "averages by the weights of its clients, and the average may be biased",
                self.selector.name, self.selector.aggregator,
            )  # fmt: skip

    def summary(self) -> None:
        """Log the settings, then those of the wrapped strategy."""
        log.info("\t├──> Selection:")
        log.info("\t│\t├── Selector: %s (seed %d)", self.selector, self.seed)
        log.info("\t│\t├── Journal: %s", self.journal or "in memory")
        log.info("\t│\t└── Filter: %s", self.filter)
        self.strategy.summary()

    def start(  # the signature is Flower's
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Result:
        """Run the federation until ``num_rounds`` rounds are recorded; an existing journal is continued.

        Parameters
        ----------
        initial_arrays : ArrayRecord
            The first model; a journal with rounds continues from its own.
        num_rounds : int
            Number of rounds, including those of earlier runs with the same journal.
        timeout : float
            Seconds to wait for replies if there is no ``deadline``.
        train_config, evaluate_config : ConfigRecord, optional
            Sent to the clients.
        evaluate_fn : callable, optional
            Evaluates the global model at the server, before the first round and after each.
        should_stop : callable, optional
            ``should_stop(server_round, result)`` is called after each round; if it returns True, the run ends. Flower
            has it since 1.43; here it works with every release.
        """
        with also_log_to(self.json_log):
            log.info("Starting %s around %s:", type(self).__name__, self.wrapped)
            self.summary()
            everybody = self.wrapped.sample_size("train", _MANY) == _MANY
            if self.policy.size is None and everybody and self.selector.selects:
                log.warning(
                    "fraction_train=1.0 asks for every client, so there is nothing to choose: give a smaller fraction, "
                    "or Policy(size=...)"
                )
            run = self._run(
                grid,
                initial_arrays,
                num_rounds=num_rounds,
                timeout=timeout,
                train_config=train_config or ConfigRecord(),
                evaluate_config=evaluate_config or ConfigRecord(),
                evaluate_fn=evaluate_fn,
                should_stop=should_stop,
            )
            run.play()
            return run.result

    def _run(self, grid: Grid, arrays: ArrayRecord, **options: Any) -> FlowerRun:
        return FlowerRun(self, grid, arrays, **options)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse, because a choice needs the reports of earlier rounds, which only :meth:`start` has."""
        raise InnerStrategyError(
            "A CohortStrategy runs the rounds itself and cannot be wrapped by another strategy.",
            hint="put the other strategy inside: CohortStrategy(selector, strategy=...), and call its start()",
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate with the wrapped strategy."""
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure evaluation with the wrapped strategy."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Aggregate evaluation with the wrapped strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)


def _with_moved(policy: Policy, moved: Mapping[str, Any], stacklevel: int) -> Policy:
    """Return a policy with fields that were parameters of the strategy before 0.3."""
    if not moved:
        return policy
    renamed = {"size" if name == "cohort_size" else name: value for name, value in moved.items()}
    unknown = sorted(renamed.keys() - {field.name for field in fields(Policy)})
    if unknown:
        raise TypeError(f"CohortStrategy has no parameter {unknown[0]!r}.")
    values = ", ".join(f"{name}={value!r}" for name, value in renamed.items())
    warnings.warn(f"Pass policy=Policy({values}) of fedcohort.hosts.", FutureWarning, stacklevel=stacklevel)
    return replace(policy, **renamed)


def _check_kind(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ParameterError(
            f"The {name!r} parameter of CohortStrategy must be {kind.__name__}. Got {short_repr(value)}.",
            hint=f"pass {name}={kind.__name__}(...)",
        )


def create_part(parameter: str, value: T | str, kind: Any, registry: Registry[T]) -> T:
    """Return ``value``, or create it if it is a registered name."""
    if isinstance(value, str):
        return registry.create(value)
    if isinstance(value, kind):
        return cast(T, value)
    what = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r}"
    raise ParameterError(
        f"The {parameter!r} parameter of CohortStrategy must be a {kind.__name__} or its name. Got {what}.",
        hint=f"create an instance: {value.__name__}()" if isinstance(value, type) else None,
    )
