"""fedcohort and other simulators of federated learning: rounds per second, memory, lines of user code.

    python bench/scripts/peers/run.py install [PEER ...]            # an environment for each, in --cache; minutes
    python bench/scripts/peers/run.py check W1 [PEER ...]           # accuracy and memory after the first rounds
    python bench/scripts/peers/run.py W1 [PEER ...] [--seconds S]   # speed, in as many turns as the conditions say
    python bench/scripts/peers/run.py table                         # the table and the picture of docs/performance.md

Peers: plain (a loop in PyTorch), flower, pfl, fedlab, flgo, fluke, fedjax. Workloads, all on real images:
W1: Fashion-MNIST, 100 clients x 600, MLP 784-64-30-10, 10 a round, 20 steps of batch 64.
W2: CIFAR-10, 200 clients x 250, the LeNet of the PyTorch tutorial, 10 a round, 25 steps of batch 50.
W3: FEMNIST, 3,500 clients of 20 to 180 samples of one writer, MLP 784-64-30-62, 30 a round, 5 steps of batch 64.

All start from the same model and have the same cohorts; they differ only in the order of batches (FedJAX fills up the
last batch of an epoch from the next).

Conditions, which were written before the stored turns were made and have not been changed since, except in wording:

- Seven turns of each workload. In a turn, every side runs its rounds, one side after the other, in an order drawn for
  that turn; three rounds before the first turn are not timed. A turn is 100 of our rounds and 20 of a peer's (W2: 10
  and 3). No turn is left out. Turns may be made in pieces; each piece starts all processes again.
- Every side has both cores: fedcohort's clients are spread over them, Flower has a worker for each, the others compute
  with one thread and with one thread per core, and in each turn the faster of these counts.
- Every side has the same priority (nice -15, the ordinary scheduler), nothing else of ours runs; the load is recorded.
- "Faster by" is the ratio of an experiment's rounds per second on the clock to the peer's within a turn; its figure is
  the median over the turns, its spread the smallest and the largest. The fastest peer has the smallest median.
- sgemm is torch's product of two 1,024 x 1,024 matrices, a hundred in a row, with one thread per core, just before and
  just after the engine's rounds in every turn; the engine's share is its operations per second divided by the mean of
  both, again as median, smallest and largest.
- The goals for the medians: 4 times the fastest peer on W1 and W3, 3 times on W2; 0.75 of sgemm on each.
- If the engine is changed, all turns of all workloads are made again.

Each turn is also measured in processor time (of all processes of a side). All results are written to
bench/results/peers.json after every turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import job as jobs
import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "results" / "peers.json"
TORCH = "torch==2.13.0"
ENVIRONMENTS = {  # what pip installs after torch; the newest versions for Python 3.11
    "plain": [TORCH],
    "flower": [TORCH, "flwr[simulation]==1.41.0"],
    "pfl": [TORCH, "pfl[pytorch]==0.6.0"],
    "fedlab": [TORCH, "fedlab==1.3.0"],
    "flgo": [TORCH, "flgo==0.4.4"],
    "fluke": [TORCH, "fluke-fl==0.8.1"],
    "fedjax": [  # its last release needs these; newer JAX and Haiku lack what it imports
        "jax==0.4.20",
        "jaxlib==0.4.20",
        "dm-haiku==0.0.11",
        "optax==0.1.7",
        "chex==0.1.85",
        "numpy<2",
        "scipy<1.13",
        "fedjax==0.0.17",
    ],
}
OURS = ("fedcohort", "engine")
SPREAD = (*OURS, "flower")  # these use all cores without being told
AGREE = 0.02  # accuracies may differ by this, because every side has its own order of batches
FIRST = {"W1": 40, "W2": 5, "W3": 60}  # rounds of the check, after which the model is tested
TURNS = 7
ROUNDS = {"W1": (100, 20), "W2": (10, 3), "W3": (100, 20)}  # in a timed turn, ours and a peer's
CORES = len(os.sched_getaffinity(0))


def install(names: list[str], cache: Path) -> None:
    """Make an environment for each peer."""
    for name in names:
        place, (first, *others) = cache / name, ENVIRONMENTS[name]
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        pip = [place / "bin" / "python", "-m", "pip", "install", "-q"]
        if first != TORCH:
            subprocess.run([*pip, first, *others], check=True)
            continue
        subprocess.run([*pip, TORCH, "numpy"], check=True)  # first, or a looser requirement pulls a build for CUDA
        (cache / "torch.txt").write_text(TORCH)
        if others:
            subprocess.run([*pip, "-c", cache / "torch.txt", *others], check=True)
        print(f"{name}: {place}", flush=True)


# -- workloads ---------------------------------------------------------------------------------------------------------


def prepare(name: str, cache: Path, data: str | None) -> Path:
    """Write the job, unless it exists."""
    folder = cache / "jobs" / name
    if (folder / "facts.json").exists():
        return folder
    import torch

    from fedcohort.simulate.data import load_dataset
    from fedcohort.simulate.models import build_model

    rng = np.random.default_rng(0)
    source = {"W1": "fashion-mnist", "W2": "cifar10", "W3": "femnist"}[name]
    dataset = load_dataset(source, folder=data)
    pixels = dataset.x_train.astype(np.float32) / 255
    axes = tuple(range(pixels.ndim - 1)) if pixels.ndim == 4 else None
    mean, spread = pixels.mean(axis=axes), pixels.std(axis=axes)

    def standard(x: np.ndarray) -> np.ndarray:
        x = (x.astype(np.float32) / 255 - mean) / spread
        x = x.transpose(0, 3, 1, 2) if x.ndim == 4 else x[:, None]
        return np.ascontiguousarray(x, dtype=np.float32)

    count = len(pixels)
    if name == "W3":
        writers = np.asarray(dataset.writers)
        owned = [np.flatnonzero(writers == w) for w in range(writers.max() + 1)]
        sizes = rng.integers(20, 181, 3500)
        parts = [rng.choice(owned[k % len(owned)], n) for k, n in enumerate(sizes)]
    else:
        parts = list(rng.permutation(count).reshape(-1, {"W1": 600, "W2": 250}[name]))
    facts = {
        "W1": {"model": "mlp", "steps": 20, "batch": 64, "lr": 0.005, "decay": 1e-4, "cohort": 10, "classes": 10},
        "W2": {"model": "lenet", "steps": 25, "batch": 50, "lr": 0.05, "decay": 0.0, "cohort": 10, "classes": 10},
        "W3": {"model": "mlp", "steps": 5, "batch": 64, "lr": 0.01, "decay": 0.0, "cohort": 30, "classes": 62},
    }[name]
    x = standard(dataset.x_train)
    torch.manual_seed(0)
    module = build_model(str(facts["model"]), x.shape[1:], int(str(facts["classes"])))
    jobs.write(
        folder,
        {"name": name, **facts},
        {
            "x": x,
            "y": dataset.y_train.astype(np.int64),
            "x_test": standard(dataset.x_test),
            "y_test": dataset.y_test.astype(np.int64),
            "order": np.concatenate(parts),
            "offsets": np.concatenate([[0], np.cumsum([len(part) for part in parts])]),
        },
        {key: value.numpy() for key, value in module.state_dict().items()},
    )
    return folder


def cohorts(job: jobs.Job, turn: int, rounds: int) -> list[list[int]]:
    """Draw the cohorts of a turn."""
    rng = np.random.default_rng((1, turn))
    return [rng.permutation(len(job.parts))[: job.cohort].tolist() for _ in range(rounds)]


def operations(job: jobs.Job, chosen: list[list[int]]) -> float:
    """Return the floating-point operations of a turn: the forward products, and the gradients of weights and inputs.

    Images need no gradient. A product of a weight with an input and its sum are two operations. Everything else
    (activations, loss, steps) is left out.
    """
    forward, first, size = 0, 0, 32
    for name, value in job.start.items():
        if not name.endswith("weight"):
            continue
        if value.ndim == 4:
            size = size - value.shape[2] + 1
            layer = 2 * value.size * size * size
            size //= 2
        else:
            layer = 2 * value.size
        forward, first = forward + layer, first or layer
    rng = np.random.default_rng(0)
    samples = sum(len(batch) for cohort in chosen for client in cohort for batch in job.batches(client, rng))
    return float(samples * (3 * forward - first))


def sgemm() -> dict[str, float]:
    """Return the operations per second of torch's products of two 1,024 x 1,024 matrices, a hundred in a row.

    On the clock with one thread per core, in processor time with one thread.
    """
    import torch

    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    speed = {}
    for name, threads, clock in (("clock", CORES, time.perf_counter), ("processor", 1, time.thread_time)):
        torch.set_num_threads(threads)
        a @ b
        began = clock()
        for _ in range(100):
            a @ b
        speed[name] = 100 * 2 * 1024**3 / (clock() - began)
    return speed


def accuracy(job: jobs.Job, parameters: dict[str, np.ndarray]) -> float:
    """Test a model."""
    import torch
    from models_torch import build

    module = build(job)
    module.load_state_dict({name: torch.from_numpy(np.array(parameters[name])) for name in job.start})
    x, y = job.test()
    with torch.no_grad():
        return float((module(torch.from_numpy(np.array(x))).argmax(1).numpy() == y).mean())


# -- processes ---------------------------------------------------------------------------------------------------------


class Side:
    """A peer's process. FedJAX keeps the threads it starts with; the others can be told."""

    def __init__(self, name: str, cache: Path, folder: Path, threads: int = CORES) -> None:
        self.name, self.cache = name, cache
        python = sys.executable if name in OURS else str(cache / name / "bin" / "python")
        # By default, Ray gives its workers the lowest priority, and joins a cluster that already runs here. So it gets
        # a priority and its own folder.
        own = {"RAY_worker_niceness": "0", "RAY_TMPDIR": str(cache / "ray")}
        environment = os.environ | own | {"OMP_NUM_THREADS": str(threads)}
        if threads == 1:
            environment |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
        if name not in OURS:
            environment.pop("PYTHONPATH", None)
        self.log = (cache / f"{name}.log").open("w")
        self.process = subprocess.Popen(
            [python, "serve.py", f"on_{name}", str(folder)],
            cwd=HERE,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; its messages are in {self.log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: object) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def rates(self, chosen: list[list[int]], threads: int) -> dict[str, float]:
        """Run rounds; return rounds per second, on the clock and in processor time."""
        rounds = (
            len(chosen) - 2 if self.name == "fedcohort" else len(chosen)
        )  # it leaves out its first and its last round
        answer = self.ask(cohorts=chosen, **({} if self.name in SPREAD else {"threads": threads}))
        return {"clock": rounds / float(answer["seconds"]), "processor": rounds / float(answer["processor"])}

    def peak(self, chosen: list[list[int]]) -> float:
        """Run rounds; return the peak memory (MiB) of the process and its descendants; shared pages count in parts."""
        most, over = 0.0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.wait(0.2):
                most = max(most, sum(map(_memory, _descendants(self.process.pid))))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            self.ask(cohorts=chosen)
        finally:
            over.set()
            watcher.join()
        return most

    def tested(self, job: jobs.Job) -> float:
        """Return the accuracy of the current model."""
        place = self.cache / f"{self.name}.npz"
        answer = self.ask(save=str(place))
        return float(answer["accuracy"]) if "accuracy" in answer else accuracy(job, dict(np.load(place)))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(place.name))
    tree, left = [], [root]
    while left:
        tree.append(left.pop())
        left += parents.get(tree[-1], [])
    return tree


