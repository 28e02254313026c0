"""The complete setup of an experiment, so that a report can be cited: in words, and as TOML that runs it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from fedcohort.core.errors import FedcohortError
from fedcohort.report.data import Bundle
from fedcohort.report.render import card
from fedcohort.scenario import Scenario
from fedcohort.simulate.config.toml import to_toml
from fedcohort.simulate.leaderboard import Leaderboard, Table
from fedcohort.simulate.leaderboard.formats import Cell
from fedcohort.simulate.leaderboard.words import names

_VERSIONS = ("fedcohort", "torch", "numpy", "python")


def facts(config: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, str]:
    """Return what was run, each part in a few words; parts that a configuration does not name are left out.

    Parameters
    ----------
    config : the experiment's complete configuration
    meta : what was recorded with it: versions, device, command, datasets
    """
    scenario = _scenario(config.get("scenario"))
    run = _mapping(config.get("run"))
    parts = {
        "Data": _data(_mapping(config.get("data")), meta.get("datasets")),
        "Task": _describe_part(config.get("task")),
        "Partition": _describe_part(scenario.get("partition") or scenario.get("preset")),
        "Label noise": _noise(scenario.get("noise")),
        "Availability": _unless(scenario.get("availability"), "always", "all clients, in every round"),
        "Latency": _unless(scenario.get("latency"), "none", "none"),
        "Failures": _number(scenario.get("failure"), "probability {:g} per client and round"),
        "Deadline": _number(scenario.get("deadline"), "{:g} s") or str(run.get("deadline") or ""),
        "Held out": _held_out(scenario),
        "Model": _describe_part(config.get("model")),
        "Local training": _describe_part(config.get("local")),
        "Aggregation": _describe_part(config.get("aggregator")),
        "Filter": _describe_part(config.get("filter")),
        "Rounds and cohort": _rounds(run),
        "Selectors": _selectors(_mapping(config.get("selectors"))),
        "Settings": "; ".join(_describe_part(setting) for setting in config.get("settings", ())),
        "Seeds": _seeds(config.get("seeds")),
        "Versions": ", ".join(f"{name} {meta[name]}" for name in _VERSIONS if meta.get(name)),
        "Machine": ", ".join(str(meta[name]) for name in ("device", "machine") if meta.get(name)),
        "Started": str(meta.get("created") or ""),
        "Command": str(meta.get("command") or ""),
    }
    return {name: text for name, text in parts.items() if text}


def _noise(value: Any) -> str:
    return _describe_part(value) if _mapping(value).get("level", 1) else "none"


def _number(value: Any, form: str) -> str:
    return form.format(value) if value else ""


def _scenario(value: Any) -> Mapping[str, Any]:
    """Return a scenario with its preset filled in, or as it was written if it cannot be built here."""
    written = _mapping(value)
    # A report is also read where a user's own partition is not installed; it is then shown as it was written.
    try:
        return Scenario.from_dict(written).to_dict() if written else {}
    except FedcohortError:
        return written


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        return {"preset": value}
    return value if isinstance(value, Mapping) else {}


def _describe_part(value: Any) -> str:
    """Return a part of a configuration as "name (key value, ...)"."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} {_words(item)}" for key, item in value.items() if key != "name")
        name = str(value.get("name", ""))
        return f"{name} ({inner})" if name and inner else name or inner
    return "" if value in (None, 0, False) else str(value)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"[{_describe_part(value)}]"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_words, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _data(data: Mapping[str, Any], datasets: Any) -> str:
    known = [item for item in datasets if isinstance(item, Mapping)] if isinstance(datasets, list) else []
    words = []
    for item in known:
        parts = [
            f"{item['train']:,} training and {item['test']:,} test samples" if {"train", "test"} <= set(item) else "",
            f"{item['classes']} classes" if item.get("classes") else "",
            "x".join(map(str, item["shape"])) if item.get("shape") else "",
            str(item.get("source") or ""),
        ]
        words.append(f"{item.get('name', 'data')} ({', '.join(part for part in parts if part)})")
    return "; ".join(words) or _describe_part(data)


def _unless(value: Any, name: str, otherwise: str) -> str:
    return otherwise if _mapping(value).get("name") == name else _describe_part(value)


def _held_out(scenario: Mapping[str, Any]) -> str:
    words = []
    if scenario.get("validation"):
        words.append(f"{100 * float(scenario['validation']):g}% of each client's data for validation")
    if scenario.get("server_validation"):
        words.append(f"{scenario['server_validation']} samples of each class at the server")
    return ", ".join(words)


