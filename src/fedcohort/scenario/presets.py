"""The papers' settings by name: each federation, and how the paper trains on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedcohort.core.errors import UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort.scenario.availability import ClassBiased, UniformShare
from fedcohort.scenario.classwise import ClassesPerClient, DominantClass, Iid, Imbalanced, Shards
from fedcohort.scenario.dirichlet import (
    ClassHeterogeneity,
    ClientHeterogeneity,
    DirichletLabels,
    DirichletQp,
    Skewness,
)
from fedcohort.scenario.latency import ShiftedExponential
from fedcohort.scenario.noise import LabelNoise
from fedcohort.scenario.predefined import Natural
from fedcohort.scenario.scenario import Scenario


@dataclass(frozen=True)
class PaperTraining:
    """How a paper trains on one dataset.

    Attributes
    ----------
    local : mapping
        Keys of the section ``[local]`` of an experiment.
    targets : tuple of float
        Accuracies for which the paper reports the number of rounds.
    ours : tuple of str
        What the paper does not specify, so that we chose it.
    """

    local: Mapping[str, Any]
    rounds: int
    targets: tuple[float, ...] = ()
    aggregator: str = "fedavg"
    ours: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preset:
    """A named scenario, its source, how many clients are selected per round, and how they train.

    ``training`` is by dataset. Other datasets use the first entry, without its targets.
    """

    scenario: Scenario
    source: str
    meaning: str
    cohort: int | None = None  # None: the paper does not say
    training: Mapping[str, PaperTraining] = field(
        default_factory=lambda: {"": PaperTraining({}, 100, ours=("all of it",))}
    )

    def training_on(self, data: str) -> PaperTraining:
        """Return how clients train on a dataset."""
        if data in self.training:
            return self.training[data]
        return replace(next(iter(self.training.values())), targets=())


def _fedcor(fashion: float, cifar: float) -> dict[str, PaperTraining]:
    """Return FedCor's training (App. C.1) with the targets of Table 1."""
    dense = {"batch_size": 64, "steps": 20, "lr": 0.005, "milestones": (150, 300), "milestone_factor": 0.5}
    convolutional = {"batch_size": 50, "steps": 40, "lr": 0.01, "weight_decay": 3e-4}
    return {
        "fashion-mnist": PaperTraining({**dense, "weight_decay": 1e-4}, 500, (fashion,), "mean"),
        "cifar10": PaperTraining(convolutional, 2000, (cifar,), "mean"),
    }


_FEDCBS_LOCAL = {"batch_size": 50, "epochs_of_largest": 5, "lr": 0.01, "lr_decay": 0.9992, "weight_decay": 5e-4}


def _fedcbs(cifar: tuple[float, ...] = (), fashion: tuple[float, ...] = ()) -> dict[str, PaperTraining]:
    """Return Fed-CBS's training (Sec. 5, App. D.1) with the targets of Tables 1 and 4."""
    return {
        "cifar10": PaperTraining(_FEDCBS_LOCAL, 3000, cifar),
        "fashion-mnist": PaperTraining(_FEDCBS_LOCAL, 3000, fashion, "fednova"),
    }


_FEDCBS_TARGETS = {0.1: (0.45, 0.78), 0.2: (0.47, 0.80), 0.5: (0.50, 0.82)}
_FEDCBS_FIGURE_1 = {
    "cifar10": PaperTraining({"batch_size": 50, "epochs": 5, "lr": 0.01, "lr_decay": 0.9992, "weight_decay": 5e-4}, 200)
}
_FEDCBS_FEMNIST = {"femnist": PaperTraining(_FEDCBS_LOCAL, 2000, (0.75,), ours=("rounds",))}
_FEDACS = {
    "cifar10": PaperTraining(
        {"batch_size": 400, "epochs": 5, "lr": 0.1, "lr_decay_epoch": 0.9993}, 200, ours=("rounds",)
    )
}
_FEDCM_LOCAL = {"epochs": 5, "batch_size": 50, "lr": 0.05}
_FEDCM_OURS = ("batch_size", "lr", "aggregator")


def _fedcm(alpha: float, target: float) -> dict[str, PaperTraining]:
    """Return FedCM's training; the targets of Table 5 are for alpha = 0.1."""
    return {"cifar10": PaperTraining(_FEDCM_LOCAL, 100, (target,) if alpha == 0.1 else (), "fedpdp", _FEDCM_OURS)}


