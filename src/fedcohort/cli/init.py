"""``fedcohort init``: a commented experiment.toml to start from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.cli.options import DataOption, complete_preset, complete_selectors
from fedcohort.cli.output import out
from fedcohort.core.errors import InputError
from fedcohort.core.files import write_file
from fedcohort.core.terminal import err, say
from fedcohort.core.text import printable

if TYPE_CHECKING:
    from fedcohort.core.params import ParameterInfo
    from fedcohort.core.protocol import Selector


def init(
    preset: Annotated[
        str, typer.Argument(help="A preset; see 'fedcohort list presets'.", autocompletion=complete_preset)
    ] = "fedcor-2spc",
    data: DataOption = None,
    selectors: Annotated[
        str,
        typer.Option(
            "--selectors", help="Names separated by commas; also file.py:Class.", autocompletion=complete_selectors
        ),
    ] = "uniform,fedcor",
    out_: Annotated[
        Path, typer.Option("--out", "-o", help="The file to write; it must not exist yet.", dir_okay=False)
    ] = Path("experiment.toml"),
) -> None:
    """Write a commented experiment.toml to start from.

    It holds a paper's federation and training, and the selectors with all their parameters.

    Example: fedcohort init fedcor-1spc --data fashion-mnist --selectors uniform,fedcor,fedcbs
    """
    text = config_text(preset, data or "digits", [name.strip() for name in selectors.split(",") if name.strip()], out_)
    if out_.exists():
        raise InputError(f"{out_} already exists.", hint="name another file with --out")
    out_.parent.mkdir(parents=True, exist_ok=True)
    write_file(out_, text.encode())
    say(out(), str(out_))
    say(err(), f"Run it with: fedcohort run {out_}")


def config_text(name: str, data: str, selectors: list[str], file: Path) -> str:
    """Return the text of a complete and checked configuration, with the meaning of every key."""
    from fedcohort.scenario.presets import find_preset, preset_table
    from fedcohort.simulate.comparison import supply_held_out_data
    from fedcohort.simulate.config.experiment import Configuration, Experiment
    from fedcohort.simulate.config.sections import RunOptions
    from fedcohort.simulate.config.selectors import selector_entries
    from fedcohort.simulate.data import DATASETS
    from fedcohort.training.local import LocalTraining

    preset = find_preset(name)
    if not selectors:
        raise InputError("An experiment needs at least one selector.", hint="--selectors uniform,fedcor")
    described = {**preset_table(name, data), "name": file.stem, "selectors": selector_entries(selectors)}
    configuration, changes = supply_held_out_data(Configuration.of(described))
    experiment, table = configuration.experiment(), configuration.table
    training = preset.training_on(data)
    lines = [
        f"# {name}: {preset.meaning} ({preset.source}).",
        f"# Written by 'fedcohort init {name}'; run it with: fedcohort run {printable(file.name)}",
        "# Lines that begin with '#' show other options with their defaults.",
        f"name = {_toml(file.stem)}",
        "seeds = [0, 1, 2, 3, 4]           # one run per seed and selector",
        "",
        "[data]",
        f'name = "{data}"{_note("one of " + ", ".join(DATASETS.names()))}',
        '# folder = "..."                  # where the files are, if not in the usual places',
        "",
        *[f"# {text[0].upper()}{text[1:]}." for text in changes],
        "[scenario]",
        f'preset = "{name}"',
        *[f"{key} = {_toml(value)}" for key, value in table["scenario"].items() if key != "preset"],
        *[f"#   {line}" for line in preset.scenario.describe().splitlines()],
        "",
        "[model]",
        'name = "mlp"                      # see: fedcohort list models',
        "",
    ]
    if training.ours:
        lines.append(f"# Not in the paper but our choice: {', '.join(training.ours)}.")
    lines += _section("local", LocalTraining, table["local"])
    if "aggregator" in table:
        lines += ["[aggregator]", f'name = "{table["aggregator"]["name"]}"', ""]
    else:
        lines += [f"# [aggregator]{_note('see: fedcohort list aggregators')}", f'# name = "{training.aggregator}"', ""]
    lines += _section("run", RunOptions, table["run"])
    for plan in {plan.label: plan for plan in experiment.plans}.values():
        lines += _selector(plan.label, plan.selector, experiment.table["selectors"][plan.label])
    text = "\n".join(lines).rstrip() + "\n"
    Experiment.from_dict(tomllib.loads(text))  # what we write must be what we read
    return text


def _note(text: str) -> str:
    return f"  # {text}" if text else ""


def _toml(value: Any) -> str:
    from fedcohort.simulate.config.toml import to_toml

    return to_toml({"value": value}).removeprefix("value = ").strip()


def _commented(info: ParameterInfo) -> str:
    """Return a parameter with its default and meaning, as a comment."""
    default = "..." if info.default is None else _toml(info.default)
    return f"# {info.name} = {default}{_note(info.meaning)}"


def _section(name: str, kind: type[Any], values: Mapping[str, Any]) -> list[str]:
    """Return a section: the keys in ``values``, then all others as comments, each with its meaning."""
    from fedcohort.core.params import parameters
    from fedcohort.simulate.config.toml import LENGTHS

    lines, others = [f"[{name}]"], []
    for info in parameters(kind):
        if info.name in values:
            lines.append(f"{info.name} = {_toml(values[info.name])}{_note(info.meaning)}")
        elif name == "local" and info.name in LENGTHS:
            others.append(f"# {info.name} = ...{_note(f'{info.meaning}; in place of the length above')}")
        else:
            others.append(_commented(info))
    return [*lines, *others, ""]


def _selector(label: str, selector: Selector[Any], entry: Mapping[str, Any]) -> list[str]:
    """Return the section of a selector, with its parameters as comments."""
    from fedcohort.core.params import parameters
    from fedcohort.simulate.config.toml import to_toml

    head = to_toml({"selectors": {label: {"x": 0}}}).splitlines()[0]
    lines = [head, *([f"name = {_toml(entry['name'])}"] if entry["name"] != label else [])]
    reasons = {"filter": "the selector learns from which models are kept", "aggregator": "makes the selector unbiased"}
    for section, reason in reasons.items():
        if section in entry:
            lines.append(f"{section} = {{name = {_toml(entry[section]['name'])}}}{_note(reason)}")
    return [*lines, *map(_commented, parameters(type(selector))), ""]
