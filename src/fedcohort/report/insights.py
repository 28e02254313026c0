"""Pictures of what a selector learned, read from the journals: one function per kind of selector, found by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.errors import FedcohortError
from fedcohort.journal import Journal, read_journal
from fedcohort.report.data import Group, RunCurve, Setting
from fedcohort.report.figures import Figure, number, percent, rounded

MAX_POINTS = 600  # clients drawn one by one


@dataclass(frozen=True)
class Source:
    """A selector's group with the journal of one of its runs."""

    group: Group
    run: RunCurve
    journal: Journal
    setting: Setting

    @property
    def noise(self) -> FloatArray | None:
        """(N,) share of wrong labels of each client, when some are wrong."""
        facts = self.setting.federations.get(self.run.federation)
        return None if facts is None or not (facts.noise_rate > 0).any() else facts.noise_rate


def selector_figures(setting: Setting) -> tuple[list[Figure], list[str]]:
    """Return the pictures that belong to the selectors of a setting, and warnings about unreadable journals."""
    figures: list[Figure] = []
    warnings: list[str] = []
    with ExitStack() as stack:
        for draw, selectors in _PICTURES:
            sources = []
            for group in setting.groups:
                run = next((run for run in group.runs if run.journal is not None), None)
                if group.selector not in selectors or run is None or run.journal is None:
                    continue
                try:
                    journal = stack.enter_context(closing(read_journal(run.journal)))
                    sources.append(Source(group, run, journal, setting))
                except FedcohortError as error:
                    warnings.append(f"What {group.label} learned cannot be shown: {error.message}")
            if sources:
                figure = draw(sources)
                if figure is not None:
                    figures.append(figure)
    return figures, warnings


def _ranked(name: str, order: IntArray, mid: FloatArray, lo: FloatArray, hi: FloatArray) -> dict[str, Any]:
    """Return a view of ranked clients with intervals; of very many clients an even selection."""
    if len(order) > MAX_POINTS:
        order = order[np.linspace(0, len(order) - 1, MAX_POINTS).astype(int)]
    return {
        "name": name,
        "x": {"label": "clients, ranked", "format": "integer"},
        "mid": rounded(mid[order]),
        "lo": rounded(lo[order]),
        "hi": rounded(hi[order]),
        "names": [str(int(c)) for c in order],
    }


def _correlation(ours: FloatArray, theirs: FloatArray) -> float:
    """Return the rank correlation; NaN when one of them does not vary."""
    if len(ours) < 3 or np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        return math.nan
    from scipy.stats import spearmanr

    return float(spearmanr(ours, theirs).statistic)


# -- FedCM: the arms of the bandit ----------------------------------------------------------------------------------


def arms(sources: Sequence[Source]) -> Figure | None:
    """Chance of each client's model to be kept, as FedCM estimates it."""
    views, sentences = [], []
    for source in sources:
        state = source.journal.state("")
        if {"kept", "dropped"} <= set(state):  # Thompson: Beta(alpha, beta), 90% credible interval
            from scipy.stats import beta

            good, bad = state["kept"], state["dropped"]
            mid = good / (good + bad)
            lo, hi = beta.ppf(0.05, good, bad), beta.ppf(0.95, good, bad)
            pulls = good + bad - 2
        elif {"mean", "pulls"} <= set(state):  # UCB: mean and the width of its bound
            mid, pulls = state["mean"], state["pulls"] - 1
            rounds = source.journal.last()[0] + 2
            width = np.sqrt(1.5 * math.log(max(rounds, 2)) / state["pulls"])
            lo, hi = np.maximum(mid - width, 0), np.minimum(mid + width, 1)
        else:
            continue
        order = np.argsort(-mid, kind="stable")
        view = _ranked(source.group.label, order, mid, lo, hi)
        view["note"] = [f"asked {number(float(pulls[int(c)]))} times" for c in view["names"]]
        views.append(view)
        best, worst = int(order[0]), int(order[-1])
        text = (
            f"With {source.group.label} (seed {source.run.seed}) the model of client {best} is kept most often "
            f"({percent(float(mid[best]), 0)}), that of client {worst} least ({percent(float(mid[worst]), 0)})"
        )
        if source.noise is not None:
            text += f"; rank correlation with label noise {_correlation(mid, source.noise):+.2f}".replace("-", "−")
        sentences.append(text + ".")
    if not views:
        return None
    spec = {"kind": "intervals", "views": views, "y": {"label": "chance to be kept", "format": "percent"}}
    return Figure("fedcm-arms", "FedCM: what each arm is worth", " ".join(sentences[:2]), spec)


_PICTURES: list[tuple[Callable[[Sequence[Source]], Figure | None], frozenset[str]]] = [
    (arms, frozenset({"fedcm-ucb", "fedcm-ts"})),
]
