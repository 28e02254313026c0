"""An error in a run's own parts ends that run and no other, and the message names the part.

A selector, filter or aggregator belongs to one run. A user's own model, loss or metric belongs to all runs of a group.
Only what their own code raises, or returns and we refuse, is their failure. Any other error is a bug of ours and ends
the experiment as itself. Errors of the disk or the machine end the experiment too, and it can be continued.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fedcohort.core.errors import DeviceError, FedcohortError, JournalError, SelectorError
from fedcohort.core.registry import is_reference
from fedcohort.core.text import error_place, error_text
from fedcohort.simulate.own_code import OwnCodeError
from fedcohort.simulate.store.parts import ResultsError

if TYPE_CHECKING:
    from fedcohort.simulate.config.experiment import RunPlan
    from fedcohort.simulate.rounds.run import Run

log = logging.getLogger(__name__)
T = TypeVar("T")
_FAMILIAR = frozenset({"fedcohort", "numpy", "scipy", "sklearn", "torch", "pyarrow"})
_INFRASTRUCTURE = (JournalError, ResultsError, DeviceError, MemoryError, torch.cuda.OutOfMemoryError)


def isolate_failure(run: Run, part: str, work: Callable[..., T], *arguments: Any) -> T | None:
    """Call the own code of a filter or an aggregator. If it raises, the run has failed, and None is returned.

    Parameters
    ----------
    part : str
        Whose code this is, for example "the filter 'mine.py:Strict'".
    work : function
        Calls that code, checks what it returns, and does nothing else.
    """
    try:
        return work(*arguments)
    except OwnCodeError:  # an aggregator may use the model, which all runs of the group share
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything, and may call sys.exit
        fail(run, part, error)
    return None


@contextmanager
def selector_errors(run: Run) -> Iterator[None]:
    """End a run if its selector raises an error, or returns something that the session refuses."""
    try:
        yield
    except SelectorError as error:
        fail(run, f"the selector {run.plan.selector.name!r}", error.__cause__ or error)


def fail(run: Run, part: str, error: BaseException) -> None:
    """End a run because one of its parts raised; an error of the disk or the machine is raised again."""
    if isinstance(error, _INFRASTRUCTURE):
        # Own code may run out of memory by a mistake of its own: then one frame is neither ours nor a library's.
        frames = traceback.walk_tb(error.__traceback__)
        modules = {str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames}
        if not isinstance(error, MemoryError) or modules <= _FAMILIAR | sys.stdlib_module_names:
            raise error
    text = error.message if isinstance(error, FedcohortError) else error_text(error)
    run.end("failed", f"{part} raised an error in round {run.round}: {text.rstrip('.')}{error_place(error)}")
    # The reason names the line; the results and the end of every command say it once for all runs that share it.
    log.info("run %s failed: %s", run.plan.id, run.reason, exc_info=error)


def own_parts(plan: RunPlan) -> str | None:
    """Return in words which of the user's own parts all runs of a group share; None if there are none."""
    task = plan.task
    named = {"model": plan.model.name, "loss": task.loss, "metric": task.metric, "task": task.name}
    user_parts = [f"the {kind} {name!r}" for kind, name in named.items() if is_reference(str(name))]
    return " or ".join(user_parts) or None
