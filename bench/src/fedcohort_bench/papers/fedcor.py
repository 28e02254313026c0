"""FedCor's Table 1 and Figures 5 to 7.

.. [Tang2022] M. Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated
   Learning", CVPR 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from fedcohort.simulate.store.results import Results, RunInfo, open_journal
from fedcohort_bench.papers.declare import Beats, Exhibit, Grid, Near, Study, row

PAPER = "FedCor, Tang et al. 2022"
_NAMES = {
    "uniform": "Rand",
    "active-fl": "AFL",
    "power-of-choice": "Pow-d",
    "fedcor": "FedCor",
    "fedcbs-chance": "fedcbs-chance (ours, not in the paper)",
    "balanced": "balanced (ours)",
}
_SETTINGS = ("2spc", "1spc", "dir")
_COHORT = {"2spc": 5, "1spc": 10, "dir": 5}
_TARGET = {
    "fashion-mnist": {"2spc": 0.69, "1spc": 0.62, "dir": 0.64},
    "cifar10": {"2spc": 0.62, "1spc": 0.36, "dir": 0.54},
}
_LOCAL = {
    "fashion-mnist": {
        "batch_size": 64, "steps": 20, "lr": 0.005, "milestones": [150, 300], "milestone_factor": 0.5,
        "weight_decay": 1e-4,
    },
    "cifar10": {"batch_size": 50, "steps": 40, "lr": 0.01, "weight_decay": 3e-4},
}  # fmt: skip
_MODEL = {"fashion-mnist": "mlp", "cifar10": "fedcor-cnn"}
_ROUNDS = {"fashion-mnist": 500, "cifar10": 2000}
_FEDCOR = {
    "fashion-mnist": {"warmup": 15, "interval": 10, "annealing": 0.95, "discount": 0.9},
    "cifar10": {"warmup": 20, "interval": 50, "annealing": 0.9, "discount": 0.99},
}
_SHORT = {"fashion-mnist": "fmnist", "cifar10": "cifar10"}
_STEPS = (
    "Adam makes 50 steps for each fit of the Gaussian process. The paper does not say how many; with more, one noisy "
    "sample wipes out the embedding."
)
_PAID = "Losses that a method asks for cost traffic as queries, also for the baselines; rounds are not affected."
_POWER = (
    "We read the paper's d = 2NC for Pow-d as twice the cohort: C is a number of clients there, and 2NC would be more "
    "than all clients."
)


def _base(data: str, settings: tuple[str, ...], selectors: Mapping[str, Any], rounds: int = 0) -> dict[str, Any]:
    return {
        "data": {"name": data},
        "model": {"name": _MODEL[data]},
        "local": _LOCAL[data],
        "aggregator": {"name": "mean"},
        "run": {
            "rounds": rounds or _ROUNDS[data],
            "eval_every": 1 if data == "fashion-mnist" else 5,
            "terminal": 50,
            "baseline": "uniform",
        },
        "selectors": dict(selectors),
        "settings": [
            {
                "name": name,
                "scenario": {"preset": f"fedcor-{name}"},
                "run": {"cohort": _COHORT[name], "targets": [_TARGET[data][name]]},
            }
            for name in settings
        ],
    }


def _table(data: str) -> Study:
    selectors = {
        "uniform": {},
        "active-fl": {},
        "power-of-choice": {},
        "fedcor": _FEDCOR[data],
        "fedcbs-chance": {},
        "balanced": {},
    }
    parts = (
        {"all": _base(data, _SETTINGS, selectors)}
        if data == "fashion-mnist"
        else {name: _base(data, (name,), selectors) for name in _SETTINGS}
    )
    differences = [_STEPS, _PAID, _POWER]
    if data == "cifar10":
        differences.append("The model is evaluated every fifth round, so rounds to target are up to 4 too high.")
    return Study(f"fedcor-{_SHORT[data]}", parts, 5, _NAMES, "uniform", tuple(differences))


FMNIST, CIFAR = _table("fashion-mnist"), _table("cifar10")
_COLUMNS = ("uniform", "active-fl", "power-of-choice", "fedcor")
TABLE_1 = {
    "fmnist": {
        "2spc": row(_COLUMNS, (295.8, 92.0), (218.6, 117.3), (126.6, 78.2), (94.8, 18.4)),
        "1spc": row(_COLUMNS, None, None, (167.2, 72.3), (84.0, 53.1)),
        "dir": row(_COLUMNS, (141.0, 73.0), (169.0, 166.1), (123.0, 101.0), (68.8, 27.5)),
    },
    "cifar10": {
        "2spc": row(_COLUMNS, (1561.2, 236.2), None, (1558.2, 227.0), (1033.4, 123.7)),
        "1spc": row(_COLUMNS, (1750.4, 190.3), (1845.2, 28.8), (1752.2, 186.2), (1269.2, 70.6)),
        "dir": row(_COLUMNS, None, (1524.4, 267.9), (1355.2, 151.3), (1076.8, 262.8)),
    },
}


_NOTES = {
    "fmnist": (
        "With the local training, batch size and learning rate of Appendix C.1, all methods reach the target in a "
        "sixth to two thirds of the paper's rounds; random selection gains most. Here the first round that reaches the "
        "target counts. So ratios can be compared but rounds cannot, and a margin over random selection that rests on "
        "its 296 rounds, or on its never reaching the target, cannot be reproduced.",
        "Under Dir, the targets are reached while FedCor is warming up or just after (15 of about 50 rounds are "
        "uniform), so it has little time to be faster than Pow-d; it ends 3.6 points higher "
        "(bench/experiments/fedcor).",
    )
}

_PEAKS = (
    "The accuracy of random selection jumps from round to round. Under 2SPC it touches the target at a peak, in round "
    "675, but its last rounds average 53.7%; FedCor that is never fitted again averages 60.3%, without a peak that "
    "high in half of the rounds."
)
_ANNEALED = (
    "In a thousand rounds, a client is picked fifty times on average. That leaves 0.6 of its weight with beta 0.99, "
    "and less than 0.01 with 0.9: with 0.99, selection has hardly begun to spread its picks."
)


def _figure_5(data: str) -> Study:
    """The paper's three intervals between fits (the last: never after warm-up), and random selection."""
    intervals = {
        "fashion-mnist": ((10, 0.95), (20, 0.95), (None, 0.99)),
        "cifar10": ((50, 0.97), (100, 0.97), (None, 0.999)),
    }
    selectors: dict[str, Any] = {"uniform": {}}
    for interval, annealing in intervals[data]:
        label = "never" if interval is None else f"every-{interval}"
        changes = {"annealing": annealing, "interval": interval or _ROUNDS[data]}  # never is the length of the run
        selectors[label] = {"name": "fedcor", **_FEDCOR[data], **changes}
    names = {
        "uniform": "Rand",
        **{label: f"FedCor, GP fitted {label.replace('-', ' ')}" for label in selectors if label != "uniform"},
    }
    parts = {"all": _base(data, _SETTINGS, selectors)}
    return Study(f"fedcor-figure-5-{_SHORT[data]}", parts, 3, names, "uniform", (_STEPS,))


