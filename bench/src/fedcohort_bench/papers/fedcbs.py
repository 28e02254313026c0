"""Fed-CBS's Tables 1 to 7 and Figure 1.

.. [Zhang2023] J. Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
   Class-Imbalance Reduction", ICML 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcohort_bench.papers.declare import Beats, Exhibit, Grid, Study, row

PAPER = "Fed-CBS, Zhang et al. 2023"
_NAMES = {
    "all": "all",
    "uniform": "rand",
    "power-of-choice": "pow-d",
    "fed-cucb": "Fed-cucb",
    "astraea": "Fed-cucb+ (Astraea)",
    "fedcbs": "Fed-CBS",
    "fedcbs-chance": "fedcbs-chance (ours)",
    "balanced": "balanced (ours)",
}
_LOCAL = {"batch_size": 50, "epochs_of_largest": 5, "lr": 0.01, "lr_decay": 0.9992, "weight_decay": 5e-4}
_CUCB = (
    "Fed-cucb estimates labels from the update of the output bias, not from gradients on a balanced auxiliary set, "
    "because our server has no such set."
)
_POOL = "Pow-d asks twice the cohort, 20 clients, as in the paper's Appendix C.2."
_FEWER = (
    "Tables 1 and 6 stop at 1,500 of the paper's 3,000 rounds: the slowest published mean to target is 1,147, and best "
    "accuracies are compared after equally many rounds."
)
_SELECTORS: dict[str, Any] = {
    "all": {},
    "uniform": {},
    "power-of-choice": {"d": 20},
    "fed-cucb": {},
    "astraea": {"turns": False},
    "fedcbs": {},
    "fedcbs-chance": {},
    "balanced": {},
}
_ALPHAS = (0.1, 0.2, 0.5)
_CASES = ("case1-3", "case1-5", "case2-3", "case2-5")


def _base(
    data: str, settings: tuple[Mapping[str, Any], ...], selectors: Mapping[str, Any], rounds: int
) -> dict[str, Any]:
    return {
        "data": {"name": data},
        "model": {"name": "lenet" if data == "cifar10" else "mlp-64"},
        "local": _LOCAL,
        "aggregator": {"name": "fedavg" if data == "cifar10" else "fednova"},
        "run": {
            "rounds": rounds,
            "cohort": 10,
            "eval_every": 5 if data == "cifar10" else 1,
            "terminal": 50,
            "baseline": "uniform",
        },
        "selectors": dict(selectors),
        "settings": list(settings),
    }


def _dirichlet(data: str) -> Study:
    targets = {"cifar10": (0.45, 0.47, 0.50), "fashion-mnist": (0.78, 0.80, 0.82)}[data]
    rounds = {"cifar10": 1500, "fashion-mnist": 500}[data]
    parts = {}
    for alpha, target in zip(_ALPHAS, targets, strict=True):
        setting = {
            "name": f"dir-{alpha:g}",
            "scenario": {"preset": f"fedcbs-dir-{alpha:g}"},
            "run": {"targets": [target]},
        }
        parts[f"dir-{alpha:g}"] = _base(data, (setting,), _SELECTORS, rounds)
    difference = _FEWER if data == "cifar10" else "500 of the paper's 3,000 rounds: its slowest mean to target is 331."
    differences = (_CUCB, _POOL, difference)
    short = "cifar10" if data == "cifar10" else "fmnist"
    return Study(f"fedcbs-{short}", parts, 4, _NAMES, "uniform", differences)


def _cases(data: str) -> Study:
    rounds = {"cifar10": 1500, "fashion-mnist": 1000}[data]
    chosen = {label: value for label, value in _SELECTORS.items() if label != "astraea"}
    parts = {
        case: _base(data, ({"name": case, "scenario": {"preset": f"fedcbs-{case}"}},), chosen, rounds)
        for case in _CASES
    }
    difference = f"{rounds:,} of the paper's 3,000 rounds: best accuracies are lower for all methods."
    short = "cifar10" if data == "cifar10" else "fmnist"
    return Study(f"fedcbs-{short}-cases", parts, 4, _NAMES, "uniform", (_CUCB, _POOL, difference))  # fmt: skip


def _figure_1() -> Study:
    """All, random and class-balanced cohorts, 200 rounds."""
    settings = tuple(
        {"name": name, "scenario": {"preset": f"fedcbs-{preset}"}}
        for name, preset in (("a", "one-class"), ("b", "two-classes"), ("c", "imbalanced"))
    )
    part = _base("fashion-mnist", settings, {"all": {}, "uniform": {}, "fedcbs": {}}, 200)
    part["local"] = {"batch_size": 50, "epochs": 5, "lr": 0.01, "lr_decay": 0.9992, "weight_decay": 5e-4}
    part["aggregator"] = {"name": "fedavg"}
    names = {"all": "All", "uniform": "Random", "fedcbs": "Class Balanced"}
    return Study(
        "fedcbs-figure-1", {"all": part}, 3, names, "uniform",
        (
            "Fashion-MNIST instead of MNIST, which needs a download.",
            "\"Class Balanced\" is Fed-CBS's draw; the paper balances cohorts by hand.",
            "Without panel (d): the paper does not describe two classes per client in a class-imbalanced federation.",
        ),
    )  # fmt: skip


def _writers() -> Study:
    """FEMNIST by its writers: 300 instead of 3,500."""

    def part(name: str, cohort: int, selectors: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "data": {"name": "femnist"},
            "model": {"name": "lenet"},
            "local": _LOCAL,
            "run": {"rounds": 1500, "eval_every": 5, "targets": [0.75], "terminal": 50, "baseline": "uniform"},
            "selectors": dict(selectors),
            "settings": [
                {
                    "name": name,
                    "scenario": {
                        "partition": {"name": "natural"},
                        "availability": {"name": "uniform-share", "share": 0.3},
                    },
                    "run": {"cohort": cohort},
                }
            ],
        }

    names = {**_NAMES, "uniform": "rand-30", "uniform-more": "rand-120"}
    few: dict[str, Any] = {
        "uniform": {},
        "fed-cucb": {},
        "fedcbs": {},
        "fedcbs-chance": {},
        "balanced": {},
    }
    return Study(
        "fedcbs-femnist",
        {"few": part("few", 8, few), "more": part("more", 31, {"uniform": {}})},
        3, names, "uniform",
        (
            "300 of the 3,500 writers: 30% instead of 10% are available in each round, and cohorts are 8 and 31 of "
            "these 90 writers, where the paper takes 30 and 120 of 350.",
            "LeNet on 28 x 28 pixels; the paper does not name its model.",
            _CUCB,
        ),
    )  # fmt: skip


CIFAR, FMNIST = _dirichlet("cifar10"), _dirichlet("fashion-mnist")
CIFAR_CASES, FMNIST_CASES = _cases("cifar10"), _cases("fashion-mnist")
_COLUMNS = ("all", "uniform", "power-of-choice", "fed-cucb", "fedcbs")
TABLE_1_ROUNDS = {
    "dir-0.1": row(_COLUMNS, (757, 155), (951, 202), (1147, 130), (861, 328), (654, 96)),
    "dir-0.2": row(_COLUMNS, (746, 95), (762, 105), (741, 111), (803, 220), (475, 110)),
    "dir-0.5": row(_COLUMNS, (426, 67), (537, 115), (579, 140), (1080, 309), (384, 74)),
}
TABLE_1_QCID = {
    "dir-0.1": row(_COLUMNS, (1.01, 0.01), (8.20, 0.21), (12.36, 0.26), (7.09, 2.27), (0.62, 0.20)),
    "dir-0.2": row(_COLUMNS, (0.93, 0.03), (7.54, 0.27), (10.6, 0.48), (5.93, 1.01), (0.51, 0.12)),
    "dir-0.5": row(_COLUMNS, (0.72, 0.03), (5.87, 0.24), (7.36, 0.57), (6.47, 0.77), (0.36, 0.04)),
}
TABLE_2 = {
    "case1-3": row(_COLUMNS, (55.17, 0.94), (50.99, 0.97), (53.51, 0.34), (55.11, 0.26), (56.86, 0.34)),
    "case1-5": row(_COLUMNS, (50.93, 1.64), (47.36, 2.34), (52.73, 1.85), (53.75, 0.58), (54.94, 0.73)),
    "case2-3": row(_COLUMNS, (54.01, 0.60), (50.81, 2.03), (53.98, 1.87), (54.48, 1.31), (57.71, 0.50)),
    "case2-5": row(_COLUMNS, (50.42, 1.27), (48.33, 3.03), (53.54, 1.18), (53.38, 1.48), (57.99, 0.46)),
}
TABLE_3 = {
    "case1-3": row(_COLUMNS, (2.90, 0.02), (9.33, 0.17), (13.70, 0.39), (1.39, 0.37), (0.57, 0.04)),
    "case1-5": row(_COLUMNS, (6.17, 0.04), (12.36, 0.20), (16.63, 0.74), (3.43, 0.76), (2.41, 0.07)),
    "case2-3": row(_COLUMNS, (2.50, 0.00), (9.91, 0.16), (13.68, 0.72), (1.89, 1.72), (0.001, 0.001)),
    "case2-5": row(_COLUMNS, (4.44, 0.00), (11.70, 0.20), (15.68, 0.96), (2.63, 2.40), (0.002, 0.001)),
}
TABLE_4_ROUNDS = {
    "dir-0.1": row(_COLUMNS, (115, 17), (185, 27), (135, 22), (124, 37), (92, 6)),
    "dir-0.2": row(_COLUMNS, (173, 45), (284, 54), (218, 55), (216, 24), (166, 36)),
    "dir-0.5": row(_COLUMNS, (258, 44), (331, 55), (281, 54), (284, 51), (218, 36)),
}
TABLE_4_QCID = {
    "dir-0.1": row(_COLUMNS, (1.40, 0.11), (8.20, 0.19), (11.72, 0.33), (4.24, 0.59), (0.15, 0.02)),
    "dir-0.2": row(_COLUMNS, (1.39, 0.22), (7.67, 0.26), (10.31, 0.24), (4.43, 0.38), (0.21, 0.01)),
    "dir-0.5": row(_COLUMNS, (0.94, 0.07), (5.93, 0.26), (7.68, 0.28), (4.34, 0.85), (0.22, 0.01)),
}
TABLE_5 = {
    "case1-3": row(_COLUMNS, (78.42, 0.79), (78.46, 0.90), (81.08, 0.21), (80.83, 0.91), (81.75, 0.34)),
    "case1-5": row(_COLUMNS, (72.42, 2.22), (75.49, 2.56), (80.15, 0.41), (80.50, 0.95), (81.42, 0.50)),
    "case2-3": row(_COLUMNS, (74.64, 1.87), (78.80, 0.55), (81.13, 0.41), (79.94, 0.31), (81.95, 0.57)),
    "case2-5": row(_COLUMNS, (67.16, 4.13), (74.17, 2.01), (80.05, 0.39), (80.00, 0.58), (81.92, 0.57)),
}
_GREEDY = ("astraea", "fed-cucb", "fedcbs")
TABLE_6_BEST = {
    "dir-0.1": row(_GREEDY, (49.10, 0.70), (46.84, 0.73), (50.36, 0.58)),
    "dir-0.2": row(_GREEDY, (50.61, 0.77), (48.80, 1.05), (51.95, 0.57)),
    "dir-0.5": row(_GREEDY, (52.71, 0.27), (50.98, 0.56), (54.21, 0.34)),
}
TABLE_6_QCID = {
    "dir-0.1": row(_GREEDY, (0.83, 0.18), (7.09, 2.27), (0.62, 0.20)),
    "dir-0.2": row(_GREEDY, (0.68, 0.05), (5.93, 1.01), (0.51, 0.12)),
    "dir-0.5": row(_GREEDY, (0.43, 0.04), (6.47, 0.77), (0.36, 0.04)),
}
TABLE_7 = {
    "few": row(("uniform", "fed-cucb", "fedcbs"), (1106, 24), (1124, 31), (980, 17)),
    "more": row(("uniform",), (1394, 11)),
}

_DRAWN = (
    "The class imbalance that the paper gives for Fed-CBS does not follow from its own rule. With the text's "
    "probabilities (beta_m = m, floor 1e-20, no exploration), the means of 4,000 cohorts are 1.46, 2.67, 0.50 and 0.72 "
    "in the four cases; ours are 1.48, 2.79, 0.49 and 0.69. The published figures are near the least possible, and for "
    "case 1 with 3:1 below it: there, the best cohorts of the 36 available clients have 1.14. All 36 together have "
    "4.2, not 2.90 (with 5:1, they have 6.1, and 6.17 in the paper)."
)
_EARLY = "Only a fifth of the planned rounds were run, so all methods are far from the published accuracies."

EXHIBITS = (
    Exhibit(
        "fedcbs-table-1",
        PAPER,
        "Table 1",
        "rounds to target and class imbalance, CIFAR-10",
        CIFAR,
        (Grid("rounds", TABLE_1_ROUNDS, "fedcbs"), Grid("qcid", TABLE_1_QCID, "fedcbs")),
    ),
    Exhibit(
        "fedcbs-table-2",
        PAPER,
        "Table 2",
        "best accuracy in class-imbalanced federations, CIFAR-10",
        CIFAR_CASES,
        (Grid("best", TABLE_2, "fedcbs"),),
        notes=(_EARLY,),
    ),
    Exhibit(
        "fedcbs-table-3",
        PAPER,
        "Table 3",
        "class imbalance in class-imbalanced federations, CIFAR-10",
        CIFAR_CASES,
        (Grid("qcid", TABLE_3, "fedcbs"),),
        notes=(_DRAWN,),
    ),
    Exhibit(
        "fedcbs-table-4",
        PAPER,
        "Table 4",
        "rounds to target and class imbalance, Fashion-MNIST",
        FMNIST,
        (Grid("rounds", TABLE_4_ROUNDS, "fedcbs"), Grid("qcid", TABLE_4_QCID, "fedcbs")),
    ),
    Exhibit(
        "fedcbs-table-5",
        PAPER,
        "Table 5",
        "best accuracy in class-imbalanced federations, Fashion-MNIST",
        FMNIST_CASES,
        (Grid("best", TABLE_5, "fedcbs"),),
    ),
    Exhibit(
        "fedcbs-table-6",
        PAPER,
        "Table 6",
        "against greedy selection with exact labels, CIFAR-10",
        CIFAR,
        (Grid("best", TABLE_6_BEST, "fedcbs"), Grid("qcid", TABLE_6_QCID, "fedcbs")),
    ),
    Exhibit(
        "fedcbs-table-7",
        PAPER,
        "Table 7",
        "rounds to 75% on FEMNIST",
        _writers(),
        (Grid("rounds", TABLE_7, "fedcbs"),),
    ),
    Exhibit(
        "fedcbs-figure-1",
        PAPER,
        "Figure 1",
        "all, random and class-balanced cohorts",
        _figure_1(),
        claims=(
            Beats("Random selection is worse than balanced cohorts.", "terminal", "fedcbs", "uniform", ("a", "b", "c")),
            Beats(
                "Random selection is worse than all where the federation is balanced.",
                "terminal",
                "all",
                "uniform",
                ("a", "b"),
            ),
            Beats(
                "Where the federation is class-imbalanced, balanced cohorts beat all.",
                "terminal",
                "fedcbs",
                "all",
                ("c",),
            ),
        ),
    ),
)