def _memory(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def lines_of(name: str) -> int:
    """Count the lines of an adapter that are neither empty nor documentation."""
    text = (HERE / f"on_{name}.py").read_text()
    lines = [line.strip() for part in text.split('"""')[::2] for line in part.splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


# -- measuring ---------------------------------------------------------------------------------------------------------


def check(work: str, names: list[str], options: argparse.Namespace) -> None:
    """Run the first rounds of each side separately; store its accuracy and its memory."""
    folder = prepare(work, options.cache, options.data)
    job = jobs.read(folder)
    first = cohorts(job, 0, FIRST[work])
    sides = stored().get(work, {}).get("sides", {})
    for name in (name for name in (*OURS, *names) if name not in OURS or name not in sides):
        side = Side(name, options.cache, folder)
        memory, score = side.peak(first), side.tested(job)
        side.close()
        sides[name] = {"accuracy": score, "memory": memory, "lines": lines_of(name)}
        print(f"{work} {name}: {100 * score:.2f}%, {memory:.0f} MiB", flush=True)
        save(work, "sides", sides)
    scores = {name: side["accuracy"] for name, side in sides.items()}
    apart = {name: score for name, score in scores.items() if abs(score - scores["engine"]) > AGREE}
    if apart:
        raise SystemExit(f"{work}: these accuracies differ from the engine's, {scores['engine']}: {apart}")


def measure(work: str, names: list[str], options: argparse.Namespace) -> None:
    """Make turns."""
    ends = time.monotonic() + options.seconds
    folder = prepare(work, options.cache, options.data)
    job = jobs.read(folder)
    turns: list[dict[str, Any]] = [] if options.fresh else stored().get(work, {}).get("turns", [])
    sides: list[tuple[str, int, Side]] = []
    for name in (*OURS, *names):
        side = Side(name, options.cache, folder)
        if name in SPREAD:
            sides.append((name, CORES, side))
        else:
            one = Side(name, options.cache, folder, 1) if name == "fedjax" else side
            sides += [(name, 1, one), (name, CORES, side)]
    warm = cohorts(job, 0, 3)
    for _, threads, side in sides:
        side.rates(warm, threads)
    while len(turns) < TURNS and time.monotonic() < ends:
        turns.append(one_turn(job, sides, len(turns) + 1, *ROUNDS[work]))
        save(work, "turns", turns)
        shown = ", ".join(f"{name} {turn['clock']:.3g}" for name, turn in turns[-1]["rates"].items())
        print(f"{work} turn {len(turns)} on the clock: {shown}; share of sgemm {turns[-1]['share']}", flush=True)
    for side in {id(side): side for _, _, side in sides}.values():
        side.close()


def one_turn(job: jobs.Job, sides: list[tuple[str, int, Side]], turn: int, ours: int, theirs: int) -> dict[str, Any]:
    """Run the rounds of every side; the fastest of several numbers of threads counts."""
    load = os.getloadavg()[0]
    rates: dict[str, dict[str, float]] = {}
    speeds = []
    for at in np.random.default_rng((2, turn)).permutation(len(sides)):
        name, threads, side = sides[at]
        if name == "engine":
            speeds.append(sgemm())
        rate = side.rates(cohorts(job, turn, {"fedcohort": ours + 2, "engine": ours}.get(name, theirs)), threads)
        if name == "engine":
            speeds.append(sgemm())
        if name not in rates or rate["clock"] > rates[name]["clock"]:
            rates[name] = rate | {"threads": threads}
    speed = {way: sum(one[way] for one in speeds) / len(speeds) for way in speeds[0]}
    work = operations(job, cohorts(job, turn, ours)) / ours
    share = {way: rates["engine"][way] * work / value for way, value in speed.items()}
    return {"rates": rates, "sgemm": speed, "share": share, "load": [load, os.getloadavg()[0]]}


def save(work: str, part: str, value: object) -> None:
    """Add results to the file, which another process may have changed meanwhile."""
    kept = stored()
    kept["machine"] = {"cores": CORES, "python": platform.python_version()}
    kept.setdefault(work, {})[part] = value
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def stored() -> dict[str, Any]:
    """Read the stored results."""
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return kept


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["install", "check", "W1", "W2", "W3", "table"])
    parser.add_argument("peers", nargs="*", metavar="PEER", help="default: all; for check, a workload comes first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no turn after this many seconds")
    parser.add_argument("--fresh", action="store_true", help="discard the stored turns")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fedcohort-peers")
    parser.add_argument("--data", default=None, help="where the datasets are")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    if options.what == "install":
        install(options.peers or list(ENVIRONMENTS), options.cache)
        return
    if options.what == "table":
        import table

        table.write(stored())
    elif options.what == "check":
        work, *names = options.peers
        check(work, names or list(ENVIRONMENTS), options)
    else:
        measure(options.what, options.peers or list(ENVIRONMENTS), options)


if __name__ == "__main__":
    main()
