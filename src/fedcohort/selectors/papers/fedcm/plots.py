"""The figure of FedCM in a report: what each arm is worth."""

from __future__ import annotations

import math

import numpy as np

from fedcohort.core.plots import (
    Intervals,
    Picture,
    SelectorRun,
    agreement_text,
    beta_interval,
    count_text,
    number_text,
    rank_correlation,
)


def _arms(record: SelectorRun) -> Intervals:
    """Show each client's estimated chance of being kept, with the width of the UCB bound or Thompson's 90% interval."""
    state = record.state
    if "kept" in state:
        good, bad = state["kept"], state["dropped"]
        middle = good / (good + bad)
        low, high = beta_interval(good, bad)
        notes = [
            count_text("kept", g - 1, g + b - 2) if g + b > 2 else "never asked"
            for g, b in zip(good.tolist(), bad.tolist(), strict=True)
        ]
    else:
        middle = state["mean"]
        width = np.sqrt(1.5 * math.log(record.rounds + 1) / state["pulls"])
        low, high = np.maximum(middle - width, 0), np.minimum(middle + width, 1)
        asked = (state["pulls"] - 1).tolist()  # one pull is imaginary
        notes = [f"asked {number_text(n)} time{'s' * (n != 1)}" if n else "never asked" for n in asked]
    # The first of the best and the last of the worst: if they are level, all clients are.
    best, worst = int(middle.argmax()), len(middle) - 1 - int(middle[::-1].argmin())
    if middle[best] == middle[worst]:
        text = f"{record.opening} every client has the same estimated chance of being kept"
    else:
        text = (
            f"{record.opening} client {best} has the highest estimated chance of being kept, {middle[best]:.0%} "
            f"({notes[best]}), and client {worst} the lowest, {middle[worst]:.0%} ({notes[worst]})"
        )
    if record.noise is not None:
        text += "; " + agreement_text(
            rank_correlation(middle, record.noise),
            perfect=-1,
            good="clients with more wrong labels get lower estimates, as they should",
            bad="clients with more wrong labels get higher estimates, the wrong way round",
            none="the estimates say little about which clients have wrong labels",
        )
    return Intervals(middle, low, high, notes, text + ".")


ARMS = Picture("fedcm-arms", "FedCM: what each arm is worth", "estimated chance of being kept", _arms, share=True)
