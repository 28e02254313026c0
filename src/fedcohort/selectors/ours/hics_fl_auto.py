r"""HiCS-FL with a temperature that fits the updates.

.. [Chen2024] H. Chen, H. Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
   Learning", NeurIPS 2024, arXiv:2310.00198.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedcohort.core.arrays import FloatArray
from fedcohort.core.params import Either, Interval, OneOf, ParamSets, param
from fedcohort.core.protocol import register
from fedcohort.selectors.baselines.hics_fl.selector import HicsFL

_REACH = 10.0  # the largest entry of a strongly skewed client's update after division by the temperature


@register("hics-fl-auto")
@dataclass(frozen=True, kw_only=True)
class HicsFLAuto(HicsFL):
    r"""HiCS-FL whose temperature is a tenth of the 90% quantile of :math:`\max_i |\Delta b_i|` over the clients.

    :class:`~fedcohort.selectors.baselines.hics_fl.HicsFL` ([Chen2024]_) has a fixed temperature, which must fit the
    size of the updates. That size grows with the learning rate and the number of steps. Everything else is the same.

    Examples
    --------
    Clients 0 and 1 have balanced labels, the other ten have one class each.

    >>> from fedcohort import ClientTable, Session, Signal
    >>> from fedcohort.core.protocol import RoundReport, RoundRequest
    >>> bias = np.vstack([np.zeros((2, 5)), np.eye(5), np.eye(5)]) + 0.01 * np.arange(12)[:, None] * np.arange(5)
    >>> session = Session(HicsFLAuto(clusters=3, preference=20.0), ClientTable(sizes=[10] * 12), seed=1)
    >>> everybody = session.ask(RoundRequest(size=12))
    >>> report = {Signal.OUTPUT_BIAS_UPDATE: bias[everybody.clients]}
    >>> session.tell(RoundReport(everybody.ticket, everybody.clients, metrics=report))
    >>> sorted(session.ask(RoundRequest(size=2)).names)
    ['0', '1']
    """

    checked_params: ClassVar[ParamSets] = {
        "one cluster": {"clusters": 1, "entropy_weight": 0.0},
        "no preference": {"preference": 0.0, "rounds": 1},
        "short memory": {"memory": 2},
    }

    temperature: float | Literal["auto"] = param(  # type: ignore[assignment]  # wider than the paper's
        "auto",
        Either(OneOf(("auto",)), Interval(float, 0, None, "neither")),
        "divides the bias updates before the softmax (T)",
    )

    def temperature_for(self, updates: FloatArray) -> float:
        """Return T for the known bias updates (n, C)."""
        return automatic_temperature(updates) if self.temperature == "auto" else self.temperature


def automatic_temperature(updates: FloatArray) -> float:
    """Return a tenth of the 90% quantile of the updates' (n, C) largest entries; 1 if all are 0."""
    largest = float(np.quantile(np.abs(updates).max(axis=1, initial=0.0), 0.9)) if len(updates) else 0.0
    return largest / _REACH if largest > 0 else 1.0