_FLASH = {"cifar10": PaperTraining({"batch_size": 50, "steps": 20, "lr": 0.05}, 200, ours=("local training", "rounds"))}
_THIRTY = UniformShare(share=0.3)


def _flash(share: float, level: float, straggling: float) -> Scenario:
    return Scenario(
        partition=DominantClass(clients=100, share=share),
        noise=LabelNoise(level=level),
        latency=ShiftedExponential(straggling=straggling),
        validation=0.1,
    )


PRESETS: dict[str, Preset] = {
    "iid": Preset(Scenario(), "no paper", "100 clients with random parts of equal size"),
    "fedcor-1spc": Preset(
        Scenario(partition=Shards(clients=100, per_client=1)),
        "FedCor, Sec. 5.1 (ii)",
        "one shard per client",
        10,
        _fedcor(0.62, 0.36),
    ),
    "fedcor-2spc": Preset(
        Scenario(partition=Shards(clients=100, per_client=2)),
        "FedCor, Sec. 5.1 (i)",
        "two shards per client",
        5,
        _fedcor(0.69, 0.62),
    ),
    "fedcor-dir": Preset(
        Scenario(partition=DirichletQp(clients=100, alpha=0.2)),
        "FedCor, Sec. 5.1 (iii), App. C.2",
        "Dirichlet 0.2, sizes from the quadratic programme",
        5,
        _fedcor(0.64, 0.54),
    ),
    **{
        f"fedcbs-dir-{alpha:g}": Preset(
            Scenario(partition=DirichletLabels(clients=200, alpha=alpha), availability=_THIRTY),
            "Fed-CBS, Sec. 5.1",
            f"Dirichlet {alpha:g} of Hsu et al., 30% available",
            10,
            _fedcbs((cifar,), (fashion,)),
        )
        for alpha, (cifar, fashion) in _FEDCBS_TARGETS.items()
    },
    **{
        f"fedcbs-dir-{alpha:g}-qp": Preset(
            Scenario(partition=DirichletQp(clients=200, alpha=alpha), availability=_THIRTY),
            "Fed-CBS, Sec. 5.1, by its Table 1",
            f"the same with sizes from the quadratic programme, alpha {alpha:g}",
            10,
            _fedcbs((cifar,), (fashion,)),
        )
        for alpha, (cifar, fashion) in _FEDCBS_TARGETS.items()
    },
    **{
        f"fedcbs-case1-{ratio}": Preset(
            Scenario(partition=Imbalanced(clients=120, ratio=ratio, out_of=200), availability=_THIRTY),
            "Fed-CBS, Sec. 5.2.1, App. C.3",
            f"one class per client, {ratio}:1 clients per class, 30% available",
            10,
            _fedcbs(),
        )
        for ratio in (3, 5)
    },
    **{
        f"fedcbs-case2-{ratio}": Preset(
            Scenario(
                partition=ClassesPerClient(clients=200, per_client=1),
                availability=ClassBiased(share=0.3, ratio=ratio),
            ),
            "Fed-CBS, Sec. 5.2.2, App. C.3",
            f"one class per client, available clients {ratio}:1 by class",
            10,
            _fedcbs(),
        )
        for ratio in (3, 5)
    },
    "fedcbs-one-class": Preset(
        Scenario(partition=ClassesPerClient(clients=100, per_client=1)),
        "Fed-CBS, Fig. 1a, App. C.1",
        "one class per client",
        10,
        _FEDCBS_FIGURE_1,
    ),
    "fedcbs-two-classes": Preset(
        Scenario(partition=ClassesPerClient(clients=100, per_client=2)),
        "Fed-CBS, Fig. 1b, App. C.1",
        "two classes per client",
        10,
        _FEDCBS_FIGURE_1,
    ),
    "fedcbs-imbalanced": Preset(
        Scenario(partition=Imbalanced(clients=100, ratio=3, out_of=200)),
        "Fed-CBS, Fig. 1c, App. C.1",
        "one class per client, 3:1 clients per class, all available",
        10,
        _FEDCBS_FIGURE_1,
    ),
    "fedcbs-femnist": Preset(
        Scenario(partition=Natural(), availability=UniformShare(share=0.1)),
        "Fed-CBS, App. D.4",
        "natural writers, 10% available",
        30,
        _FEDCBS_FEMNIST,
    ),
    "fedacs-low": Preset(
        Scenario(partition=Skewness(clients=200, samples=2000, median=0.2, maximum=3.0)),
        "FedACS, Sec. IV-A",
        "skewness environment, low heterogeneity",
        10,
        _FEDACS,
    ),
    "fedacs-high": Preset(
        Scenario(partition=Skewness(clients=200, samples=2000, median=0.1, maximum=5.0)),
        "FedACS, Sec. IV-A",
        "skewness environment, high heterogeneity",
        10,
        _FEDACS,
    ),
    "fedacs-iid": Preset(
        Scenario(partition=Iid(clients=200, samples=2000, replacement=True)),
        "FedACS, Sec. IV-A",
        "the IID reference, as many samples",
        10,
        _FEDACS,
    ),
    **{
        f"fedcm-client-{alpha:g}": Preset(
            Scenario(partition=ClientHeterogeneity(clients=20, alpha=alpha), server_validation=500),
            "FedCM, Sec. 3, App. D",
            f"client heterogeneity {alpha:g}, 500 per class at the server",
            8,
            _fedcm(alpha, 0.6397),
        )
        for alpha in (0.1, 5.0)
    },
    **{
        f"fedcm-class-{alpha:g}": Preset(
            Scenario(partition=ClassHeterogeneity(clients=20, alpha=alpha), server_validation=500),
            "FedCM, Sec. 3, App. D",
            f"class heterogeneity {alpha:g}, 500 per class at the server",
            8,
            _fedcm(alpha, 0.4024),
        )
        for alpha in (0.1, 5.0)
    },
    "flash-noniid": Preset(
        _flash(0.3, 0.0, 1.0), "FLASH, Tables 1 and 2 (upper)", "30% of clients: 80% one class", training=_FLASH
    ),
    "flash-noise": Preset(
        _flash(0.0, 0.15, 1.0), "FLASH, Tables 1 and 2 (lower)", "label noise of mean 15%", training=_FLASH
    ),
    "flash-both": Preset(
        _flash(0.3, 0.15, 1.0), "FLASH, Fig. 3", "30% dominant class and label noise of mean 15%", training=_FLASH
    ),
    **{
        f"flash-noniid-latency-{straggling}": Preset(
            _flash(0.3, 0.0, straggling),
            "FLASH, Fig. 7 (a-c)",
            f"30% dominant class, straggling {straggling}",
            training=_FLASH,
        )
        for straggling in (10, 100)
    },
    **{
        f"flash-noise-latency-{straggling}": Preset(
            _flash(0.0, 0.15, straggling),
            "FLASH, Fig. 7 (d-f)",
            f"label noise of mean 15%, straggling {straggling}",
            training=_FLASH,
        )
        for straggling in (10, 100)
    },
}


