"""The figure of HiCS-FL in a report: how balanced clients' labels look."""

from __future__ import annotations

import numpy as np

from fedcohort.core.plots import Intervals, Picture, SelectorRun, number_text
from fedcohort.selectors.baselines.hics_fl.estimates import label_entropy


def _entropies(record: SelectorRun) -> Intervals | None:
    """Show the estimated label entropy of each client."""
    known, vectors = record.state["known"], record.state["vectors"]
    used = [notes["temperature"] for _, notes in record.notes if "temperature" in notes]
    if len(known) < 2 or not used:
        return None
    estimate = label_entropy(vectors, float(used[-1]))
    middle = np.full(len(record.state["asked"]), float(estimate.mean()))
    middle[known] = estimate
    text = (
        f"{record.opening} the estimated entropy of clients' labels is between {number_text(float(estimate.min()))} "
        f"and {number_text(float(estimate.max()))}; balanced labels would have "
        f"{number_text(float(np.log(vectors.shape[1])))}. "
        f"Clients that have not reported yet are shown at the mean."
    )
    return Intervals(middle, middle, middle, text=text)


ENTROPIES = Picture("hics-entropy", "HiCS-FL: estimated balance of clients' labels", "entropy", _entropies)
