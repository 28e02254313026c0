"""Pictures of what a selector learned, read from the journals: one function per kind of selector, found by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.errors import FedcohortError, MissingExtraError
from fedcohort.journal import Journal, read_journal
from fedcohort.report import palette
from fedcohort.report.data import Group, RunCurve, Setting
from fedcohort.report.figures import POINTS, Figure, rounded
from fedcohort.simulate.leaderboard.words import number, percent

_THETA = "theta "  # FLASH notes its coefficients as "theta <context element>"
MAX_POINTS = 600  # clients drawn one by one
WEAK = 0.2  # a rank correlation nearer to 0 says nothing


@dataclass(frozen=True)
class Source:
    """A selector's group with the journal of one of its runs."""

    group: Group
    run: RunCurve
    journal: Journal
    setting: Setting

    @property
    def opening(self) -> str:
        """How a sentence about this selector begins: with whom, and that it is not at its end."""
        done = int(self.run.round.max(initial=-1)) + 1
        so_far = f"After {done:,} rounds, with" if self.run.state == "running" else "With"
        return f"{so_far} {self.group.label} (seed {self.run.seed})"

    @property
    def noise(self) -> FloatArray | None:
        """(N,) share of wrong labels of each client, when some are wrong."""
        facts = self.setting.federations.get(self.run.federation)
        return None if facts is None or not (facts.noise_rate > 0).any() else facts.noise_rate

    @property
    def label_counts(self) -> FloatArray | None:
        """(N, B) samples per class of each client."""
        facts = self.setting.federations.get(self.run.federation)
        return None if facts is None else facts.label_counts


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
    """Return Spearman's rank correlation, ties with their mean rank; NaN when one of them does not vary.

    >>> _correlation(np.array([1.0, 2.0, 3.0, 3.0]), np.array([10.0, 20.0, 30.0, 30.0]))
    1.0
    """
    if len(ours) < 3 or np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        return math.nan
    return round(float(np.corrcoef(_mean_ranks(ours), _mean_ranks(theirs))[0, 1]), 12)


def _mean_ranks(values: FloatArray) -> FloatArray:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[which])