def _rounds(run: Mapping[str, Any]) -> str:
    words = []
    if run.get("rounds"):
        words.append(f"{run['rounds']:,} rounds")
    if run.get("cohort"):
        words.append("all available clients" if run["cohort"] == "all" else f"{run['cohort']} clients per round")
    if run.get("eval_every"):
        words.append("evaluated every " + ("round" if run["eval_every"] == 1 else f"{run['eval_every']} rounds"))
    return ", ".join(words)


def _selectors(selectors: Mapping[str, Any]) -> str:
    words = []
    for label, value in selectors.items():
        params = dict(value) if isinstance(value, Mapping) else {}
        name = params.pop("name", label)
        inner = ", ".join(f"{key} {_words(item)}" for key, item in params.items())
        words.append(label + (f" = {name}" if name != label else "") + (f" ({inner})" if inner else ""))
    return "; ".join(words)


def _seeds(value: Any) -> str:
    seeds: Sequence[Any] = list(range(value)) if isinstance(value, int) else value or ()
    return f"{len(seeds)}: {names([str(seed) for seed in seeds], 30)}" if seeds else ""


_LOCAL = {
    "steps": "{} steps", "epochs": "{} epochs", "batch_size": "batches of {}", "lr": "learning rate {:g}",
    "momentum": "momentum {:g}", "weight_decay": "weight decay {:g}",
}  # fmt: skip


def method(bundle: Bundle, board: Leaderboard) -> str:
    """Return the paragraph of a paper that says what was compared, on what, and with which statistics."""
    config, meta = bundle.configs[0], bundle.metas[0]
    known, run, local = facts(config, meta), _mapping(config.get("run")), _mapping(config.get("local"))
    metric = board.metric.name
    settings = ""
    if len(bundle.settings) > 1:
        settings = f", in the settings {names([s.name for s in bundle.settings])} (the setup says how they differ)"
    cohort = "all available clients" if run.get("cohort") == "all" else f"{run.get('cohort')} clients"
    training = ", ".join(form.format(local[key]) for key, form in _LOCAL.items() if local.get(key))
    window = "the last round" if board.window == 1 else f"the last {board.window} rounds"
    seeds = max(row.runs for row in board.rows)
    sentences = [
        f"We compare {names([row.label for row in board.rows], 40)} on {known.get('Data', 'the data')}, divided among "
        f"{bundle.settings[0].n_clients:,} clients ({known.get('Partition', 'not stated')}){settings}.",
        f"In each of {run.get('rounds')} rounds, {cohort} train the model {known.get('Model', '')} ({training}), and "
        f"the server combines their models by {known.get('Aggregation', 'averaging')}.",
    ]
    if "Latency" in known:
        sentences.append(f"Latency: {known['Latency']}; availability: {known.get('Availability', 'not stated')}.")
    if seeds > 1:
        sentences.append(
            f"Each selector runs with the same {seeds} seeds; a seed fixes the federation, the first model and all "
            f"delays, so differences are paired by seed. We report the mean {metric} of {window}, differences to "
            f"{board.baseline} with 95% intervals (Student's t), and p-values of two-sided paired t-tests, corrected "
            "by Holm's method over the selectors of a table."
        )
    return " ".join([*sentences, f"Simulated with fedcohort {meta.get('fedcohort', '')}.".replace(" .", ".")])


def setup_table(bundle: Bundle) -> Table:
    """Return the setup as a table for an appendix, with a column for each experiment."""
    columns = [facts(config, meta) for config, meta in zip(bundle.configs, bundle.metas, strict=True)]
    parts = list(dict.fromkeys(part for column in columns for part in column))
    return Table(
        "setup",
        "Setup",
        ("", *(path.resolve().name for path in bundle.paths)),
        tuple((Cell(part), *(Cell(column.get(part, "–")) for column in columns)) for part in parts),
        wrap=frozenset(range(1, len(columns) + 1)),
    )


def setup_card(bundle: Bundle, board: Leaderboard) -> Markup:
    """Return the card with the setup of every experiment, and a button that copies it as TOML."""
    experiments = [
        {"name": path.resolve().name, "facts": facts(config, meta), "toml": to_toml(config)}
        for path, config, meta in zip(bundle.paths, bundle.configs, bundle.metas, strict=True)
    ]
    return card("setup", experiments, method(bundle, board))
