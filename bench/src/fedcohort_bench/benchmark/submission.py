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

_Check = tuple[bool, str]  # whether it is as it must be, and what is wrong otherwise
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
    checks = [*_configuration(configuration), *_scores(submitted)]
    selectors = {entry.get("label") for entry in submitted.get("selectors", [])} | {"uniform"}
    for what, same in (
        ("seeds", sorted(configuration.get("seeds", [])) == sorted(submitted.get("seeds", []))),
        ("data", configuration.get("data", {}).get("name") == submitted.get("data")),
        ("selectors", set(configuration.get("selectors", {})) == selectors),
    ):
        checks.append((same, f"configuration and scores name different {what}"))
    problems = [why for valid, why in checks if not valid]
    if problems:
        raise SubmissionError(f"{config} and {scores} are not a valid submission: {'; '.join(problems)}.")
    return dict(submitted)


def _configuration(config: Mapping[str, Any]) -> list[_Check]:
    try:
        data, seeds = config["data"]["name"], config["seeds"]
        submitted = Experiment.from_dict(config).table
        expected = Experiment.from_dict(table(data, {}, seeds)).table
    except (KeyError, TypeError, FedcohortError) as error:
        return [(False, f"the configuration cannot be built ({error})")]
    sections = ("model", "local", "scenario", "settings", "aggregator", "task", "labels", "filter")
    checks = [(submitted.get(key) == expected.get(key), f"[{key}] is not the suite's") for key in sections]
    for key in ("rounds", "cohort", "eval_every"):
        suites = expected["run"].get(key)
        checks.append((submitted["run"].get(key) == suites, f"run.{key} is not the suite's {suites}"))
    reserved = ", ".join(map(str, REPORT_SEEDS))
    checks.append((set(seeds) <= set(REPORT_SEEDS), f"seeds {seeds} are not for reports: {reserved}"))
    # A selector may bring its own aggregator or filter, but the submitter may not choose another one. So each entry is
    # compared with the defaults of its selector.
    for label, entry in submitted["selectors"].items():
        selection = {key: value for key, value in entry.items() if key not in _NOT_SELECTION}
        default = Experiment.from_dict(table(data, {label: selection}, seeds)).table["selectors"][label]
        changed = ", ".join(sorted(key for key in _NOT_SELECTION if entry.get(key) != default.get(key)))
        only = f"the selector {label!r} changes {changed}, not only selection"
        checks.append((not changed or label == "uniform", only))
    return checks


def _scores(scores: Mapping[str, Any]) -> list[_Check]:
    try:
        data, names, baseline = scores["data"], scores["settings"], scores.get("baseline", "uniform")
        version, rounds = scores["benchmark"], rounds_of(data)
        checks = [
            (version == VERSION, f"the scores are of version {version} of the benchmark, not {VERSION}"),
            (scores["complete"], "not all runs have finished"),
            (baseline == "uniform", f"its gains are over {baseline!r}, not over uniform"),
            (scores["purpose"] == "report", f"its purpose is {scores['purpose']!r}, not 'report'"),
            (scores["rounds"] == rounds, f"{scores['rounds']} rounds are not the suite's {rounds}"),
            (set(names) == {setting.name for setting in suite(data)}, "settings are missing or unknown"),
        ]
        for entry in scores["selectors"]:
            gains = np.array([entry["gains"][name] for name in names], np.float64)
            if gains.shape != (len(names), len(scores["seeds"])):
                checks.append((False, f"{entry['label']} has no gain for every setting and seed"))
                continue
            line = SelectorScore(entry["label"], dict(zip(names, gains, strict=True)), kinds=kinds(data, names))
            figures = [(line.mean, "mean_gain"), (line.worst[1], "worst_gain"), (line.interval, "interval")]
            # With one seed there is no interval, and the file has null; other sums differ in their last digits.
            same = all(math.isnan(figure) or np.isclose(figure, entry[key]) for figure, key in figures)
            checks.append((same, f"the figures of {entry['label']} do not follow from its gains"))
        return checks
    except (KeyError, TypeError, ValueError, FedcohortError) as error:
        return [(False, f"the scores are damaged ({type(error).__name__}: {error})")]
