"""Digests of the cohorts that every selector chooses, over seeds and a schedule of faults.

Run it before and after a change that must not alter behaviour, and compare the output:

    python bench/scripts/cohorts.py > after.json
    python bench/scripts/cohorts.py --only uniform,fedcor --seeds 2
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcohort import Session, Status, create
from fedcohort.core.protocol import SELECTORS, RoundRequest
from fedcohort.testing import ScriptedHost

CLIENTS, ROUNDS, SIZE = 30, 40, 6


def statuses(cohort: Any, seed: int) -> list[int]:
    """Let about a third of the replies fail in some way."""
    draw = np.random.default_rng([seed, cohort.round])
    kinds = [int(kind) for kind in Status]
    return [kinds[draw.integers(len(kinds))] if draw.random() < 0.35 else int(Status.OK) for _ in range(cohort.size)]


def trace(name: str, seed: int) -> list[list[int]]:
    """Play rounds in which clients are offline, fail, leave and return, and some rounds are abandoned."""
    host = ScriptedHost(n=CLIENTS, seed=seed)
    cohorts: list[list[int]] = []
    with Session(create(name), host.table, seed=seed, signals=host.signals) as session:
        for number in range(ROUNDS):
            draw = np.random.default_rng([seed, number, 1])
            if number % 9 == 4:
                session.leave([int(i) for i in draw.choice(CLIENTS, 3, replace=False)])
            if number % 9 == 8:
                session.rejoin(list(range(CLIENTS)))
            available = np.flatnonzero(draw.random(CLIENTS) < 0.7) if number % 3 else None
            request = RoundRequest(SIZE, available)
            cohort = session.ask(request, host.answer(session.query(request), session.round))
            cohorts.append(cohort.clients.tolist())
            if cohort.size and number % 11 == 7:
                session.abandon(cohort.ticket, "scheduled")
            elif cohort.size:
                session.tell(host.report(cohort, statuses(cohort, seed)))
            if cohort.stop:
                break
    return cohorts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of selectors, separated by commas")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(SELECTORS)
    digests = {}
    for name in names:
        digests[name] = {}
        for seed in range(options.seeds):
            text = json.dumps(trace(name, seed)).encode()
            digests[name][str(seed)] = hashlib.sha256(text).hexdigest()[:16]
    print(json.dumps(digests, indent=1))


if __name__ == "__main__":
    main()
