"""Configurations of twins: the fitted clients, data that stand in for theirs, and learning as hard as recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.advice.fit import Clients, Fit
from fedcohort.api import simulator
from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import FedcohortError
from fedcohort.core.protocol import SELECTORS
from fedcohort.core.terminal import err
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import merge_tables
from fedcohort.simulate.data import data_section, load_dataset
from fedcohort.simulate.play import play
from fedcohort.simulate.store.results import Results, RunInfo, load

BATCH = 16
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
NOISES = (0.0, 0.4)  # mean shares of wrong labels, which bend the curve
ALPHAS = (0.1, 0.5, 5.0)  # tried if labels are unknown
MAX_ROUNDS = 60
FEWEST_ROUNDS = 10  # with an accuracy or loss on record; fewer do not show how fast a federation learns
_FEWEST = 8  # samples of a client; fewer would be no batch
SEEDS = [0, 1]
_LEAST_CHANCE = 0.02
_SMOOTH = 5  # rounds over which a curve is smoothed; so one piece of such a length is independent of the next


@dataclass(frozen=True, eq=False)
class Learning:
    """How the twins learn.

    Attributes
    ----------
    choices : tuple of (lr, noise, alpha)
        alpha is None if the labels are known.
    chances : (c,) float array
        How well each agrees with the recorded curve.
    verdict : str
        Whether the recorded curve lies within what the twins show.
    fits : bool
    band : (m, 5) float array
        Recorded rounds, their scores, and the lowest, mean and highest of the twins; for a loss, progress.
    """

    choices: tuple[tuple[float, float, float | None], ...]
    chances: FloatArray
    verdict: str
    fits: bool
    band: FloatArray


@dataclass(frozen=True, eq=False)
class Stand:
    """The data that stand in for the clients' own.

    Attributes
    ----------
    section : dict
        As ``[data]``.
    samples, classes : int
    """

    section: dict[str, Any]
    samples: int
    classes: int

    @classmethod
    def of(cls, data: str | None) -> Stand:
        """Load the dataset that the user names, or the digits of scikit-learn."""
        section: dict[str, Any] = dict(data_section(data or "digits"))
        dataset = load_dataset(**section)
        return cls(section, len(dataset.y_train), dataset.classes)


def wished(fit: Fit) -> dict[str, Any]:
    """Return ``[run]``, ``[aggregator]`` and ``[selectors]`` of the run that is on record."""
    record = fit.record
    options: dict[str, Any] = {"rounds": min(max(record.models, 5), MAX_ROUNDS), "cohort": record.cohort}
    table: dict[str, Any] = {"run": options}
    if record.buffer is not None and record.timed:
        options |= {"mode": "async", "buffer": record.buffer}
        table["aggregator"] = {"name": "fedbuff"}
    elif record.automatic and record.timed:
        options |= {"deadline": "auto"}
    if record.buffer is None and record.timed and record.spares:
        options["spares"] = record.spares
    if record.classes is None:
        table["labels"] = {"name": "none"}  # selectors of the twin know no more than those of the run
    table["selectors"] = {"uniform": {}}
    if record.selector in SELECTORS:
        table["selectors"] = {record.selector: {}}
        with suppress(FedcohortError):  # parameters of another version
            SELECTORS.create(record.selector, **record.parameters)
            table["selectors"] = {record.selector: dict(record.parameters)}
    return table


def scenario(fit: Fit, clients: Clients, stand: Stand, choice: tuple[float, float, float | None]) -> dict[str, Any]:
    """Return the parts of a configuration that differ between twins: ``[scenario]`` and ``[local]``."""
    rate, noise, alpha = choice
    record = fit.record
    sizes = twin_sizes(clients.sizes, stand.samples)
    partition: dict[str, Any] = {"name": "listed", "sizes": sizes.tolist()}
    if record.mixes is not None and record.classes == stand.classes:
        shares = record.mixes / record.mixes.sum(axis=1, keepdims=True)
        partition["mixes"] = [_listed(row) for row in shares]
    else:
        partition["alpha"] = fit.alpha if fit.alpha is not None else alpha
    table: dict[str, Any] = {"partition": partition}
    if noise:
        table["noise"] = {"level": noise}
    if clients.seconds is not None:
        work = np.ceil(sizes / BATCH) * np.minimum(sizes, BATCH)
        devices: dict[str, Any] = {
            "own_speeds": _listed(work / clients.seconds),
            "own_failures": _listed(clients.failures),
            "jitter": float(f"{clients.jitter:.4g}"),
            "bandwidth": 1e15,  # recorded times include sending
        }
        if clients.gaps is not None:
            state = {"session": clients.session, "gap": float(np.exp(np.log(clients.gaps).mean())), "spread": 0.5}
            state |= {"daily": clients.daily, "peak": clients.peak % 24}
            devices["states"] = {"online": {k: float(f"{v:.4g}") for k, v in state.items()}}
            devices["states"]["online"]["own_gaps"] = _listed(clients.gaps)
        table["devices"] = devices
        if record.deadline is not None:
            table["deadline"] = float(f"{record.deadline:.4g}")
    else:
        table["failure"] = float(min(clients.failures.mean(), 0.99))
        if not fit.always_on:
            table["availability"] = {"name": "bernoulli", "probabilities": _listed(np.clip(fit.share, 0.01, 1.0))}
    return {"scenario": table, "local": {"lr": rate}}


def _listed(values: FloatArray) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def twin_sizes(sizes: FloatArray, samples: int) -> IntArray:
    """Scale sizes so that together they are the data's, and nobody has fewer than a few samples."""
    scaled: IntArray = np.maximum(np.rint(sizes * (samples / sizes.sum())), _FEWEST).astype(np.int64)
    return scaled


