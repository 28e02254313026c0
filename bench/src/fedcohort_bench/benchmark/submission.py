"""Check a submission: its configuration and scores must match the suite and each other."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.core.errors import FedcohortError
from fedcohort.core.files import read_file
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import parse_toml
from fedcohort_bench.benchmark.scores import SelectorScore
from fedcohort_bench.benchmark.suite import REPORT_SEEDS, VERSION, kinds, rounds_of, suite, table

_NOT_SELECTION = ("aggregator", "filter", "labels", "local")


class SubmissionError(FedcohortError, ValueError):
    """The files are not a submission, or contradict the suite or each other."""


def check_submission(config: Path, scores: Path) -> dict[str, Any]:
    """Return the scores of a submission after checking them.

    The configuration must be that of this version of the suite, with all settings, the suite's training and report
    seeds. The scores must belong to that configuration and follow from the gains they list. Whether the gains were
    really measured is not checked; to verify them, run the configuration. The error lists every problem.
    """
    try:
        configuration, submitted = parse_toml(read_file(config).decode()), json.loads(read_file(scores))
    except (OSError, ValueError, RecursionError) as error:
        raise SubmissionError(f"{config} and {scores} cannot be read: {error}.") from error
    problems = [*_configuration(configuration), *_scores(submitted), *_agree(configuration, submitted)]
    if problems:
        raise SubmissionError(f"{config} and {scores} are not a valid submission: {'; '.join(problems)}.")
    return dict(submitted)


def _configuration(config: Mapping[str, Any]) -> list[str]:
    try:
        data, seeds = config["data"]["name"], config["seeds"]
        submitted = Experiment.from_dict(config).table
        expected = Experiment.from_dict(table(data, {}, seeds)).table
    except (KeyError, TypeError, FedcohortError) as error:
        return [f"the configuration cannot be built ({error})"]
    problems = _differences(submitted, expected)
    if not set(seeds) <= set(REPORT_SEEDS):
        problems.append(f"seeds {seeds} are not for reports: {', '.join(map(str, REPORT_SEEDS))}")
    # A selector may bring its own aggregator or filter, but the submitter may not choose another one. So each entry is
    # compared with the defaults of its selector.
    for label, entry in submitted["selectors"].items():
        selection = {key: value for key, value in entry.items() if key not in _NOT_SELECTION}
        default = Experiment.from_dict(table(data, {label: selection}, seeds)).table["selectors"][label]
        changed = sorted(key for key in _NOT_SELECTION if entry.get(key) != default.get(key))
        if changed and label != "uniform":
            problems.append(f"the selector {label!r} changes {', '.join(changed)}, not only selection")
    return problems


def _differences(submitted: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Name the sections and values in which a complete configuration differs from the suite's."""
    sections = ("model", "local", "scenario", "settings", "aggregator", "task", "labels", "filter")
    problems = [f"[{key}] is not the suite's" for key in sections if submitted.get(key) != expected.get(key)]
    for key in ("rounds", "cohort", "eval_every"):
        if submitted["run"].get(key) != expected["run"].get(key):
            problems.append(f"run.{key} is not the suite's {expected['run'].get(key)}")
    return problems


def _scores(scores: Mapping[str, Any]) -> list[str]:
    try:
        problems = []
        if scores["benchmark"] != VERSION:
            problems.append(f"the scores are of version {scores['benchmark']} of the benchmark, not {VERSION}")
        if not scores["complete"]:
            problems.append("not all runs have finished")
        if scores.get("baseline", "uniform") != "uniform":
            problems.append(f"its gains are over {scores['baseline']!r}, not over uniform")
        if scores["purpose"] != "report":
            problems.append(f"its purpose is {scores['purpose']!r}, not 'report'")
        if scores["rounds"] != rounds_of(scores["data"]):
            problems.append(f"{scores['rounds']} rounds are not the suite's {rounds_of(scores['data'])}")
        if set(scores["settings"]) != {setting.name for setting in suite(scores["data"])}:
            problems.append("settings are missing or unknown")
        for entry in scores["selectors"]:
            problems += _figures(entry, scores)
        return problems
    except (KeyError, TypeError, ValueError, FedcohortError) as error:
        return [f"the scores are damaged ({type(error).__name__}: {error})"]


def _figures(entry: Mapping[str, Any], scores: Mapping[str, Any]) -> list[str]:
    """Check that a selector's figures follow from the gains it lists."""
    gains = np.array([entry["gains"][name] for name in scores["settings"]], np.float64)
    if gains.shape != (len(scores["settings"]), len(scores["seeds"])):
        return [f"{entry['label']} has no gain for every setting and seed"]
    line = SelectorScore(
        entry["label"],
        dict(zip(scores["settings"], gains, strict=True)),
        kinds=kinds(scores["data"], scores["settings"]),
    )
    # Sums in another order differ in their last digits.
    close = np.isclose(line.mean, entry["mean_gain"]) and np.isclose(line.worst[1], entry["worst_gain"])
    # With one seed there is no interval, and the file has null.
    if not close or (not math.isnan(line.interval) and not np.isclose(line.interval, entry["interval"])):
        return [f"the figures of {entry['label']} do not follow from its gains"]
    return []


def _agree(config: Mapping[str, Any], scores: Mapping[str, Any]) -> list[str]:
    problems = []
    if sorted(config.get("seeds", [])) != sorted(scores.get("seeds", [])):
        problems.append("configuration and scores name different seeds")
    if config.get("data", {}).get("name") != scores.get("data"):
        problems.append("configuration and scores name different data")
    labels = {entry.get("label") for entry in scores.get("selectors", [])} | {"uniform"}
    if set(config.get("selectors", {})) != labels:
        problems.append("configuration and scores name different selectors")
    return problems
