"""Check a submission: a benchmark's configuration and scores, against the suite and against each other."""

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
from fedcohort.studies.benchmark.scores import SelectorScore
from fedcohort.studies.benchmark.suite import REPORT_SEEDS, VERSION, kinds, rounds_of, suite, table

_NOT_SELECTION = ("aggregator", "filter", "labels", "local")


class SubmissionError(FedcohortError, ValueError):
    """The files are not a submission, or contradict the suite or each other."""


def check_submission(config: Path, scores: Path) -> dict[str, Any]:
    """Return the scores of a submission after checking them.

    The configuration must be the suite's of this version, on all its settings, with its training and on seeds for
    reports; the scores must be of that configuration and follow from the gains they list. Whether the gains were
    measured is not checked: to verify them, run the configuration.

    Parameters
    ----------
    config, scores : Path
        ``config.toml`` and ``bench.json`` of a benchmark's folder.

    Raises
    ------
    SubmissionError
        With every reason.
    """
    try:
        wanted, found = parse_toml(read_file(config).decode()), json.loads(read_file(scores))
    except (OSError, ValueError, RecursionError) as error:
        raise SubmissionError(f"{config} and {scores} cannot be read: {error}.") from error
    problems = [*_configuration(wanted), *_scores(found), *_agree(wanted, found)]
    if problems:
        raise SubmissionError(f"{config} and {scores} are not a valid submission: {'; '.join(problems)}.")
    return dict(found)


def _configuration(wanted: Mapping[str, Any]) -> list[str]:
    try:
        data = wanted["data"]["name"]
        ours = table(data, {}, wanted["seeds"])
        mine, theirs = (Experiment.from_dict(each) for each in (wanted, ours))
    except (KeyError, TypeError, FedcohortError) as error:
        return [f"the configuration cannot be built ({error})"]
    problems = _differences(mine.table, theirs.table)
    if not set(wanted["seeds"]) <= set(REPORT_SEEDS):
        problems.append(f"seeds {wanted['seeds']} are not for reports: {', '.join(map(str, REPORT_SEEDS))}")
    # A selector may bring an aggregator or a filter of its own, but the submitter may not change them: so what the
    # configuration says is compared with what the selector brings when nothing but itself is named.
    for label, entry in mine.table["selectors"].items():
        alone = {key: value for key, value in entry.items() if key not in _NOT_SELECTION}
        brought = Experiment.from_dict(table(data, {label: alone}, wanted["seeds"])).table["selectors"][label]
        changed = sorted(key for key in _NOT_SELECTION if entry.get(key) != brought.get(key))
        if changed and label != "uniform":
            problems.append(f"the selector {label!r} changes {', '.join(changed)}, not only selection")
    return problems


def _differences(mine: Mapping[str, Any], suites: Mapping[str, Any]) -> list[str]:
    """Name what a complete configuration has otherwise than the suite's."""
    sections = ("model", "local", "scenario", "settings", "aggregator", "task", "labels", "filter")
    problems = [f"[{key}] is not the suite's" for key in sections if mine.get(key) != suites.get(key)]
    for key in ("rounds", "cohort", "eval_every"):
        if mine["run"].get(key) != suites["run"].get(key):
            problems.append(f"run.{key} is not the suite's {suites['run'].get(key)}")
    return problems


def _scores(found: Mapping[str, Any]) -> list[str]:
    try:
        problems = []
        if found["benchmark"] != VERSION:
            problems.append(f"the scores are of version {found['benchmark']} of the benchmark, not {VERSION}")
        if not found["complete"]:
            problems.append("not all runs have finished")
        if found["purpose"] != "report":
            problems.append(f"its purpose is {found['purpose']!r}, not 'report'")
        if found["rounds"] != rounds_of(found["data"]):
            problems.append(f"{found['rounds']} rounds are not the suite's {rounds_of(found['data'])}")
        if set(found["settings"]) != {setting.name for setting in suite(found["data"])}:
            problems.append("settings are missing or unknown")
        for entry in found["selectors"]:
            problems += _figures(entry, found)
        return problems
    except (KeyError, TypeError, ValueError, FedcohortError) as error:
        return [f"the scores are damaged ({type(error).__name__}: {error})"]


def _figures(entry: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Compute a selector's figures again from the gains that it lists."""
    gains = np.array([entry["gains"][name] for name in found["settings"]], np.float64)
    if gains.shape != (len(found["settings"]), len(found["seeds"])):
        return [f"{entry['label']} has no gain for every setting and seed"]
    line = SelectorScore(
        entry["label"],
        dict(zip(found["settings"], gains, strict=True)),
        kinds=kinds(found["data"], found["settings"]),
    )
    close = np.isclose(line.mean, entry["mean_gain"]) and np.isclose(line.worst[1], entry["worst_gain"])
    # With one seed there is no interval, and the file has null in its place.
    if not close or (not math.isnan(line.interval) and not np.isclose(line.interval, entry["interval"])):
        return [f"the figures of {entry['label']} do not follow from its gains"]
    return []


def _agree(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    problems = []
    if sorted(wanted.get("seeds", [])) != sorted(found.get("seeds", [])):
        problems.append("configuration and scores name different seeds")
    if wanted.get("data", {}).get("name") != found.get("data"):
        problems.append("configuration and scores name different data")
    labels = {entry.get("label") for entry in found.get("selectors", [])} | {"uniform"}
    if set(wanted.get("selectors", {})) != labels:
        problems.append("configuration and scores name different selectors")
    return problems
