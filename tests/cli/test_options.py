"""An option means the same in all commands that have it."""

import typer
from typer.testing import CliRunner

from fedcohort.cli.app import app

COMMANDS = typer.main.get_command(app).commands
EXPERIMENT = [
    "baseline",
    "sweep",
    "set_",
    "out",
    "device",
    "processes",
    "engine",
    "address",
    "track",
    "columns",
    "wide",
    "quiet",
    "format",
]


def option(command, name):
    """Return everything a user sees of an option."""
    found = next(item for item in COMMANDS[command].params if item.name == name)
    kind = getattr(found, "type", None)  # newer releases of typer do not show it
    return found.opts, found.help, found.metavar, found.multiple, found.default, kind and kind.to_info_dict()


def test_run_and_compare_share_the_options_of_an_experiment():
    ours = [item.name for item in COMMANDS["run"].params]
    theirs = [item.name for item in COMMANDS["compare"].params]
    assert [name for name in ours if name in theirs] == ["config", *EXPERIMENT]
    for name in EXPERIMENT:
        assert option("run", name) == option("compare", name)


def test_compare_and_analytics_share_their_first_options():
    for name in ("data", "folder", "set_", "device", "quiet", "format"):
        assert option("compare", name) == option("analytics", name)
    helps = {next(item for item in COMMANDS[c].params if item.name == "config").help for c in ("compare", "analytics")}
    assert len(helps) == 1


def test_format_and_quiet_mean_the_same_everywhere():
    for name in ("format", "quiet"):
        having = [command for command, made in COMMANDS.items() if name in [item.name for item in made.params]]
        assert len(having) >= 5
        assert all(option(command, name) == option("run", name) for command in having)


def test_the_help_of_compare_fits_one_screen():
    shown = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "80"}).stdout.splitlines()
    assert len(shown) <= 45 and max(map(len, shown)) <= 80


def test_operators_commands_are_in_two_groups():
    whole = typer.main.get_command(app)
    assert {"audit", "rules", "verify", "forget"} <= set(whole.commands["journal"].commands)
    assert set(whole.commands["privacy"].commands) == {"keyholder"}
    assert not {"audit", "rules", "keyholder"} & set(whole.commands)


def test_the_help_prints_brackets_and_fills_the_lines_of_a_paragraph():
    shown = CliRunner().invoke(app, ["scenario", "show", "--help"], env={"COLUMNS": "120"}).stdout
    assert "[scenario.devices]" in shown
    demo = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "80"}).stdout.splitlines()
    first = next(i for i, line in enumerate(demo) if "The demo has two" in line)
    assert all(len(line.rstrip()) > 60 for line in demo[first : first + 3])
