"""A million cases, in shards with seeds of their own.

    python -m tests.fuzz.nightly [--cases 1000000] [--shards 40] [--seed N] [--workers 2] [--seconds S] [--out FILE]

Each shard is a pytest of tests/fuzz in a process of its own, with at most 8 GB of memory. Which cases a shard tries
follows from its seed, so one that failed is repeated alone with the command that is printed. Without ``--seed`` the
seed is the day, so that every night tries others.
"""

import argparse
import datetime
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
MEMORY = 8 << 30


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # what is allocated; a library of CUDA maps more


def shard(number: int, seed: int, cases: int, until: float) -> tuple[int, Counter[str], Counter[str], str]:
    """Run one shard; return how it ended, the cases it counted and the tests that failed by kind, and what it said."""
    if time.time() > until:
        return -1, Counter(), Counter(), ""
    with tempfile.NamedTemporaryFile() as counts:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rfE",
            "--show-capture=no",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "0",
            str(HERE),
        ]
        command += [f"--hypothesis-seed={seed + number}"]
        more = {"FEDCOHORT_FUZZ_CASES": str(cases), "FEDCOHORT_FUZZ_COUNTS": counts.name, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env={**os.environ, **more}, capture_output=True, text=True, check=False, preexec_fn=_bounded
        )
        found: Counter[str] = Counter()
        for line in Path(counts.name).read_text().splitlines():
            found.update(json.loads(line))
    words = f"FEDCOHORT_FUZZ_CASES={cases} {' '.join(command)}\n{done.stdout[-6000:]}" if done.returncode else ""
    bad = Counter(re.findall(r"^(?:FAILED|ERROR) \S*?test_(\w+)\.py", done.stdout, re.MULTILINE))
    if done.returncode and not bad:
        bad["the shard itself"] = 1
        words += done.stderr[-2000:]
    return done.returncode, found, bad, words


def main() -> None:
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--seed", type=int, default=today * 1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no shard after so long")
    parser.add_argument("--out", type=Path, default=None, help="a file for the counts, as JSON")
    given = parser.parse_args()
    begun, total, failures, shards = time.time(), Counter(), Counter(), Counter()
    with ThreadPoolExecutor(given.workers) as pool:
        each = [given.cases // given.shards] * given.shards
        jobs = [pool.submit(shard, i, given.seed, n, begun + given.seconds) for i, n in enumerate(each)]
        for i, job in enumerate(jobs):
            code, counts, bad, words = job.result()
            if code < 0:
                continue
            total += counts
            failures += bad
            shards["failed" if code else "passed"] += 1
            print(f"shard {i}: seed {given.seed + i}, {'ok' if code == 0 else 'FAILED'}, {counts.total():,} cases, "
                  f"{total.total():,} so far, {time.time() - begun:.0f} s", flush=True)  # fmt: skip
            print(words, end="")
    found = {"cases": total.total(), "by kind": total, "failures": failures, "shards": shards, "seed": given.seed,
             "cases of a shard": each[0], "seconds": round(time.time() - begun)}  # fmt: skip
    print(json.dumps(found))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
