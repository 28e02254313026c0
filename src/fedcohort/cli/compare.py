"""``fedcohort compare``: several selectors, several seeds, one table."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fedcohort.cli.experiment import launch
from fedcohort.cli.options import (
    AddressOption,
    BaseArgument,
    ClientOption,
    DataOption,
    DeviceOption,
    EngineOption,
    FolderOption,
    FormatOption,
    LabelOption,
    ModelOption,
    OutOption,
    ProcessesOption,
    QuietOption,
    ScenarioOption,
    SetOption,
    SweepOption,
    TrackOption,
    complete_selectors,
    listed,
    parse_seeds,
    selectors_table,
)
from fedcohort.cli.output import Format, err, say
from fedcohort.core.errors import InputError


def inherited(base: Mapping[str, Any], final: Mapping[str, Any]) -> str:
    """Say which numbers of a base configuration an experiment still has."""
    ours, theirs = _section(base, "run"), _section(final, "run")
    run = [(key, ours.get(key), theirs.get(key)) for key in ("cohort", "rounds", "targets")]
    judged = [("eval_every", ours.get("eval_every"), theirs.get("eval_every"))]
    local = [(key, value, _section(final, "local").get(key)) for key, value in _section(base, "local").items()]
    aggregator = [("aggregator", base.get("aggregator", {}).get("name"), _name(final.get("aggregator", {})))]
    kept = [
        f"{key} {_plain(before)}"
        for key, before, after in [*run, *local, *aggregator, *judged, *_of_scenario(base, final)]
        if before is not None and before == after
    ]
    return ", ".join(kept)


def _of_scenario(base: Mapping[str, Any], final: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the parts of the base's scenario that say who has which data and answers when: name, before, after."""
    from fedcohort.scenario import Scenario

    tables = [
        {"preset": part} if isinstance(part, str) else part for part in (t.get("scenario", {}) for t in (base, final))
    ]
    before, after = (Scenario.from_dict(part).to_dict() if isinstance(part, Mapping) else {} for part in tables)
    plain = Scenario().to_dict()
    keys = [key for key in before if before[key] != plain.get(key)]
    return [(key, _words(before[key]), _words(after.get(key))) for key in keys]


def _words(part: Any) -> Any:
    """Return a part of a scenario as a person would write it."""
    if not isinstance(part, Mapping):
        return part
    inside = ", ".join(f"{key}={value}" for key, value in part.items() if key != "name")
    return f"{part.get('name', '')}({inside})"


