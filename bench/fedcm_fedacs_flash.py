"""Speed of FedCM-UCB, FedCM-TS, FedACS and FLASH at a million clients, and of the FedCA filter.

Ask + tell of one round at N = 1,000,000 clients and a cohort of 100, without a session or journal around it, as
multiples of U, one ``np.argpartition`` over N floats measured in the same run. One core:

    OMP_NUM_THREADS=1 python bench/fedcm_fedacs_flash.py
"""

import time
from dataclasses import replace

import numpy as np

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Outcome, Slate
from fedcohort.selectors.ours.advantage import FlashAdvantage
from fedcohort.selectors.papers.fedacs import FedAcs, FedAcsState
from fedcohort.selectors.papers.fedcm import FedCmTs, FedCmUcb, ThompsonState, UcbState
from fedcohort.training.filters import FedCA, Replies

N = 1_000_000
SIZE = 100


def best(function, times=7):
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        found.append(time.perf_counter() - begin)
    return min(found)


def unit(rng):
    """The cheapest of the ways to read U: top 100, or the middle."""
    numbers = rng.random(N)
    return min(best(lambda kth=kth: np.argpartition(numbers, kth)) for kth in (SIZE, N // 2, N - SIZE))


def outcome(selector, clients, table, rng):
    metrics = {signal: rng.uniform(0.1, 2.0, len(clients)) for signal in selector.requires}
    return Outcome(
        round=50,
        clients=clients,
        status=np.zeros(len(clients), np.int8),
        table=table,
        _kept=rng.random(len(clients)) < 0.5,
        _metrics=metrics,
        _granted=selector.requires,
    )


def measured(selector, state, table, rng):
    """Seconds of one select and one update."""
    slate = Slate(round=50, size=SIZE, candidates=np.arange(N), clients=table)

    def once():
        _, after = selector.select(state, slate, None, rng)
        selector.update(after, report)

    report = outcome(selector, rng.choice(N, SIZE, replace=False), table, rng)
    return best(once)


def main():
    rng = np.random.default_rng(0)
    table = ClientTable(n=N)
    u = unit(rng)
    print(f"U = {u * 1e3:.2f} ms")
    counts = rng.integers(0, 9, (2, N)).astype(float)
    few = rng.random(N) < 0.01  # after a hundred rounds of a hundred one client in a hundred was asked
    flash = FlashAdvantage()
    flash_state = flash.init(table, rng)
    flash_seen = replace(
        flash_state,
        robust=rng.random(N),
        validation=rng.random(N),
        duration=rng.random(N),
        reward=rng.random(N),
        rewarded=np.ones(N, bool),
        gram=np.eye(4) * 50,
        rounds=50,
        time_unit=1.0,
    )
    zeros = np.zeros(N)
    cases = [
        ("fedcm-ucb, at the start", FedCmUcb(), FedCmUcb().init(table, rng), 15),
        ("fedcm-ucb, all known", FedCmUcb(), UcbState(mean=rng.random(N), pulls=1 + counts[0]), 15),
        ("fedcm-ts, at the start", FedCmTs(), FedCmTs().init(table, rng), 40),
        ("fedcm-ts, all known", FedCmTs(), ThompsonState(kept=1 + counts[0], dropped=1 + counts[1]), 40),
        ("flash-advantage, at the start", flash, replace(flash_state, rounds=1), 30),
        ("flash-advantage, all known", flash, flash_seen, 30),
        (
            "fedacs, 1% known",
            FedAcs(pool_share=0.1),
            FedAcsState(wins=np.where(few, 60.0, 0), losses=np.where(few, 39.0, 0), rounds=zeros),
            60,
        ),
        (
            "fedacs, all known",
            FedAcs(pool_share=0.1),
            FedAcsState(wins=11 * counts[0], losses=11 * counts[1], rounds=zeros),
            60,
        ),
    ]
    for name, selector, state, limit in cases:
        seconds = measured(selector, state, table, rng)
        verdict = "ok" if seconds <= limit * u else "TOO SLOW"
        print(f"{name:26} {seconds * 1e3:8.1f} ms = {seconds / u:5.1f} U   (at most {limit} U: {verdict})")
    wins = rng.integers(0, 100, 20_000).astype(float)
    small = FedAcsState(wins=wins, losses=99 - wins, rounds=np.ones(20_000))
    slate = Slate(round=50, size=SIZE, candidates=np.arange(20_000), clients=ClientTable(n=20_000))
    for share in (0.1, 0.4):
        seconds = best(lambda share=share: FedAcs(pool_share=share).select(small, slate, None, rng), 3)
        print(f"fedacs, exact pool of {share:g} of 20,000 clients: {seconds * 1e3:.0f} ms")
    labels = rng.integers(0, 10, 5000)
    for members in (8, 12, 16):
        logits = rng.normal(size=(members, 5000, 10)).astype(np.float32)
        for score in ("accuracy", "loss"):
            replies = Replies(np.ones(members, bool), logits=logits, labels=labels)
            seconds = best(lambda score=score, replies=replies: FedCA(score=score).keep(replies), 2)
            print(f"fedca, {members} models x 5,000 samples x 10 classes, by {score}: {seconds * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
