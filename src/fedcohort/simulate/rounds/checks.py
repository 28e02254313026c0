"""What a run asks for and cannot have, refused before any long work starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcohort.core.errors import InputError, SignalError
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.core.registry import user_code_errors
from fedcohort.core.signals import QUERY_SIGNALS, TABLE_SIGNALS, OnServer, Signal, VectorOf
from fedcohort.core.text import short_repr
from fedcohort.scenario import Federation
from fedcohort.scenario.availability import Always, ClassBiased
from fedcohort.scenario.shift import RELABEL
from fedcohort.session.validation import check_one_at_a_time
from fedcohort.simulate.config.experiment import RunPlan
from fedcohort.training.filters import KeepAll, Need


def host_signals(federation: Federation, plan: RunPlan) -> frozenset[Signal]:
    """Return the signals that the simulator can supply to a run, in reports and as answers.

    These are fedcohort's own signals, and any other that says how it is computed. An asynchronous run has no cohorts to
    compare a client with, and no filter.
    """
    supplied = _computed()
    if plan.options.mode == "async":
        alone = (Signal.KEPT, Signal.TRIAL_QUERY)
        compared = {s for s in supplied if isinstance(s.how, VectorOf) and s.how.take.endswith("distance")}
        supplied -= compared.union(alone, (s for s in supplied if isinstance(s.how, OnServer)))
    if not len(federation.server_validation) or not plan.task.has_classes:
        supplied = frozenset(s for s in supplied if not isinstance(s.how, OnServer))
    if not plan.task.has_classes:
        supplied = frozenset(s for s in supplied if not _needs_classes(s))
    return supplied if federation.validation.any() else frozenset(s for s in supplied if not s.held_out)


def _computed() -> frozenset[Signal]:
    """Return the signals whose values the simulator can compute, in a round's report or as an answer."""
    return QUERY_SIGNALS | {s for s in Signal.all() if s.reported and (s.unaided or s.how is not None)}


def _needs_classes(signal: Signal) -> bool:
    return signal.pseudo or signal.width == "classes" or signal in (Signal.LABEL_COUNTS, Signal.LABEL_PRODUCTS)


def adapt_selector(plan: RunPlan, supplied: frozenset[Signal]) -> Selector[Any]:
    """Return a run's selector, adapted to the signals that are supplied."""
    name = SELECTORS.reference(type(plan.selector)) or plan.selector.name
    with user_code_errors(f"The selector {name!r} cannot adapt to the signals that are supplied", name):
        found: object = plan.selector.adapt(supplied)
    if not isinstance(found, Selector):
        raise InputError(
            f"The selector {name!r} must return a selector from adapt(), itself or another. Got {short_repr(found)}."
        )
    return found


def check_fits(plan: RunPlan) -> None:
    """Refuse a run whose parts need classes or a loss that its task does not have."""
    task, where = plan.task, f"the task {plan.task.name!r} of run {plan.id!r}"
    if plan.local.loss == "robust" and not task.fast:
        raise InputError(
            f"The robust loss needs a classifier's cross-entropies; {where} has the loss {task.loss!r}.",
            hint="leave out local.loss, or task.loss",
        )
    if task.has_classes:
        return
    scenario = plan.scenario
    parts = {
        f"The partition {scenario.partition.name!r} divides by class": scenario.partition.by_class,
        "Label noise changes classes": scenario.noise.changes,
        "The view 'relabel' changes classes": RELABEL in scenario.shift.views,
        "The availability 'class-biased' depends on classes": isinstance(scenario.availability, ClassBiased),
        f"The filter {plan.filter.name!r} judges predicted classes": Need.LOGITS in plan.filter.needs,
        f"The aggregator {plan.aggregator.name!r} learns from predicted classes": plan.aggregator.needs_server,
        f"The label sharing {plan.labels.name!r} is about classes": plan.labels.name not in ("counts", "none"),
    }
    for what, needed in parts.items():
        if needed:
            raise InputError(
                f"{what}, and {where} predicts {task.predicts}.",
                hint="partitions without classes are 'iid', 'natural' and 'custom'" if "partition" in what else None,
            )
    # Sizes are known without labels.
    supplied = frozenset(s for s in _computed() if not _needs_classes(s)) | {Signal.SIZES}
    for signal in sorted(adapt_selector(plan, supplied).requires):
        if _needs_classes(signal):
            raise SignalError(
                f"The selector {plan.selector.name!r} of run {plan.id!r} requires the signal '{signal}' "
                f"({signal.meaning}), which the task {task.name!r} does not supply: it predicts {task.predicts}.",
                hint="choose a selector that needs no labels; 'fedcohort list selectors' names what each needs",
            )


