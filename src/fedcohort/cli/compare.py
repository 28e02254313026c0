"""``fedcohort compare``: several selectors, several seeds, one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fedcohort.cli.experiment import launch
from fedcohort.cli.options import (
    AddressOption,
    BaseArgument,
    DataOption,
    DeviceOption,
    EngineOption,
    FolderOption,
    FormatOption,
    OutOption,
    QuietOption,
    SetOption,
    TrackOption,
)
from fedcohort.cli.output import Format, err

_FILTERED = ("fedcm-ucb", "fedcm-ts")  # their reward is that the filter kept a model


def _listed(text: str, what: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise typer.BadParameter(f"{what} must be names separated by commas. Got {text!r}.")
    return items


def _seeds(text: str) -> list[int] | int:
    try:
        return [int(item) for item in text.split(",")] if "," in text else int(text)
    except ValueError:
        raise typer.BadParameter(f"--seeds is how many, or a list such as 1,5,7. Got {text!r}.") from None


def selectors_table(names: list[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the [selectors] of these names: as the configuration has them, or with default parameters.

    FedCM learns from which models the FedCA filter kept, so it comes with that filter.
    """
    chosen: dict[str, Any] = {}
    for name in names:
        given = known.get(name)
        chosen[name] = dict(given) if isinstance(given, Mapping) else {}
        if given is None and name in _FILTERED:
            chosen[name] = {"filter": {"name": "fedca"}}
    return chosen


def supply(table: dict[str, Any]) -> list[str]:
    """Give all selectors the data that one of them needs, so that the comparison stays fair; say what was changed."""
    from fedcohort.filters import Need
    from fedcohort.simulate.config import Experiment

    experiment = Experiment.from_dict(table)
    said: list[str] = []
    scenario = table.get("scenario", {})
    if isinstance(scenario, str):
        scenario = table["scenario"] = {"preset": scenario}
    plans = experiment.plans
    validating = [p.label for p in plans if not p.scenario.validation and any(s.held_out for s in p.selector.requires)]
    if validating:
        table.setdefault("scenario", scenario)["validation"] = 0.1
        said.append(f"every client holds out 10% of its data, because {validating[0]} needs validation losses")
    at_server = [p.label for p in plans if Need.LOGITS in p.filter.needs and not p.scenario.server_validation]
    if at_server:
        table.setdefault("scenario", scenario)["server_validation"] = 20
        said.append(f"the server keeps 20 samples of each class, because the filter of {at_server[0]} needs them")
    return said


def compare(
    config: BaseArgument = None,
    selectors: Annotated[
        str | None, typer.Option("--selectors", help="Names separated by commas, e.g. uniform,fedcor,fedcbs.")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="How many seeds, or a list such as 1,5,7.")] = None,
    data: DataOption = None,
    folder: FolderOption = None,
    scenario: Annotated[str | None, typer.Option("--scenario", help="A preset, e.g. fedcor-1spc.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model, e.g. mlp, logistic, lenet.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds of training.")] = None,
    cohort: Annotated[int | None, typer.Option("--cohort", min=1, help="Clients per round.")] = None,
    targets: Annotated[str | None, typer.Option("--targets", help="Accuracies, e.g. 0.6,0.7.")] = None,
    set_: SetOption = None,
    out: OutOption = None,
    device: DeviceOption = None,
    engine: EngineOption = None,
    address: AddressOption = None,
    track: TrackOption = None,
    quiet: QuietOption = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare selectors on the same federation, with the same seeds, every question to a client paid for.

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 some run diverged, 130 interrupted (a checkpoint is written).

    Examples: fedcohort compare; fedcohort compare --selectors uniform,fedcor --seeds 5 --scenario fedcor-1spc
    """
    from fedcohort.simulate.config import Experiment
    from fedcohort.simulate.tables import find_table, merged, override

    table = find_table(config or "demo")
    changes: dict[str, Any] = {}
    if data is not None:
        changes["data"] = {"name": data}
    if folder is not None:
        changes.setdefault("data", {})["folder"] = folder
    if scenario is not None:
        changes["scenario"] = {"preset": scenario}
    if model is not None:
        changes["model"] = {"name": model}
    options = {"rounds": rounds, "cohort": cohort, "engine": engine}
    if targets is not None:
        try:
            options["targets"] = [float(item) for item in _listed(targets, "--targets")]  # type: ignore[assignment]
        except ValueError:
            raise typer.BadParameter(f"--targets must be numbers separated by commas. Got {targets!r}.") from None
    changes["run"] = {key: value for key, value in options.items() if value is not None}
    if config is None and (data is not None or scenario is not None):
        table.pop("settings", None)  # the demonstration's federations are not what was asked for
    table = merged(table, changes)
    if seeds is not None:
        table["seeds"] = _seeds(seeds)
    if selectors is not None:
        table["selectors"] = selectors_table(_listed(selectors, "--selectors"), table.get("selectors", {}))
        if table.get("run", {}).get("baseline") not in table["selectors"]:
            table.get("run", {}).pop("baseline", None)
    if any(value is not None for value in (selectors, data, scenario)) and config is None:
        table["name"] = "compare"
    table = override(table, set_ or [])
    for text in supply(table):
        err(quiet).print(f"note: {text}", highlight=False)
    launch(
        Experiment.from_dict(table),
        out_dir=out,
        device=device,
        engine=engine,
        address=address,
        track=track,
        quiet=quiet,
        format=format,
    )
