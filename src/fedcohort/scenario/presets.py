"""The settings of the five papers, by name."""

from __future__ import annotations

from dataclasses import dataclass

from fedcohort.errors import UnknownNameError
from fedcohort.registry import nearest
from fedcohort.scenario.availability import ClassBiased, UniformShare
from fedcohort.scenario.classwise import ClassesPerClient, DominantClass, Iid, Imbalanced, Shards
from fedcohort.scenario.dirichlet import (
    ClassHeterogeneity,
    ClientHeterogeneity,
    DirichletLabels,
    DirichletQp,
    Skewness,
)
from fedcohort.scenario.given import Writers
from fedcohort.scenario.latency import ShiftedExponential
from fedcohort.scenario.noise import LabelNoise
from fedcohort.scenario.scenario import Scenario


@dataclass(frozen=True)
class Preset:
    """A named scenario, where it comes from, and how many clients the paper picks per round (None: not said)."""

    scenario: Scenario
    source: str
    meaning: str
    cohort: int | None = None


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
        Scenario(partition=Shards(clients=100, per_client=1)), "FedCor, Sec. 5.1 (ii)", "one shard per client", 10
    ),
    "fedcor-2spc": Preset(
        Scenario(partition=Shards(clients=100, per_client=2)), "FedCor, Sec. 5.1 (i)", "two shards per client", 5
    ),
    "fedcor-dir": Preset(
        Scenario(partition=DirichletQp(clients=100, alpha=0.2)),
        "FedCor, Sec. 5.1 (iii), App. C.2",
        "Dirichlet 0.2, sizes from the quadratic programme",
        5,
    ),
    **{
        f"fedcbs-dir-{alpha:g}": Preset(
            Scenario(partition=DirichletLabels(clients=200, alpha=alpha), availability=_THIRTY),
            "Fed-CBS, Sec. 5.1",
            f"Dirichlet {alpha:g} of Hsu et al., 30% available",
            10,
        )
        for alpha in (0.1, 0.2, 0.5)
    },
    **{
        f"fedcbs-dir-{alpha:g}-qp": Preset(
            Scenario(partition=DirichletQp(clients=200, alpha=alpha), availability=_THIRTY),
            "Fed-CBS, Sec. 5.1, by its Table 1",
            f"the same with sizes from the quadratic programme, alpha {alpha:g}",
            10,
        )
        for alpha in (0.1, 0.2, 0.5)
    },
    **{
        f"fedcbs-case1-{ratio}": Preset(
            Scenario(partition=Imbalanced(clients=120, ratio=ratio, out_of=200), availability=_THIRTY),
            "Fed-CBS, Sec. 5.2.1, App. C.3",
            f"one class per client, {ratio}:1 clients per class, 30% available",
            10,
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
        )
        for ratio in (3, 5)
    },
    "fedcbs-one-class": Preset(
        Scenario(partition=ClassesPerClient(clients=100, per_client=1)),
        "Fed-CBS, Fig. 1a, App. C.1",
        "one class per client",
        10,
    ),
    "fedcbs-two-classes": Preset(
        Scenario(partition=ClassesPerClient(clients=100, per_client=2)),
        "Fed-CBS, Fig. 1b, App. C.1",
        "two classes per client",
        10,
    ),
    "fedcbs-imbalanced": Preset(
        Scenario(partition=Imbalanced(clients=100, ratio=3, out_of=200)),
        "Fed-CBS, Fig. 1c, App. C.1",
        "one class per client, 3:1 clients per class, all available",
        10,
    ),
    "fedcbs-femnist": Preset(
        Scenario(partition=Writers(), availability=UniformShare(share=0.1)),
        "Fed-CBS, App. D.4",
        "natural writers, 10% available",
        30,
    ),
    "fedacs-low": Preset(
        Scenario(partition=Skewness(clients=200, samples=2000, median=0.2, maximum=3.0)),
        "FedACS, Sec. IV-A",
        "skewness environment, low heterogeneity",
        10,
    ),
    "fedacs-high": Preset(
        Scenario(partition=Skewness(clients=200, samples=2000, median=0.1, maximum=5.0)),
        "FedACS, Sec. IV-A",
        "skewness environment, high heterogeneity",
        10,
    ),
    "fedacs-iid": Preset(
        Scenario(partition=Iid(clients=200, samples=2000, replacement=True)),
        "FedACS, Sec. IV-A",
        "the IID reference, as many samples",
        10,
    ),
    **{
        f"fedcm-client-{alpha:g}": Preset(
            Scenario(partition=ClientHeterogeneity(clients=20, alpha=alpha), server_validation=500),
            "FedCM, Sec. 3, App. D",
            f"client heterogeneity {alpha:g}, 500 per class at the server",
            8,
        )
        for alpha in (0.1, 5.0)
    },
    **{
        f"fedcm-class-{alpha:g}": Preset(
            Scenario(partition=ClassHeterogeneity(clients=20, alpha=alpha), server_validation=500),
            "FedCM, Sec. 3, App. D",
            f"class heterogeneity {alpha:g}, 500 per class at the server",
            8,
        )
        for alpha in (0.1, 5.0)
    },
    "flash-noniid": Preset(_flash(0.3, 0.0, 1.0), "FLASH, Tables 1 and 2 (upper)", "30% of clients: 80% one class"),
    "flash-noise": Preset(_flash(0.0, 0.15, 1.0), "FLASH, Tables 1 and 2 (lower)", "label noise of mean 15%"),
    "flash-both": Preset(_flash(0.3, 0.15, 1.0), "FLASH, Fig. 3", "30% dominant class and label noise of mean 15%"),
    **{
        f"flash-noniid-latency-{straggling}": Preset(
            _flash(0.3, 0.0, straggling),
            "FLASH, Fig. 7 (a-c)",
            f"30% dominant class, straggling {straggling}",
        )
        for straggling in (10, 100)
    },
    **{
        f"flash-noise-latency-{straggling}": Preset(
            _flash(0.0, 0.15, straggling),
            "FLASH, Fig. 7 (d-f)",
            f"label noise of mean 15%, straggling {straggling}",
        )
        for straggling in (10, 100)
    },
}


def preset(name: str) -> Scenario:
    """Return the scenario of a paper by name.

    >>> preset("fedacs-low").partition
    Skewness(clients=200, samples=2000, median=0.2, maximum=3.0)
    >>> preset("fedacs-lo")
    Traceback (most recent call last):
        ...
    fedcohort.errors.UnknownNameError: There is no scenario 'fedacs-lo'. ...
      hint: did you mean 'fedacs-low'?
    """
    if name not in PRESETS:
        near = nearest(str(name), list(PRESETS))
        raise UnknownNameError(
            f"There is no scenario {name!r}. Known: {', '.join(sorted(PRESETS))}.",
            hint=f"did you mean {near!r}?" if near else None,
        )
    return PRESETS[name].scenario
