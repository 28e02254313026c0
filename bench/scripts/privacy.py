"""What sealed label counts cost: sealing, opening, products, bytes, for N = 50 to 1,000 clients.

Run: python bench/scripts/privacy.py [--clients 50,100,200,500,1000] [--classes 10] [--repeats 3]; writes
bench/results/privacy.md. Times are processor time of one process, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

import numpy as np

from fedcohort.privacy.keyholder import KeyHolder
from fedcohort.privacy.rotation import SecretRotation
from fedcohort.privacy.scheme import ClientKey, LabelSeal, make_keys, parse_clients

ROOT = Path(__file__).parents[2]


def measured(n: int, classes: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    counts = np.array([rng.multinomial(300, rng.dirichlet(np.full(classes, 0.3))) for _ in range(n)])
    keys = {f"client-{i}": ClientKey.fresh() for i in range(n)}
    names = list(keys)
    secret = make_keys(classes)
    seals = [LabelSeal(secret.public, key) for key in keys.values()]
    began = time.process_time()
    sealed = {name: seal.seal(name, row) for name, seal, row in zip(names, seals, counts, strict=True)}
    encrypted = time.process_time()
    holder = KeyHolder(secret, parse_clients(f"{name} {key.public}" for name, key in keys.items()))
    started = time.process_time()
    assert not holder.admit(sealed)
    opened = time.process_time()
    computed = holder.products(names, names)
    multiplied = time.process_time()
    assert np.array_equal(computed, counts @ counts.T)
    holder.close()
    return {
        "seal": (encrypted - began) / n * 1e3,
        "open": (opened - started) * 1e3,
        "multiply": (multiplied - opened) * 1e3,
        "up": len(sealed[names[0]]),
        "public key": len(secret.public.to_bytes()),
    }


def rotate(n: int, classes: int) -> float:
    counts = np.random.default_rng(0).integers(0, 100, (n, classes))
    rotation = SecretRotation.fresh(classes)
    began = time.process_time()
    for row in counts:
        rotation.rotate(row)
    return (time.process_time() - began) / n * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="50,100,200,500,1000")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3, help="the best of this many counts")
    arguments = parser.parse_args()
    lines = [
        "# What sealed label counts cost",
        "",
        f"`python bench/scripts/privacy.py --clients {arguments.clients} --classes {arguments.classes}`; "
        f"{platform.machine()}, {os.cpu_count()} cores shared with other work, one process; "
        f"best of {arguments.repeats}. CPU time.",
        "",
        f"All pairs of N clients, {arguments.classes} classes. The results of every run are checked against the "
        "products of the counts.",
        "",
        "| N | seal and sign, a client | check and open all, key holder | all products, key holder | to key holder |",
        "|---:|---:|---:|---:|---:|",
    ]
    for n in map(int, arguments.clients.split(",")):
        runs = [measured(n, arguments.classes, seed) for seed in range(arguments.repeats)]
        best = {key: min(run[key] for run in runs) for key in runs[0]}
        lines.append(
            f"| {n} | {best['seal']:.2f} ms | {best['open']:.0f} ms | {best['multiply']:.1f} ms "
            f"| {n * best['up'] / 1e6:.2f} MB |"
        )
        print(lines[-1], flush=True)
    lines += [
        "",
        f"A client sends {best['up'] / 1e3:.1f} kB once; the public key is {best['public key'] / 1e3:.1f} kB long. "
        f"Rotating a row takes {rotate(1000, arguments.classes):.0f} microseconds, and the row takes "
        f"{8 * arguments.classes} bytes.",
    ]
    (ROOT / "bench/results/privacy.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[-2:]))