def drop_targets(table: dict[str, Any], base: Mapping[str, Any]) -> None:
    """Take out the targets of the base configuration, accuracies, where the task is judged by something else."""
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.metrics import Metric

    inherited_ones = _section(base, "run").get("targets")
    if inherited_ones and _section(table, "run").get("targets") == inherited_ones:
        without = {**table, "run": {key: value for key, value in table["run"].items() if key != "targets"}}
        if not Metric.of(Experiment.from_dict(without).table["task"]).is_accuracy:
            table["run"] = without["run"]


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration that nobody has checked yet."""
    found = table.get(name)
    return found if isinstance(found, Mapping) else {}


def _name(part: Any) -> Any:
    return part.get("name") if isinstance(part, Mapping) else part


def _plain(value: Any) -> str:
    return " and ".join(f"{item:g}" for item in value) if isinstance(value, list) else str(value)


def supply(table: dict[str, Any]) -> list[str]:
    """Give all selectors the data that one of them needs, so that the comparison stays fair; say what was changed."""
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.training.filters import Need

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


def base_table(config: str | None, data: str | None, scenario: str | None, chosen: bool) -> tuple[dict[str, Any], str]:
    """Return the configuration to start from, and where it is from when the user did not name it.

    What the user did not ask for fits the user's data or scenario: selectors have their documented defaults.

    Parameters
    ----------
    chosen : bool
        Whether the selectors are named on the command line.
    """
    from fedcohort.scenario.presets import find_preset, preset_table
    from fedcohort.simulate.config.toml import find_table

    if config is not None:
        return find_table(config), ""
    demo = find_table("demo")
    if scenario is None:
        origin = "the built-in configuration 'demo'" if chosen or data else ""
        if data is not None:
            demo.pop("settings", None)  # the demonstration's federations are not what was asked for
        return {**demo, "selectors": _plain_selectors(demo)} if origin else demo, origin
    found = find_preset(scenario)
    data = data or demo["data"]["name"]
    origin = f"the preset {scenario!r} ({found.source})"
    if data not in found.training and "" not in found.training:
        origin += f", as for {next(iter(found.training))}"
    ours = found.training_on(data).ours
    if ours:
        origin += f" (not in the paper: {', '.join([*ours, *(['cohort'] if found.cohort is None else [])])})"
    return {
        "seeds": demo["seeds"],
        "model": {"name": "mlp"},
        **preset_table(scenario, data),
        "selectors": _plain_selectors(demo),
    }, origin


def _plain_selectors(demo: Mapping[str, Any]) -> dict[str, Any]:
    """Return the selectors of the demonstration, each once and with its documented defaults."""
    return {entry.get("name", label): {} for label, entry in demo["selectors"].items()}


def fit_to_data(table: dict[str, Any], *, partition: bool, selectors: bool) -> list[str]:
    """Replace what the demonstration has and the user's data cannot use; say what was changed.

    Parameters
    ----------
    partition, selectors : bool
        Whether these are the demonstration's, and not the user's.
    """
    from fedcohort.core.errors import SignalError
    from fedcohort.simulate.config.experiment import Experiment, names_clients
    from fedcohort.simulate.rounds.run import check_fits

    said: list[str] = []
    if partition and names_clients(table):
        del table["scenario"]["partition"]  # the clients that the data name; the experiment says so
    elif partition and _section(table, "task"):
        first, *_ = Experiment.from_dict(table).plans
        if not first.task.has_classes and first.scenario.partition.by_class:
            clients = table["scenario"]["partition"].get("clients", 50)
            table["scenario"]["partition"] = {"name": "iid", "clients": clients}
            said.append(f"samples are dealt out at random to {clients} clients, because there are no classes")
            table["scenario"].pop("server_validation", None)
    if selectors and _section(table, "task"):
        unfit = []
        for plan in Experiment.from_dict(table).plans:
            try:
                check_fits(plan)
            except (SignalError, InputError):
                unfit.append(plan.label)
        left_out = list(dict.fromkeys(unfit))
        kept = {name: entry for name, entry in table["selectors"].items() if name not in left_out}
        if left_out and kept:
            table["selectors"] = kept
            said.append(f"left out, because they need classes: {', '.join(left_out)}")
    return said


def compare(
    config: BaseArgument = None,
    selectors: Annotated[
        str | None,
        typer.Option(
            "--selectors",
            help="Names separated by commas, e.g. uniform,fedcor,mine.py:MySelector; each has its documented "
            "defaults, or what the configuration says.",
            autocompletion=complete_selectors,
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="How many seeds, or a list such as 1,5,7.")] = None,
    data: DataOption = None,
    label: LabelOption = None,
    client: ClientOption = None,
    folder: FolderOption = None,
    scenario: ScenarioOption = None,
    model: ModelOption = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds of training.")] = None,
    cohort: Annotated[int | None, typer.Option("--cohort", min=1, help="Clients per round.")] = None,
    targets: Annotated[str | None, typer.Option("--targets", help="Accuracies, e.g. 0.6,0.7.")] = None,
    sweep: SweepOption = None,
    set_: SetOption = None,
    out: OutOption = None,
    device: DeviceOption = None,
    processes: ProcessesOption = None,
    engine: EngineOption = None,
    address: AddressOption = None,
    track: TrackOption = None,
    quiet: QuietOption = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare selectors on the same federation, with the same seeds, every question to a client paid for.

    Without a configuration, a scenario of a paper brings the paper's cohort, local training, rounds and targets;
    otherwise those of the built-in demonstration hold. What is taken over is printed, and every option changes it.

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 some run diverged or failed, 130 interrupted (can be continued).

    Examples: fedcohort compare; fedcohort compare --selectors uniform,fedcor --seeds 5 --scenario fedcor-1spc;
    fedcohort compare --selectors uniform,fedcor --sweep fedcor.warmup=5,15,30
    """
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.config.sweep import parse_sweeps
    from fedcohort.simulate.config.toml import merged, override
    from fedcohort.simulate.data import spelled

    table, origin = base_table(config, data, scenario, selectors is not None)
    base = copy.deepcopy(table)
    changes: dict[str, Any] = {}
    if data is not None:
        changes["data"] = spelled(data)
    own = {key: value for key, value in (("label", label), ("client", client)) if value is not None}
    if own:
        changes.setdefault("data", {}).update(own)
    if folder is not None:
        changes.setdefault("data", {})["folder"] = folder
    if scenario is not None and config is not None:
        changes["scenario"] = {"preset": scenario}
    if model is not None:
        changes["model"] = {"name": model}
    options = {"rounds": rounds, "cohort": cohort, "engine": engine}
    if targets is not None:
        try:
            options["targets"] = [float(item) for item in listed(targets, "--targets")]  # type: ignore[assignment]
        except ValueError:
            raise typer.BadParameter(f"--targets must be numbers separated by commas. Got {targets!r}.") from None
    changes["run"] = {key: value for key, value in options.items() if value is not None}
    table = merged(table, changes)
    if seeds is not None:
        table["seeds"] = parse_seeds(seeds)
    if selectors is not None:
        table["selectors"] = selectors_table(listed(selectors, "--selectors"), table.get("selectors", {}))
        if table.get("run", {}).get("baseline") not in table["selectors"]:
            table.get("run", {}).pop("baseline", None)
        if "sweep" in table:
            table["sweep"] = {label: grid for label, grid in table["sweep"].items() if label in table["selectors"]}
    if sweep:
        table["sweep"] = {**table.get("sweep", {}), **parse_sweeps(sweep)}
    if any(value is not None for value in (selectors, data, scenario, sweep)) and config is None:
        table["name"] = "compare"
    table = override(table, set_ or [])
    if table.get("task") and config is None and targets is None:
        drop_targets(table, base)
    fitted = []
    if config is None and scenario is None and (data is not None or own):
        asked = any(item.strip().startswith("scenario.partition") for item in set_ or [])
        same = _section(table, "scenario").get("partition") == base["scenario"]["partition"]
        fitted = fit_to_data(table, partition=same and not asked, selectors=selectors is None)
    taken = inherited(base, table)
    for text in [*([f"from {origin}: {taken}"] if origin and taken else []), *fitted, *supply(table)]:
        say(err(quiet), f"note: {text}")
    launch(
        Experiment.from_dict(table),
        out_dir=out,
        device=device,
        processes=processes,
        engine=engine,
        address=address,
        track=track,
        quiet=quiet,
        format=format,
    )
