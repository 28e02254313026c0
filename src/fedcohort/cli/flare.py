"""``fedcohort flare``: jobs for a live federation on NVIDIA FLARE."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.templates import check_name, fill_template, write_app
from fedcohort.core.errors import InputError
from fedcohort.core.terminal import err, say
from fedcohort.core.version import __version__

flare_app = typer.Typer(help="Create jobs for a live federation on NVIDIA FLARE.", no_args_is_help=True)


@flare_app.command("new")
def _new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory for the job.")],
    selector: Annotated[
        str,
        typer.Option(
            "--selector", help="The selector; see 'fedcohort list'.", autocompletion=options.complete_selector
        ),
    ] = "power-of-choice",
) -> None:
    """Write a complete FLARE job with client selection.

    The job has a workflow for the server, a training script for the sites and a README. It runs unchanged on
    scikit-learn's digits, in FLARE's simulator and on a FLARE federation.

    Example: fedcohort flare new my-job --selector active-fl
    """
    files = job_files(directory.resolve().name, selector)
    write_app(directory, files)
    say(err(), f"The job is complete. {directory / 'README.md'} says how to run it.")


def job_files(name: str, selector: str) -> dict[str, str]:
    """Return the files of a job called ``name``, as path -> text.

    Parameters
    ----------
    name : str
        Letters, digits, '-' and '_', beginning with a letter.
    selector : str
        A registered selector.
    """
    from fedcohort import create
    from fedcohort.core.registry import is_reference
    from fedcohort.core.signals import OnServer, Signal
    from fedcohort.selectors import Uniform

    check_name(name)
    if is_reference(selector):
        raise InputError(
            f"'flare new' needs one of fedcohort's own selectors. Got {selector!r}.",
            hint="create the job with one of them, then name module:Class in experiment.toml and put the module "
            "next to job.py",
        )
    chosen = create(selector)
    if any(signal == Signal.KEPT or isinstance(signal.how, OnServer) for signal in chosen.requires):
        raise InputError(
            f"The selector {selector!r} judges models on data at the server, which a FLARE job does not have.",
            hint="choose another selector, or use Flower: fedcohort flower new",
        )
    scenario, answers = "", ""
    if any(signal.held_out for signal in chosen.requires):
        scenario += "validation = 0.1\n"
        answers += "        validation=partial(task.load_held_out, site),\n"
    if any(signal.pseudo for signal in chosen.requires):
        answers += "        robust=task.plan().local,\n"
    values = {
        "name": name,
        "version": __version__,
        "selector": chosen.name,
        "classes": "10",
        "scenario": scenario,
        "answers": answers,
        "selectors": "\n\n".join(f"[selectors.{label}]" for label in dict.fromkeys([chosen.name, Uniform.name])),
    }
    return fill_template("flare", values)