def find_preset(name: str) -> Preset:
    """Return a preset by name. For an unknown name, the error suggests the nearest one."""
    if not isinstance(name, str) or name not in PRESETS:
        raise UnknownNameError(
            f"There is no scenario {name!r}. Known: {', '.join(sorted(PRESETS))}.",
            hint=suggest(str(name), list(PRESETS)),
        )
    return PRESETS[name]


def preset_table(name: str, data: str) -> dict[str, Any]:
    """Return a preset as the configuration of an experiment: scenario, local training, aggregator, cohort, rounds.

    Parameters
    ----------
    data : str
        The dataset, because papers train differently on each.

    Examples
    --------
    >>> table = preset_table("fedcor-1spc", "fashion-mnist")
    >>> table["run"]
    {'rounds': 500, 'cohort': 10, 'targets': [0.62]}
    """
    preset = find_preset(name)
    training = preset.training_on(data)
    run: dict[str, Any] = {"rounds": training.rounds, "cohort": preset.cohort or 10}
    if training.targets:
        run["targets"] = list(training.targets)
    local = {key: list(value) if isinstance(value, tuple) else value for key, value in training.local.items()}
    table: dict[str, Any] = {"data": {"name": data}, "scenario": {"preset": name}, "local": local, "run": run}
    if training.aggregator != PaperTraining.aggregator:  # with the default, a selector may bring its own
        table["aggregator"] = {"name": training.aggregator}
    return table
