"""HiCS-FL's Table 2, its Fashion-MNIST column.

.. [Chen2024] H. Chen, H. Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
   Learning", NeurIPS 2024, arXiv:2310.00198.
"""

from __future__ import annotations

from fedcohort.studies.papers.declare import Exhibit, Grid, Study, row

PAPER = "HiCS-FL, Chen and Vikalo 2024"
_NAMES = {
    "uniform": "random",
    "power-of-choice": "Pow-d",
    "clustered": "clustered",
    "divfl": "DivFL",
    "fedcor": "FedCor",
    "hics-fl": "HiCS-FL",
    "balanced": "balanced (ours)",
}
_COLUMNS = ("uniform", "power-of-choice", "clustered", "divfl", "fedcor", "hics-fl")

STUDY = Study(
    "hicsfl-fmnist",
    {
        "all": {
            "data": {"name": "fashion-mnist"},
            "model": {"name": "mlp"},
            "local": {"batch_size": 64, "epochs": 2, "lr": 0.01},
            "aggregator": {"name": "fedavg"},
            "run": {"rounds": 500, "cohort": 5, "targets": [0.75], "terminal": 50, "baseline": "uniform"},
            "selectors": {
                "uniform": {},
                "power-of-choice": {},
                "clustered": {"by": "similarity"},
                "divfl": {},
                "fedcor": {},
                "hics-fl": {},
                "balanced": {},
            },
            "settings": [
                {
                    "name": "50-clients",
                    "scenario": {
                        "partition": {
                            "name": "mixed-heterogeneity",
                            "clients": 50,
                            "alphas": [0.001, 0.002, 0.005, 0.01, 0.5],
                        }
                    },
                }
            ],
        }
    },
    3,
    _NAMES,
    "uniform",
    (
        "We had only the table's figures, not its setting. The 50 clients are the paper's; five groups of clients with "
        "Dirichlet concentrations 0.001 to 0.5, cohorts of 5, and two local epochs of SGD with batch 64 and learning "
        "rate 0.01 on an MLP are our choice. Orderings and ratios can be compared, rounds cannot.",
        "HiCS-FL has the paper's temperature for Fashion-MNIST, 0.0025, which belongs to the paper's learning rate of "
        "0.001.",
    ),
)

EXHIBITS = (
    Exhibit(
        "hicsfl-table-2",
        PAPER,
        "Table 2, Fashion-MNIST",
        "rounds to 75% with 50 clients",
        STUDY,
        (Grid("rounds", {"50-clients": row(_COLUMNS, 149, 79, 114, 478, 88, 60)}, "hics-fl"),),
    ),
)