def _figure_6(data: str) -> Study:
    """Annealing coefficients under 2SPC."""
    values = {"fashion-mnist": (0.5, 0.75, 0.9), "cifar10": (0.9, 0.95, 0.99)}[data]
    selectors: dict[str, Any] = {"uniform": {}}
    selectors |= {f"beta-{value:g}": {"name": "fedcor", **_FEDCOR[data], "annealing": value} for value in values}
    names = {"uniform": "Rand", **{f"beta-{value:g}": f"FedCor, beta {value:g}" for value in values}}
    parts = {"all": _base(data, ("2spc",), selectors)}
    return Study(f"fedcor-figure-6-{_SHORT[data]}", parts, 3, names, "uniform", (_STEPS,))


def _neighbours(results: Results, run: RunInfo) -> Mapping[str, float]:
    """Return the share of clients with the same main class as the client with the nearest embedding, by cosine."""
    if run.selector != "fedcor":
        return {}
    with closing(open_journal(results.journal(run))) as journal:
        points = np.asarray(journal.state("")["embedding"], np.float64)
    points = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-300)
    similarity = points @ points.T
    np.fill_diagonal(similarity, -np.inf)
    main = results.federation(run).label_counts.argmax(axis=1)
    return {"neighbours": float((main[similarity.argmax(axis=1)] == main).mean())}