def base(fit: Fit, stand: Stand, model: str | None) -> dict[str, Any]:
    """Return what all twins share."""
    return {
        "name": "twin",
        "data": stand.section,
        "model": {"name": model or "mlp"},
        "local": {"epochs": 1, "batch_size": BATCH},
        "seeds": [0],
        **wished(fit),
    }


def calibrate(fit: Fit, stand: Stand, model: str | None, folder: Path) -> Learning:
    """Choose learning rate, label noise and, if unknown, label skew by the recorded curve."""
    record, curve = fit.record, fit.record.curve
    early = curve[curve[:, 0] < MAX_ROUNDS]
    if FEWEST_ROUNDS <= len(early) < len(curve):
        curve = early
        fit.assumed.append(f"Twins play {MAX_ROUNDS} rounds and learn like the first {MAX_ROUNDS} of the record.")
    alphas: Sequence[float | None] = (None,) if fit.alpha is not None else ALPHAS
    everything = tuple((rate, noise, alpha) for rate in RATES for noise in NOISES for alpha in alphas)
    if len(curve) < 3 or curve[:, 1].max() - curve[:, 1].min() < 1e-9:
        choices = tuple(choice for choice in everything if choice[:2] == (0.1, 0.0))
        why = "The journal has no accuracy or loss of the global model that changes over three rounds or more"
        verdict = f"{why}, so how fast it learns is assumed."
        return Learning(choices, np.full(len(choices), 1 / len(choices)), verdict, False, np.zeros((0, 5)))
    clients = fit.draw(None)
    settings = [{"name": f"{i}", **scenario(fit, clients, stand, choice)} for i, choice in enumerate(everything)]
    results = played({**base(fit, stand, model), "seeds": [0, 1, 2], "settings": settings}, folder / "calibration")
    rounds, recorded = curve[:, 0], smooth(curve[:, 1])
    curves: dict[int, list[FloatArray]] = {}
    for info in results.runs:
        x, y = scores(results, info)
        # A longer record that was rarely evaluated is compared by how far along both are.
        at = rounds if rounds[-1] <= x[-1] else rounds[0] + (rounds - rounds[0]) * (x[-1] / rounds[-1])
        curves.setdefault(int(info.setting["name"]), []).append(smooth(np.interp(at, x, y)))
    simulated = np.array([curves[i] for i in range(len(everything))])  # (choices, seeds, m)
    if not record.is_share:
        # Other data have other units: compare how far along the way from the first to the last each curve is.
        recorded = (recorded - recorded[0]) / (recorded[-1] - recorded[0] or 1.0)
        start, span = simulated[:, :, :1], simulated[:, :, -1:] - simulated[:, :, :1]
        simulated = (simulated - start) / np.where(np.abs(span) < 1e-3, 1.0, span)
    # One recorded run differs from the mean by chance as much as one seed does, but not every round independently.
    chance = max(float(simulated.var(axis=1, ddof=1).mean()), _LEAST_CHANCE**2)
    mean = simulated.mean(axis=1)
    error = ((mean - recorded) ** 2).mean(axis=1)
    chances = np.exp(-0.5 * len(rounds) / _SMOOTH * (error - error.min()) / chance)
    chosen = np.flatnonzero(chances > 0.05)
    weights = chances[chosen] / chances[chosen].sum()
    margin = 2 * math.sqrt(chance)
    low, high = mean[chosen].min(axis=0) - margin, mean[chosen].max(axis=0) + margin
    if record.is_share:
        low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
    inside = float(((recorded >= low) & (recorded <= high)).mean())
    fits = bool(error.min() <= 4 * chance) and len(rounds) >= FEWEST_ROUNDS
    verdict = f"The recorded curve ({record.metric}) lies within the twins' spread in {inside:.0%} of its rounds"
    if len(rounds) < FEWEST_ROUNDS:
        verdict += f", but it has only {len(rounds)}."
    else:
        verdict += "." if fits else ": the twins do not learn as this federation does, so no claim about speed is safe."
    band = np.stack([rounds, recorded, low, weights @ mean[chosen], high], axis=1)
    return Learning(tuple(everything[i] for i in chosen), weights, verdict, fits, band)


