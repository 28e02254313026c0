"""The figure of FedACS in a report: clients ranked by skewness."""

from __future__ import annotations

import math

import numpy as np

from fedcohort.core.plots import (
    Intervals,
    Picture,
    SelectorRun,
    agreement_text,
    beta_interval,
    number_text,
    rank_correlation,
)


def _skewness(record: SelectorRun) -> Intervals:
    """Show each client's chance of winning a duel, estimated from its duels so far."""
    won, lost, rounds = record.state["wins"], record.state["losses"], record.state["rounds"]
    # The mean of Beta(A + 1, B + 1), from which the selector draws.
    middle = (won + 1) / (won + lost + 2)
    low, high = beta_interval(won + 1, lost + 1)
    notes = [f"duelled in {number_text(count)} round{'s' * (count != 1)}" for count in rounds.tolist()]

    def record_of(client: int) -> str:
        fought = float(won[client] + lost[client])
        return f"won {won[client] / fought:.0%} of its duels" if fought else "never in a duel"

    order = np.argsort(-middle, kind="stable")
    first, last = int(order[0]), int(order[-1])
    text = (
        f"{record.opening} client {first} is ranked as the least skewed ({record_of(first)}) and client {last} as the "
        f"most ({record_of(last)})"
    )
    if record.label_counts is not None:
        share = record.label_counts / np.maximum(record.label_counts.sum(axis=1, keepdims=True), 1)
        text += "; " + _judge(rank_correlation(middle, ((share - 1 / share.shape[1]) ** 2).sum(axis=1)))
    return Intervals(middle, low, high, notes, text + ".")


def _judge(correlation: float) -> str:
    """Say whether clients with low skewness win, as they should."""
    if math.isnan(correlation):
        return "but all clients are equally skewed or equally ranked, so there is nothing to compare"
    return agreement_text(
        correlation,
        perfect=-1,
        good="the more skewed a client really is, the fewer duels it is expected to win, as it should be",
        bad="the more skewed a client really is, the more duels it is expected to win, the wrong way round",
        none="the ranking says little about the clients' true skewness",
    )


SKEWNESS = Picture(
    "fedacs-skewness",
    "FedACS: clients ranked by skewness",
    "chance of winning a duel",
    _skewness,
    share=True,
)
