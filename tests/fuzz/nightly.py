"""A million cases, in shards with seeds of their own.

    python -m tests.fuzz.nightly [--cases 1050000] [--shards 42] [--seed N] [--workers 2] [--seconds S] [--out FOLDER]

Each shard is a pytest of tests/fuzz in a process of its own, with at most 8 GB of memory. Which cases a shard tries
follows from its seed, so one that failed is repeated alone with the command that is printed. Without ``--seed`` the
seed is the day, so that every night tries others.

With ``--out`` what became of a shard is kept in the folder, and all that it said if it failed. The same command again
goes on: shards that passed are not made again, whichever code they passed on; the summary counts cases by code, a
digest of src/fedcohort and tests/fuzz as they were when the shard began.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
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
SOURCES = (HERE.parents[1] / "src" / "fedcohort", HERE)
MEMORY = 8 << 30


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # what is allocated; a library of CUDA maps more


def code() -> str:
    """Return a digest of what is tried and of what tries it, this file left out: it decides nothing about a case."""
    digest = hashlib.sha256()
    for file in sorted(file for place in SOURCES for ending in ("*.py", "*.c", "*.h") for file in place.rglob(ending)):
        if file != Path(__file__):
            digest.update(str(file.relative_to(HERE.parents[1])).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def shard(seed: int, cases: int, folder: Path | None, until: float) -> dict | None:
    """Run one shard; return what became of it, ``None`` if it is too late to begin one."""
    place = None if folder is None else folder / f"{seed}-{cases}.json"
    if place is not None and place.exists() and (kept := json.loads(place.read_text()))["passed"]:
        return kept
    if time.time() > until:
        return None
    begun, tried_code = time.time(), code()
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
        command += [f"--hypothesis-seed={seed}"]
        more = {"FEDCOHORT_FUZZ_CASES": str(cases), "FEDCOHORT_FUZZ_COUNTS": counts.name, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env={**os.environ, **more}, capture_output=True, text=True, check=False, preexec_fn=_bounded
        )
        tried: Counter[str] = Counter()
        for line in Path(counts.name).read_text().splitlines():
            tried.update(json.loads(line))
    failures = Counter(re.findall(r"^(?:FAILED|ERROR) \S*?test_(\w+)\.py", done.stdout, re.MULTILINE))
    if done.returncode and not failures:
        failures["the shard itself"] = 1
    found = {
        "seed": seed,
        "passed": done.returncode == 0,
        "tried": tried,
        "failures": failures,
        "code": tried_code,
        "python": platform.python_version(),
        "seconds": round(time.time() - begun),
        "said": "",
    }
    if done.returncode:
        repeat = f"FEDCOHORT_FUZZ_CASES={cases} {' '.join(command)}"
        found["said"] = f"{repeat}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
        if place is not None:
            place.with_suffix(".log").write_text(f"{repeat}\n{done.stdout}\n{done.stderr}")
    if place is not None:
        place.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_050_000)
    parser.add_argument("--shards", type=int, default=42)
    parser.add_argument("--seed", type=int, default=today * 1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no shard after so long")
    parser.add_argument("--out", type=Path, default=None, help="a folder for what became of each shard")
    given = parser.parse_args()
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    begun, each = time.time(), given.cases // given.shards
    tried, failures, shards, codes = Counter(), Counter(), Counter(), Counter()
    with ThreadPoolExecutor(given.workers) as pool:
        until = begun + given.seconds
        jobs = [pool.submit(shard, given.seed + i, each, given.out, until) for i in range(given.shards)]
        for i, job in enumerate(jobs):
            found = job.result()
            if found is None:
                shards["not made"] += 1
                continue
            tried.update(found["tried"])
            failures.update(found["failures"])
            shards["passed" if found["passed"] else "failed"] += 1
            count = sum(found["tried"].values())
            codes[found["code"]] += count
            print(f"shard {i}: seed {found['seed']}, {'ok' if found['passed'] else 'FAILED'}, {count:,} cases, "
                  f"{tried.total():,} so far, {time.time() - begun:.0f} s", flush=True)  # fmt: skip
            print(found["said"], end="")
    print(json.dumps({"cases": tried.total(), "by kind": tried, "by code": codes, "failures": failures,
                      "shards": shards, "seed": given.seed, "cases of a shard": each}))  # fmt: skip
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
