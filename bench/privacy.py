"""What encrypted class balance costs: encrypt, product, decrypt, bytes, for N = 50 to 1,000 clients.

Run: python bench/privacy.py [--clients 50,100,200,500,1000] [--classes 10] [--repeats 3]; writes
bench/results/privacy.md. Wall time and CPU time of one process are both given, because a machine may be shared.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcohort.privacy.keyholder import KeyHolder
from fedcohort.privacy.products import SealedLabels
from fedcohort.privacy.rotation import SecretRotation
from fedcohort.privacy.scheme import capacity, make_keys

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Spent:
    wall: float
    cpu: float


class Watch:
    def __enter__(self) -> Watch:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.spent = Spent(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def measured(n: int, classes: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    counts = np.array([rng.multinomial(300, rng.dirichlet(np.full(classes, 0.3))) for _ in range(n)])
    names = [f"client-{i}" for i in range(n)]
    secret, evaluation = make_keys(classes)
    with Watch() as encrypt:
        sealed = {name: secret.public.seal(name, row) for name, row in zip(names, counts, strict=True)}
    server, holder = SealedLabels(evaluation), KeyHolder(secret, names)
    with Watch() as product:
        rows = server.rows(sealed)
    with Watch() as decrypt:
        holder.open(rows, {name: int(row.sum()) for name, row in zip(names, counts, strict=True)})
    assert np.array_equal(holder.known(names, names), counts @ counts.T)
    newcomer = KeyHolder(secret, [*names, "new"])
    with Watch() as join:
        one = server.rows({"new": secret.public.seal("new", counts[0])})
    newcomer.close()
    return {
        "encrypt": encrypt.spent.cpu / n * 1e3,
        "product": product.spent.cpu,
        "product wall": product.spent.wall,
        "decrypt": decrypt.spent.cpu,
        "decrypt wall": decrypt.spent.wall,
        "join": join.spent.cpu,
        "join rows": len(one),
        "rows": len(rows),
        "up": len(sealed[names[0]]),
        "to holder": sum(len(row.body) for row in rows),
        "evaluation key": len(evaluation.to_bytes()),
        "public key": len(secret.public.to_bytes()),
    }


def rotated(n: int, classes: int) -> float:
    counts = np.random.default_rng(0).integers(0, 100, (n, classes))
    rotation = SecretRotation.fresh(classes)
    with Watch() as watch:
        for row in counts:
            rotation.rotated(row)
    return watch.spent.cpu / n * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="50,100,200,500,1000")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3, help="best of so many, up to 200 clients")
    arguments = parser.parse_args()
    lines = [
        "# What encrypted class balance costs",
        "",
        f"`python bench/privacy.py --clients {arguments.clients} --classes {arguments.classes}`; {platform.machine()}, "
        f"{os.cpu_count()} cores shared with other work, one process; best of {arguments.repeats} up to 200 clients, "
        "one measurement beyond. CPU seconds, wall seconds in brackets.",
        "",
        f"All pairs of N clients, {arguments.classes} classes, {capacity(arguments.classes)} clients in one packed "
        "ciphertext. Exact: every run is compared with the products of the counts themselves.",
        "",
        "| N | encrypt, a client | all products, server | open S, key holder | rows | to key holder | one joins |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for n in map(int, arguments.clients.split(",")):
        runs = [measured(n, arguments.classes, seed) for seed in range(arguments.repeats if n <= 200 else 1)]
        best = {key: min(run[key] for run in runs) for key in runs[0]}
        lines.append(
            f"| {n} | {best['encrypt']:.1f} ms | {best['product']:.2f} s ({best['product wall']:.1f}) "
            f"| {best['decrypt']:.2f} s ({best['decrypt wall']:.1f}) | {best['rows']:.0f} "
            f"| {best['to holder'] / 1e6:.1f} MB | {best['join'] * 1e3:.0f} ms |"
        )
        print(lines[-1], flush=True)
    lines += [
        "",
        f"A client sends {best['up'] / 1e3:.0f} kB once; public key {best['public key'] / 1e3:.0f} kB, evaluation key "
        f"{best['evaluation key'] / 1e6:.1f} MB, both brought along. A rotated row takes "
        f"{rotated(1000, arguments.classes):.0f} microseconds and {8 * arguments.classes} bytes.",
    ]
    (ROOT / "bench/results/privacy.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[-2:]))