def _figure_7(data: str) -> Study:
    """The embeddings after warm-up under 1SPC; "chance" is the embedding before any fit."""
    warmup = _FEDCOR[data]["warmup"]
    selectors = {
        "chance": {"name": "fedcor", **_FEDCOR[data], "steps": 0},
        "fedcor": _FEDCOR[data],
    }
    names = {"chance": "embeddings before any fit", "fedcor": "FedCor's embeddings"}
    part = _base(data, ("1spc",), selectors, rounds=int(warmup))
    part["run"]["baseline"] = "chance"
    return Study(f"fedcor-figure-7-{_SHORT[data]}", {"all": part}, 5, names, "chance", (_STEPS,), _neighbours)


def _exhibits() -> list[Exhibit]:
    exhibits = []
    for data, study in (("fashion-mnist", FMNIST), ("cifar10", CIFAR)):
        short = _SHORT[data]
        title = "rounds to a target accuracy under 2SPC, 1SPC and Dirichlet"
        exhibits.append(
            Exhibit(
                f"fedcor-table-1-{short}",
                PAPER,
                f"Table 1, {'FMNIST' if short == 'fmnist' else 'CIFAR-10'}",
                title,
                study,
                (Grid("rounds", TABLE_1[short], "fedcor"),),
                notes=_NOTES.get(short, ()),
            )
        )
        figure_5, figure_6, figure_7 = _figure_5(data), _figure_6(data), _figure_7(data)
        first, *_, never = [label for label in figure_5.parts["all"]["selectors"] if label != "uniform"]
        exhibits.append(
            Exhibit(
                f"fedcor-figure-5-{short}",
                PAPER,
                "Figure 5",
                "how often the Gaussian process is fitted",
                figure_5,
                claims=(
                    Beats(
                        "Even if the process is never fitted after warm-up, FedCor converges faster than random "
                        "selection.",
                        "rounds",
                        never,
                        "uniform",
                        _SETTINGS,
                    ),
                    Near(
                        "Accuracy degrades very slightly with larger intervals (we read: by at most two points).",
                        "terminal",
                        never,
                        first,
                        _SETTINGS,
                        2.0,
                        one_sided=True,
                    ),
                ),
                notes=(_PEAKS,) if data == "cifar10" else (),
            )
        )
        low, *_, high = [label for label in figure_6.parts["all"]["selectors"] if label != "uniform"]
        exhibits.append(
            Exhibit(
                f"fedcor-figure-6-{short}",
                PAPER,
                "Figure 6",
                "annealing coefficient beta under 2SPC",
                figure_6,
                claims=(
                    Beats("A smaller beta makes selection more uniform.", "unevenness", low, high, ("2spc",)),
                    Near(
                        "The learning curves are almost invariant (we read: they end within two points).",
                        "terminal",
                        low,
                        high,
                        ("2spc",),
                        2.0,
                    ),
                    Beats(
                        "FedCor with the smallest beta still beats uniform sampling.",
                        "rounds",
                        low,
                        "uniform",
                        ("2spc",),
                    ),
                ),
                notes=(_ANNEALED,) if data == "cifar10" else (),
            )
        )
        exhibits.append(
            Exhibit(
                f"fedcor-figure-7-{short}",
                PAPER,
                "Figure 7",
                "client embeddings after warm-up under 1SPC",
                figure_7,
                claims=(
                    Beats(
                        "Embeddings of clients with the same label lie together.",
                        "neighbours",
                        "fedcor",
                        "chance",
                        ("1spc",),
                    ),
                ),
            )
        )
    return exhibits


EXHIBITS = tuple(_exhibits())
