"""How many cases are tried, and the count of those that were.

``make test`` tries 10,000, always the same ones; ``make nightly`` a million, from a seed of its own (see nightly.py). A
case is one event of a session, one damaged file or folder, one configuration or one reply.
"""

import atexit
import json
import os
from collections import Counter

from hypothesis import HealthCheck, settings

ENOUGH = 10_000
SHARES = {"session": 0.4, "journal": 0.03, "config": 0.1, "results": 0.02, "replies": 0.1, "descriptions": 0.35}
EVENTS = 40  # in the life of one session
CASES = int(os.environ.get("FEDCOHORT_FUZZ_CASES", ENOUGH))
RANDOM = "FEDCOHORT_FUZZ_CASES" in os.environ  # the seed is the command line's, --hypothesis-seed
counts: Counter[str] = Counter()


def tries(kind: str, *, each: int = 1, of: int = 1) -> settings:
    """Return the settings of a test that has one ``of`` equal parts of a kind's cases, ``each`` in one example."""
    return settings(
        max_examples=max(1, round(CASES * SHARES[kind] / each / of)),
        stateful_step_count=EVENTS,
        derandomize=not RANDOM,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=RANDOM,
    )


def tried(kind: str) -> None:
    counts[kind] += 1


@atexit.register
def _tell() -> None:
    if "FEDCOHORT_FUZZ_COUNTS" in os.environ:
        with open(os.environ["FEDCOHORT_FUZZ_COUNTS"], "a") as file:
            file.write(json.dumps(counts) + "\n")
