"""Try a user's own selectors for a few rounds without training, before anything is written.

A mistake in them is then one sentence with the line in their file, instead of a failed run for every seed and setting.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path

from fedcohort.core.errors import SelectorError
from fedcohort.core.protocol import SELECTORS
from fedcohort.core.registry import is_reference
from fedcohort.core.text import error_place
from fedcohort.session.session import Session
from fedcohort.simulate.rounds.checks import adapt_selector
from fedcohort.simulate.rounds.prepare import PreparedExperiment
from fedcohort.simulate.rounds.run import FederationContext
from fedcohort.testing import ScriptedHost

_ROUNDS = 3  # the third chooses with what two updates have learned
_EVENTS = 12  # of an asynchronous session: four clients at work, three replies, a model, and some of the next


def try_selectors(prepared: PreparedExperiment, known: Collection[str] = ()) -> None:
    """Play a few rounds with each selector that is not part of fedcohort; raise its first error.

    Runs in ``known`` have begun already, so their selectors are not tried. Clients, sizes and labels are those of the
    experiment, because a selector may be made for them; what clients report is made up.
    """
    tried: set[tuple[type, str]] = set()
    experiment = prepared.experiment
    for plan, data, key in zip(experiment.plans, prepared.data_keys, prepared.federation_keys, strict=True):
        cls = type(plan.selector)
        what = (cls, repr(plan.selector))
        ours = cls.__module__.partition(".")[0] in ("fedcohort", "fedcohort_bench")
        if ours or what in tried or plan.id in known:
            continue
        tried.add(what)
        federation = prepared.federations[key]
        table = FederationContext(federation, has_classes=plan.task.has_classes).table(plan.labels, plan.seed)
        host = ScriptedHost(len(federation), classes=prepared.datasets[data].outputs)
        asynchronous = plan.options.mode == "async"
        try:
            selector = adapt_selector(plan, table.signals | host.signals)
            session = Session(selector, table, signals=host.signals, asynchronous=asynchronous)
            if asynchronous:
                host.play_one_by_one([session].pop, _EVENTS)  # which closes it
            else:
                with closing(session):
                    host.play(session, _ROUNDS, plan.options.size)
        except SelectorError as error:
            name = SELECTORS.reference(cls) or plan.selector.name
            place = "" if error_place(error.__cause__ or error) else _place(cls)
            raise SelectorError(
                f"{error.message.rstrip('.')}{place}. Nothing was run.",
                hint=error.hint or (f"'fedcohort check {name}' tries it in more ways" if is_reference(name) else None),
            ) from error.__cause__


def _place(cls: type) -> str:
    """Return where a class begins, for an error that no line of its own raised, such as a missing argument."""
    with suppress(OSError, TypeError):
        return f" ({Path(inspect.getfile(cls)).name}, line {inspect.getsourcelines(cls)[1]})"
    return ""