def check_plan(plan: RunPlan, federation: Federation) -> None:
    """Refuse a run whose parts do not go together, or need more than its federation has."""
    options, scenario, size = plan.options, plan.scenario, plan.options.size
    supplied = TABLE_SIGNALS | host_signals(federation, plan)
    for signal in sorted(adapt_selector(plan, supplied).requires):
        if signal.reported and signal not in _computed():
            raise SignalError(
                f"The selector {plan.selector.name!r} of run {plan.id!r} requires the signal '{signal}' "
                f"({signal.meaning}), which the simulator cannot compute.",
                hint="declare it with how=LossOf(...), VectorOf(...) or OnServer(...); if only a client can measure "
                "it, run the selector on Flower, on FLARE or in your own loop",
            )
    # A smaller cohort than configured would be another experiment.
    if size is not None and size > len(federation):
        raise InputError(
            f"The cohort of run {plan.id!r} is {size} clients, its federation has {len(federation)}.",
            hint='lower run.cohort, or set it to "all"',
        )
    if options.deadline is not None and scenario.deadline is not None:
        raise InputError(
            f"Run {plan.id!r} has two deadlines: run.deadline is {options.deadline!r}, scenario.deadline is "
            f"{scenario.deadline:g} s.",
            hint="leave one of them out",
        )
    if options.late == "count":
        why = {
            f"the filter {plan.filter.name!r} compares the models of a round": not isinstance(plan.filter, KeepAll),
            **_of_aggregator(plan),
            f"the aggregator {plan.aggregator.name!r} needs what clients report": bool(plan.aggregator.requires),
        }
        _refuse(plan, "cannot count late models: ", why, 'set run.late to "discard"')
    if plan.rules is not None and size is not None:
        plan.rules.check_feasible(federation.names, size, options.rounds)
        # Rules that only fail in the last rounds are found now, too, and not after hours.
        short = plan.rules.shortages(dict.fromkeys(federation.names, 0), size, options.rounds)
        if short:
            raise InputError(
                f"The rules of run {plan.id!r} cannot be kept: {short[0]}.",
                hint="change [rules], run.rounds or run.cohort",
            )
    if not federation.validation.any():
        hint = "set scenario.validation, for example to 0.1"
        for signal in sorted(plan.selector.requires):
            if signal.held_out:
                raise SignalError(
                    f"The selector of run {plan.id!r} requires the signal '{signal}', but the clients hold out no "
                    "data.",
                    hint=hint,
                )
        why = {"watches validation losses, but the clients hold out no data": options.patience is not None}
        _refuse(plan, "", why, hint)
    if not len(federation.server_validation):
        aggregator = plan.aggregator
        why = {
            f"the filter {plan.filter.name!r} validates models on them": Need.LOGITS in plan.filter.needs,
            f"the aggregator {aggregator.name!r} computes on them": aggregator.needs_server
            and aggregator.public is None,
        }
        hint = "set scenario.server_validation, the number of samples of each class to keep there"
        _refuse(plan, "needs samples at the server, which holds none: ", why, hint)
    if options.mode == "async":
        check_one_at_a_time(True, plan.selector)
        why = {
            'run.cohort is "all"; it is how many clients work at the same time': size is None,
            "run.patience watches rounds": options.patience is not None,
            "run.spares belong to rounds": options.spares > 0,
            "scenario.deadline closes rounds": scenario.deadline is not None,
            "run.deadline closes rounds": options.deadline is not None,
            "run.late is about rounds": options.late != "discard",
            f"the availability {scenario.availability.name!r} is a function of the round": not isinstance(
                scenario.availability, Always
            ),
            f"the filter {plan.filter.name!r} judges the models of a round": not isinstance(plan.filter, KeepAll),
            **_of_aggregator(plan),
        }
        hint = 'set run.mode to "sync", or leave that out; [scenario.devices] says which clients are online when'
        _refuse(plan, "is asynchronous, and ", why, hint)


def _of_aggregator(plan: RunPlan) -> dict[str, bool]:
    """Return why an aggregator needs all models of a round at once."""
    aggregator = plan.aggregator
    changes = aggregator.corrects or aggregator.own_models or aggregator.needs_gradients
    return {f"the aggregator {aggregator.name!r} changes local training by what it remembers": changes}


def _refuse(plan: RunPlan, what: str, reasons: Mapping[str, bool], hint: str) -> None:
    """Raise an error with the first of the reasons that applies."""
    for reason, applies in reasons.items():
        if applies:
            raise InputError(f"Run {plan.id!r} {what}{reason}.", hint=hint)
