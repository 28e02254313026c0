"""``fedcohort init``: a commented experiment.toml to start from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.output import out
from fedcohort.core.errors import InputError
from fedcohort.core.files import write_file
from fedcohort.core.terminal import err, say


def init(
    preset: Annotated[
        str, typer.Argument(help="A preset; see 'fedcohort list presets'.", autocompletion=options.complete_preset)
    ] = "fedcor-2spc",
    data: options.DataOption = None,
    selectors: Annotated[
        str,
        typer.Option(
            "--selectors",
            help="Names separated by commas; also file.py:Class.",
            autocompletion=options.complete_selectors,
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
    from fedcohort.core.params import parameters
    from fedcohort.report.render import text
    from fedcohort.scenario.presets import find_preset, preset_table
    from fedcohort.simulate.comparison import supply_held_out_data
    from fedcohort.simulate.config.experiment import Configuration, Experiment
    from fedcohort.simulate.config.sections import RunOptions
    from fedcohort.simulate.config.selectors import selector_entries
    from fedcohort.simulate.config.toml import LENGTHS, to_toml
    from fedcohort.simulate.data import DATASETS
    from fedcohort.training.local import LocalTraining

    preset = find_preset(name)
    if not selectors:
        raise InputError("An experiment needs at least one selector.", hint="--selectors uniform,fedcor")
    described = {**preset_table(name, data), "name": file.stem, "selectors": selector_entries(selectors)}
    configuration, changes = supply_held_out_data(Configuration.of(described))
    experiment = configuration.experiment()
    entries = experiment.table["selectors"]
    classes = {plan.label: type(plan.selector) for plan in experiment.plans}
    written = text(
        "experiment.toml",
        name=name,
        data=data,
        file=file,
        preset=preset,
        training=preset.training_on(data),
        changes=changes,
        table=configuration.table,
        datasets=DATASETS.names(),
        parameters={"local": parameters(LocalTraining), "run": parameters(RunOptions)},
        lengths=LENGTHS,
        selectors={label: (parameters(cls), entries[label]) for label, cls in classes.items()},
        heads={label: to_toml({"selectors": {label: {"x": 0}}}).splitlines()[0] for label in classes},
        toml=lambda value: to_toml({"value": value}).removeprefix("value = ").strip(),
    )
    written = written.rstrip() + "\n"
    Experiment.from_dict(tomllib.loads(written))  # what we write must be what we read
    return written
