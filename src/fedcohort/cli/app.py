"""The ``fedcohort`` command: register the subcommands and turn errors into messages."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer

# Commands import what they need when they run: torch alone takes seconds, and --help must not wait for it.
from fedcohort.cli.advice import advise, twin
from fedcohort.cli.analytics import analytics
from fedcohort.cli.audit import audit
from fedcohort.cli.check import check
from fedcohort.cli.compare import compare
from fedcohort.cli.dashboard import dashboard
from fedcohort.cli.demo import demo
from fedcohort.cli.doctor import doctor
from fedcohort.cli.explain import explain
from fedcohort.cli.extend import extend
from fedcohort.cli.flare import flare_app
from fedcohort.cli.flower import flower_app
from fedcohort.cli.init import init
from fedcohort.cli.journal import journal_app
from fedcohort.cli.keyholder import privacy_app
from fedcohort.cli.list import list_
from fedcohort.cli.output import print_error
from fedcohort.cli.plugins import RootGroup
from fedcohort.cli.report import report
from fedcohort.cli.rules import rules_app
from fedcohort.cli.run import run
from fedcohort.cli.scenario import scenario_app
from fedcohort.core.errors import FedcohortError, MissingExtraError
from fedcohort.core.text import OneLine
from fedcohort.core.version import __version__

app = typer.Typer(
    name="fedcohort",
    cls=RootGroup,
    help="Choose which clients train in each round of federated learning, and show why.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph, and prints [brackets] as they are
    suggest_commands=False,  # click does
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The base of every error about usage. It is click's, or that of the copy of click that newer releases of typer carry.
_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[2]

_ONE_LINE = OneLine()  # one for all calls, because a handler keeps every filter it is given

# The extra that installs each optional module.
EXTRAS = {
    "cryptography": "keyholder",
    "fastapi": "report",
    "flwr": "flower",
    "nvflare": "nvflare",
    "pandas": "notebook",
    "pyarrow": "sim",
    "ray": "ray",
    "safetensors": "flower",
    "sklearn": "sim",
    "starlette": "keyholder",
    "torch": "sim",
    "uvicorn": "report",
}


def _version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show debug messages and tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Choose which clients train in each round of federated learning, and show why."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(_ONE_LINE)


# In the order of '--help': a newcomer's commands come first, an operator's last.
_PANELS = {
    "Compare selectors": (demo, compare),
    "Experiments": (init, run, extend, doctor),
    "Results": (report, explain, dashboard),
    "Selectors and federations": (list_, check, analytics, twin, advise),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(_command.__name__.rstrip("_"), rich_help_panel=_panel)(_command)
app.add_typer(scenario_app, name="scenario", rich_help_panel="Selectors and federations")
journal_app.command("audit")(audit)
journal_app.add_typer(rules_app, name="rules")
for _name, _group in {"flower": flower_app, "flare": flare_app, "journal": journal_app, "privacy": privacy_app}.items():
    app.add_typer(_group, name=_name, rich_help_panel="Live federations")


def main() -> None:
    """Run the command line and exit: 0 done, 1 error, 2 wrong usage, 3 done with remarks, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
    except _USAGE_ERROR as error:
        error.show()
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        sys.stderr.close()  # otherwise Python complains at exit that it cannot flush it
        sys.exit(0)
    except (FedcohortError, ModuleNotFoundError, OSError) as error:
        message = _message(error)
        if message is None or "--debug" in sys.argv:
            raise
        print_error(message)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _message(error: Exception) -> FedcohortError | None:
    """Return the error to show to the user, or None for a bug, whose traceback is shown."""
    if isinstance(error, FedcohortError):
        return error
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:  # one of ours, or of the user's selector: a traceback says more than we could
            return None
        return MissingExtraError(
            f"This needs {module}, which is not installed.", hint=f"pip install 'fedcohort[{EXTRAS[module]}]'"
        )
    # Only what names a file: an OSError of a socket or a pipe is a bug of ours to look at.
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return FedcohortError(f"{error.filename}: {error.strerror}.")
    return None


if __name__ == "__main__":
    main()