def _credible(wins: FloatArray, losses: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the 90% credible interval of Beta(wins, losses)."""
    from scipy.special import betaincinv

    return np.asarray(betaincinv(wins, losses, 0.05)), np.asarray(betaincinv(wins, losses, 0.95))


def _asked(times: float) -> str:
    return "never asked" if times < 1 else f"asked {number(times)} time{'s' if times != 1 else ''}"


def _kept(kept: float, asked: float) -> str:
    """Return what was counted, beside an estimate that also holds a guess made before.

    >>> _kept(0.0, 1.0), _kept(0.0, 0.0)
    ('kept 0 of 1 time', 'never asked')
    """
    if asked < 1:
        return "never asked"
    return f"kept {number(kept)} of {number(asked)} time{'s' if asked != 1 else ''}"


def _agreement(value: float, *, perfect: int, good: str, bad: str, none: str) -> str:
    """Return whether a rank correlation is what it should be, in words, with the number and what would be perfect."""
    number_ = f"rank correlation {_signed(value)}, {_signed(perfect).removesuffix('.00')} would be perfect"
    if math.isnan(value):
        return none
    right = value * perfect
    return f"{good if right >= WEAK else bad if right <= -WEAK else none} ({number_})"


def _signed(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


# -- FedCM: the arms of the bandit ----------------------------------------------------------------------------------


def arms(sources: Sequence[Source]) -> Figure | None:
    """Chance of each client's model to be kept, as FedCM estimates it."""
    views, sentences = [], []
    for source in sources:
        state = source.journal.state("")
        if {"kept", "dropped"} <= set(state):  # Thompson: Beta(alpha, beta), 90% credible interval
            good, bad = state["kept"], state["dropped"]
            mid = good / (good + bad)
            lo, hi = _credible(good, bad)
            told = [_kept(float(g) - 1, float(g + b) - 2) for g, b in zip(good, bad, strict=True)]
        elif {"mean", "pulls"} <= set(state):  # UCB: mean and the width of its bound
            mid = state["mean"]
            told = [_asked(float(pulls) - 1) for pulls in state["pulls"]]  # one pull is imaginary
            rounds = source.journal.last()[0] + 2
            width = np.sqrt(1.5 * math.log(max(rounds, 2)) / state["pulls"])
            lo, hi = np.maximum(mid - width, 0), np.minimum(mid + width, 1)
        else:
            continue
        order = np.argsort(-mid, kind="stable")
        view = _ranked(source.group.label, order, mid, lo, hi)
        view["note"] = [told[int(c)] for c in view["names"]]
        views.append(view)
        best, worst = int(order[0]), int(order[-1])
        if float(mid[best]) == float(mid[worst]):
            text = f"{source.opening} every client has the same estimated chance to be kept"
        else:
            text = (
                f"{source.opening} client {best} has the highest estimated chance to be kept, "
                f"{percent(float(mid[best]), 0)} ({told[best]}), and client {worst} the lowest, "
                f"{percent(float(mid[worst]), 0)} ({told[worst]})"
            )
        if source.noise is not None:
            text += "; " + _agreement(
                _correlation(mid, source.noise),
                perfect=-1,
                good="clients with more wrong labels get lower estimates, as they should",
                bad="clients with more wrong labels get higher estimates, the wrong way round",
                none="the estimates say little about who has wrong labels",
            )
        sentences.append(text + ".")
    if not views:
        return None
    spec = {"kind": "intervals", "views": views, "y": {"label": "chance to be kept", "format": "percent"}}
    return Figure("fedcm-arms", "FedCM: what each arm is worth", " ".join(sentences[:2]), spec)


# -- FedACS: who is skewed ------------------------------------------------------------------------------------------


def skewness(sources: Sequence[Source]) -> Figure | None:
    """Chance of each client to win a duel of low skewness, as FedACS estimates it from its duels."""
    views, sentences = [], []
    for source in sources:
        state = source.journal.state("")
        wins, losses = state["wins"] + 1, state["losses"] + 1
        mid = wins / (wins + losses)
        order = np.argsort(-mid, kind="stable")
        view = _ranked(source.group.label, order, mid, *_credible(wins, losses))
        view["note"] = [f"duelled in {number(float(state['rounds'][int(c)]))} rounds" for c in view["names"]]
        views.append(view)
        first, last = int(order[0]), int(order[-1])
        text = (
            f"{source.opening} client {first} is ranked as the least skewed ({_won(state, first)}) and client {last} "
            f"as the most ({_won(state, last)})"
        )
        counts = source.label_counts
        if counts is not None:
            share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
            own = ((share - 1 / counts.shape[1]) ** 2).sum(axis=1)
            agreement = _correlation(mid, own)
            text += (
                "; but all clients are equally skewed, or all are ranked alike, so there is nothing to agree with"
                if math.isnan(agreement)
                else "; "
                + _agreement(
                    agreement,
                    perfect=-1,
                    good="the more skewed a client truly is, the fewer duels it is expected to win, as it should be",
                    bad="the more skewed a client truly is, the more duels it is expected to win, the wrong way round",
                    none="the ranking says little about the clients' true skewness",
                )
            )
        sentences.append(text + ".")
    spec = {
        "kind": "intervals",
        "views": views,
        "y": {"label": "chance to win a duel of low skew", "format": "percent"},
    }
    return Figure("fedacs-skewness", "FedACS: clients ranked by skewness", " ".join(sentences[:2]), spec)


def _won(state: Mapping[str, Any], client: int) -> str:
    """Return what a client won, as it was counted."""
    wins, fought = float(state["wins"][client]), float(state["wins"][client] + state["losses"][client])
    return "never in a duel" if fought <= 0 else f"won {percent(wins / fought, 0)} of its duels"


# -- FedCor: the map of clients -------------------------------------------------------------------------------------


def client_map(sources: Sequence[Source]) -> Figure | None:
    """FedCor's client embeddings in two dimensions, coloured by each client's main class."""
    views, sentences, categories = [], [], 1
    for source in sources:
        state = source.journal.state("")
        embedding, samples = state["embedding"], int(state.get("samples", 1))
        if len(embedding) < 5 or not samples:
            continue
        keep = np.arange(len(embedding))
        if len(keep) > MAX_POINTS:
            keep = np.linspace(0, len(keep) - 1, MAX_POINTS).astype(int)
        counts = source.label_counts
        main = np.zeros(len(embedding), int) if counts is None else counts.argmax(axis=1)
        place = _flat_map(embedding[keep])
        views.append(
            {
                "name": source.group.label,
                "x": {"label": "t-SNE of the embeddings; only nearness has a meaning"},
                "px": rounded(place[:, 0], 4),
                "py": rounded(place[:, 1], 4),
                "category": main[keep].tolist(),
                "names": [str(int(c)) for c in keep],
            }
        )
        if counts is not None:
            categories = max(categories, counts.shape[1])
            near, chance = _same_neighbour(embedding[keep], main[keep])
            shared = (
                f"{source.opening} {percent(near, 0)} of the clients have a nearest neighbour of the same main class, "
                f"by chance it would be {percent(chance, 0)}"
            )
            if near > 1.5 * chance:
                sentences.append(f"{shared}: the losses of like clients move together.")
            elif near >= chance:
                sentences.append(f"{shared}: the map hardly follows the classes.")
            else:
                sentences.append(f"{shared}: the map does not follow the classes.")
    if not views:
        return None
    known = bool(sentences)
    labels = [f"mainly class {c}" for c in range(categories)] if known else ["clients"]
    slots = len(palette.LIGHT) - 1
    spec = {
        "kind": "points",
        "views": views,
        "y": {"label": ""},
        "categories": labels,
        "colors": [1 + c % slots for c in range(len(labels))],
    }
    text = " ".join(sentences[:2]) or "Clients that lie close together have losses that move together."
    return Figure("fedcor-map", "FedCor: the map of clients", text, spec)


def _flat_map(points: FloatArray) -> FloatArray:
    """(n, 2) t-SNE of (n, d) points, the same on every call."""
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise MissingExtraError(
            "The map of clients needs scikit-learn.", hint="pip install 'fedcohort[report]'"
        ) from error
    perplexity = min(30.0, (len(points) - 1) / 3)
    flat = TSNE(2, perplexity=perplexity, init="pca", random_state=0, max_iter=500).fit_transform(points)
    return np.asarray(flat, np.float64)


def _same_neighbour(points: FloatArray, label: IntArray) -> tuple[float, float]:
    """Return how often a point's nearest neighbour has its label, and how often it would by chance."""
    distance = ((points[:, None, :] - points[None, :, :]) ** 2).sum(axis=2)
    np.fill_diagonal(distance, np.inf)
    counts, n = np.bincount(label), len(label)
    chance = float((counts * (counts - 1)).sum()) / (n * (n - 1))  # nobody is its own neighbour
    return float((label[distance.argmin(axis=1)] == label).mean()), chance


# -- FLASH: what the score is made of -------------------------------------------------------------------------------


def coefficients(sources: Sequence[Source]) -> Figure | None:
    """The fitted coefficient of each context element over the rounds."""
    views, sentences = [], []
    for source in sources:
        rows = [row for row in source.journal.cohorts() if any(key.startswith(_THETA) for key in row.notes)]
        elements = list(dict.fromkeys(key for row in rows for key in row.notes if key.startswith(_THETA)))
        series, last = [], {}
        for slot, key in enumerate(elements, start=1):
            known = [(row.round, float(row.notes[key])) for row in rows if key in row.notes]
            keep = np.unique(np.linspace(0, len(known) - 1, min(len(known), POINTS)).astype(int))
            name = key.removeprefix(_THETA)
            last[name] = known[-1][1]
            series.append(
                {
                    "label": name,
                    "color": slot,
                    "x": [known[i][0] for i in keep],
                    "y": rounded(np.array([known[i][1] for i in keep])),
                }
            )
        if not series:
            continue
        views.append({"name": source.group.label, "x": {"label": "round", "format": "integer"}, "series": series})
        top = max(last, key=lambda name: abs(last[name]))
        effect = "more" if last[top] > 0 else "less"
        sentences.append(
            f"{source.opening} the largest coefficient is that of {top}, {number(last[top]).replace('-', '−')}: the "
            f"higher a client's {top}, the {effect} reward is expected of it."
            if last[top]
            else f"{source.opening} nothing has been learned: all coefficients are 0."
        )
    if not views:
        return None
    spec = {"kind": "lines", "views": views, "y": {"label": "coefficient"}}
    return Figure("flash-coefficients", "FLASH: what its score is made of", " ".join(sentences[:2]), spec)


_PICTURES: list[tuple[Callable[[Sequence[Source]], Figure | None], frozenset[str]]] = [
    (client_map, frozenset({"fedcor"})),
    (arms, frozenset({"fedcm-ucb", "fedcm-ts"})),
    (skewness, frozenset({"fedacs"})),
    (coefficients, frozenset({"flash"})),
]
