"""What each method may choose, by brute force from its paper's formulas.

A formula is a function of a vector's inputs: what was asked, who was there, and what the cohorts reported. It shares no
code with the selectors. ``FORMULAS`` has one for every selector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fedcohort_bench.vectors.formulas import accounts, balance, bandits, losses, process, sampling, speed
from fedcohort_bench.vectors.formulas.draws import Expected, Vector

FORMULAS: dict[str, Callable[[Vector], Iterator[Expected]]] = {
    "all": sampling.everybody,
    **{
        formula.__name__.replace("_", "-"): formula
        for formula in (
            sampling.uniform,
            sampling.size_weighted,
            sampling.clustered,
            sampling.gradnorm,
            sampling.delta,
            sampling.feel,
            sampling.e3cs,
            losses.power_of_choice,
            losses.active_fl,
            losses.greedyfed,
            losses.oort,
            losses.pyramidfl,
            losses.oort_async,
            losses.pisces,
            speed.fedcs,
            speed.tifl,
            speed.rbcs_f,
            speed.refl,
            speed.fedcompass,
            balance.astraea,
            balance.fed_cucb,
            balance.fedcbs,
            balance.fedcbs_chance,
            balance.fedcbs_blind,
            balance.hics_fl,
            balance.divfl,
            bandits.fedcm_ucb,
            bandits.fedcm_ts,
            bandits.fedacs,
            bandits.flash,
            bandits.flash_advantage,
            bandits.restless_bandit,
            bandits.neural_bandit,
            process.fedcor,
            accounts.bounded,
            accounts.balanced,
        )
    },
}

__all__ = ["FORMULAS", "Expected", "Vector"]
