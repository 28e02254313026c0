"""``fedcohort flower``: apps for a live federation on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.templates import check_name, fill_template, write_app
from fedcohort.core.terminal import err, say
from fedcohort.core.version import __version__

flower_app = typer.Typer(help="Create apps for a live federation on Flower.", no_args_is_help=True)


@flower_app.command("new")
def _new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory for the app.")],
    selector: Annotated[
        str,
        typer.Option(
            "--selector",
            help="The selector; see 'fedcohort list'. The file of your own selector, file.py:Class, is copied.",
            autocompletion=options.complete_selector,
        ),
    ] = "power-of-choice",
    asynchronous: Annotated[
        bool, typer.Option("--async", help="Clients answer one by one, without rounds; the selector must allow it.")
    ] = False,
) -> None:
    """Write a complete Flower app with client selection.

    The app has a ServerApp, a ClientApp, a pyproject.toml and a README. It runs unchanged on scikit-learn's digits, in
    Flower's simulation and as a deployment.

    Example: fedcohort flower new my-app --selector fedcor
    """
    files = app_files(directory.resolve().name, selector, asynchronous)
    write_app(directory, files)
    say(err(), f"The app is complete. {directory / 'README.md'} says how to run it.")


_ROUNDS = {
    "strategy": "CohortStrategy",
    "settings": "        filter=plan.filter,\n",
    "size": "            size=plan.options.size,\n",
    "run": "rounds = 10\ncohort = 4\n",
}
_FLOW = {
    "strategy": "AsyncCohortStrategy",
    "size": "",
    "settings": "        busy=plan.options.size,\n        buffer=plan.options.buffer,\n"
    "        period=plan.options.period,\n        aggregator=plan.aggregator,\n",
    "run": 'mode = "async"\nrounds = 40  # global models\ncohort = 4  # clients at work at the same time\n'
    'buffer = 2  # answers that make a model\n\n[aggregator]\nname = "fedbuff"\n',
}


def app_files(name: str, selector: str, asynchronous: bool = False) -> dict[str, str]:
    """Return the files of an app called ``name``, as path -> text.

    Parameters
    ----------
    name : str
        Letters, digits, '-' and '_', beginning with a letter.
    selector : str
        A registered selector, ``module:Class``, or ``file.py:Class``, whose file becomes part of the app.
    asynchronous : bool
        Whether clients answer one by one.
    """
    from fedcohort import create
    from fedcohort.core.registry import is_reference
    from fedcohort.core.signals import SIGNALS, Signal
    from fedcohort.selectors import Uniform
    from fedcohort.session.validation import check_one_at_a_time

    package = name.replace("-", "_")
    check_name(name)
    chosen = create(selector)  # before anything is written: a typing error must leave no half of an app
    check_one_at_a_time(asynchronous, chosen)
    requires = chosen.requires
    scenario, answers, filter_ = "", "", ""
    if any(signal.held_out for signal in requires):
        scenario += "validation = 0.1\n"
        answers += "        validation=task.load_held_out,\n"
    if any(signal.pseudo for signal in requires):
        answers += "        robust=next(iter(task.plans().values())).local,\n"
    if Signal.KEPT in requires:
        scenario += "server_validation = 5\n"
        filter_ = f'\n[filter]\nname = "{chosen.default_filter}"\n'
    sections = {chosen.name: "", Uniform.name: ""}
    own_files: dict[str, str] = {}
    declares = ""  # clients must know the signals that the selector's file declares
    # The app must run on a machine that does not have the user's file.
    if is_reference(selector):
        place, _, cls = selector.rpartition(":")
        if place.endswith(".py"):
            inside = f"{package}/{Path(place).stem}_selector.py"
            own_files[inside] = Path(place).read_text(encoding="utf-8")
            selector = f"{inside}:{cls}"
            place = f"{package}.{Path(inside).stem}"
        if not requires <= frozenset(SIGNALS):
            declares = f"import {place}  # noqa: F401, it declares signals\n"
        sections[chosen.name] = f'\nname = "{selector}"'
    values = {
        "name": name,
        "version": __version__,
        "package": package,
        "selector": chosen.name,
        "classes": "10",
        "scenario": scenario,
        "answers": answers,
        "signals": declares,
        "filter": filter_,
        **(_FLOW if asynchronous else _ROUNDS),
        "selectors": "\n\n".join(f"[selectors.{label}]{lines}" for label, lines in sections.items()),
    }
    files = fill_template("flower", values)
    return {**own_files, **{path.replace("package/", f"{package}/"): text for path, text in files.items()}}