def played(table: Mapping[str, Any], folder: Path, *, own_seeds: bool = False) -> Results:
    """Run an experiment, or continue it, or read it if it is finished.

    Parameters
    ----------
    folder : path
        Where it goes; a digest of the table is added to the name, so that nobody reads the results of another one.
    own_seeds : bool
        Give every setting, which is a twin, seeds that no other has: chance in one twin says nothing about another.
    """
    folder = folder.with_name(f"{folder.name}-{sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:8]}")
    resume = (folder / "meta.json").exists()
    if resume:
        results = load(folder)
        if all(info.state != "running" for info in results.runs):
            return results
    experiment = Experiment.from_dict(table)
    if own_seeds:
        plans = [replace(p, seed=len(SEEDS) * int(p.setting_name) + p.seed) for p in experiment.plans]
        experiment = replace(experiment, plans=tuple(plans))
    if play(simulator().Simulation(experiment, folder, resume=resume), err(True)) == "interrupted":
        raise KeyboardInterrupt
    return load(folder)


def scores(results: Results, info: RunInfo) -> tuple[FloatArray, FloatArray]:
    """Return the evaluated rounds of a run and their accuracies."""
    x, y = results.column(info, "round").astype(float), results.column(info, "accuracy").astype(float)
    known = np.isfinite(y)
    return (x[known], y[known]) if known.any() else (np.zeros(1), np.zeros(1))


def smooth(values: FloatArray, width: int = _SMOOTH) -> FloatArray:
    """Return the mean over up to ``width`` neighbours, fewer at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    low, high = np.maximum(places - width // 2, 0), np.minimum(places + width // 2 + 1, len(values))
    return np.asarray((sums[high] - sums[low]) / (high - low))


def twin(fit: Fit, stand: Stand, learning: Learning, model: str | None) -> dict[str, Any]:
    """Return the configuration of the most likely twin."""
    best = learning.choices[int(learning.chances.argmax())]
    return merge_tables(base(fit, stand, model), scenario(fit, fit.draw(None), stand, best))
