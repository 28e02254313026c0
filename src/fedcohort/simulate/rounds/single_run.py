"""One run on a configuration's federation, to learn something about the federation instead of comparing selectors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fedcohort.scenario import Federation
from fedcohort.simulate.config.experiment import Experiment, RunPlan
from fedcohort.simulate.rounds.group import Group, OnRound
from fedcohort.simulate.rounds.prepare import prepare

_SECTIONS = ("data", "scenario", "model", "local", "run")
_OF_COMPARISONS = ("baseline", "reference", "patience", "targets")


@contextmanager
def open_run(
    table: Mapping[str, Any],
    selectors: Mapping[str, Any],
    device: str | None,
    adjust_plan: Callable[[RunPlan, Federation], RunPlan] = lambda plan, federation: plan,
) -> Iterator[Group]:
    """Yield the group of a single run before its first round; it is closed afterwards.

    Parameters
    ----------
    table : mapping
        A configuration; its data, scenario, model, local training, cohort and first seed are used.
    selectors : mapping
        The section of that name, with one entry.
    adjust_plan : function
        Given the configured plan and the federation, returns the plan to play.
    """
    config = copy.deepcopy({key: value for key, value in table.items() if key in _SECTIONS})
    seeds = table.get("seeds", [0])
    config |= {"selectors": dict(selectors), "seeds": seeds[:1] if isinstance(seeds, list) else [0]}
    given = config.get("run", {})
    if isinstance(given, Mapping):  # anything else is refused with the other mistakes of the configuration
        config["run"] = {key: value for key, value in given.items() if key not in _OF_COMPARISONS}
        config["run"]["eval_every"] = 10**9
    prepared = prepare(Experiment.from_dict(config), device)
    (plan,) = prepared.experiment.plans
    plan = adjust_plan(plan, prepared.federations[prepared.federation_keys[0]])
    prepared = replace(prepared, experiment=replace(prepared.experiment, plans=(plan,)))
    group = prepared.group(0, journals=None, device=device or plan.options.device, workers=plan.options.workers)
    try:
        yield group
    finally:
        group.close()


@contextmanager
def play_run(
    table: Mapping[str, Any],
    selectors: Mapping[str, Any],
    adjust_plan: Callable[[RunPlan, Federation], RunPlan],
    *,
    device: str | None,
    on_start: Callable[[int], None] | None,
    on_round: OnRound | None,
) -> Iterator[Group]:
    """Play the run of :func:`open_run` to its end and yield its group.

    Parameters
    ----------
    on_start : callable or None
        Called with the number of rounds, before the first one.
    on_round : callable or None
        Called after every round, as in :meth:`fedcohort.simulate.rounds.group.Group.step`.
    """
    with open_run(table, selectors, device, adjust_plan) as group:
        group.start()
        if on_start is not None:
            on_start(group.runs[0].plan.options.rounds)
        while not group.done:
            group.step(on_round)
        yield group
