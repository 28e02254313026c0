"""The complete setup of an experiment, so that a report can be cited: in words, and as TOML that runs it again."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from fedcohort.core.errors import FedcohortError
from fedcohort.report.data import Bundle
from fedcohort.report.render import card, sentences
from fedcohort.scenario import Scenario
from fedcohort.simulate.config.toml import to_toml
from fedcohort.simulate.leaderboard import Leaderboard, Table
from fedcohort.simulate.leaderboard.formats import Cell


def facts(config: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, str]:
    """Return what was run, each part in a few words; parts that a configuration does not name are left out.

    Parameters
    ----------
    config : the experiment's complete configuration
    meta : what was recorded with it: versions, device, command, datasets
    """
    scenario, data = ({"preset": v} if isinstance(v, str) else v or {} for v in map(config.get, ("scenario", "data")))
    # A report is also read where a user's own partition is not installed; it is then shown as it was written.
    with contextlib.suppress(FedcohortError):
        scenario = Scenario.from_dict(scenario).to_dict() if scenario else {}
    seeds = config.get("seeds") or ()
    seeds = [str(seed) for seed in (range(seeds) if isinstance(seeds, int) else seeds)]
    lines = sentences("setup.txt", config=config, meta=meta, scenario=scenario, data=data, seeds=seeds)
    parts = (line.partition(": ") for line in lines)
    return {name: text for name, _, text in parts if text}


def method(bundle: Bundle, board: Leaderboard) -> str:
    """Return the paragraph of a paper that says what was compared, on what, and with which statistics."""
    config, meta = bundle.configs[0], bundle.metas[0]
    known = facts(config, meta)
    return " ".join(sentences("method.txt", bundle=bundle, board=board, config=config, meta=meta, known=known))


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
