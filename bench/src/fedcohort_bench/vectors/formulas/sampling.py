"""Methods that draw by size, norm, diversity or success, with weights that correct for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from fedcohort_bench.vectors.formulas.draws import (
    Entry,
    Expected,
    Values,
    Vector,
    delivered,
    evenly,
    for_all_data,
    in_proportion,
    one_by_one,
)


def uniform(v: Vector) -> Iterator[Expected]:
    """McMahan 2017, Algorithm 1."""
    for entry in v["rounds"]:
        yield Expected(evenly(entry["available"], entry["size"]))


def everybody(v: Vector) -> Iterator[Expected]:
    """The same with C = 1."""
    for entry in v["rounds"]:
        yield Expected(dict.fromkeys(entry["available"], 1.0))


def size_weighted(v: Vector) -> Iterator[Expected]:
    """Li 2018 (FedProx), Algorithm 2: m draws with replacement, in proportion to size."""
    for entry in v["rounds"]:
        m, total = entry["size"], sum(v["sizes"][c] for c in entry["available"])
        share = {c: v["sizes"][c] / total for c in entry["available"]}
        chance = {c: 1 - (1 - p) ** m for c, p in share.items()}
        yield Expected(chance, share, weights=_counted(entry, dict.fromkeys(share, 1.0)))


def _counted(entry: Entry, each: Mapping[int, float]) -> Values | None:
    """Return weights of the cohort if everybody in it was drawn once; from a smaller one, counts are not known."""
    return {c: each[c] for c in entry["cohort"]} if len(entry["cohort"]) == entry["size"] else None


def clustered(v: Vector) -> Iterator[Expected]:
    """Fraboni 2021, Algorithm 1: the largest client first fills one of m distributions of M samples after the other."""
    for entry in v["rounds"]:
        m, size = entry["size"], {c: v["sizes"][c] for c in entry["available"]}
        total = sum(size.values())
        missed = dict.fromkeys(size, 1.0)
        share = [dict.fromkeys(size, 0.0) for _ in range(m)]
        k, room = 0, float(total)
        for c in sorted(size, key=lambda c: -size[c]):
            left = float(m * size[c])
            while left > 0 and k < m:
                part = min(left, room)
                share[k][c] += part / total
                left, room = left - part, room - part
                if room == 0:
                    k, room = k + 1, float(total)
        for distribution in share:
            missed = {c: p * (1 - distribution[c]) for c, p in missed.items()}
        mean = total / len(size)
        yield Expected(
            {c: 1 - p for c, p in missed.items()},
            {c: m * n / total for c, n in size.items()},
            weights=_counted(entry, {c: mean / n for c, n in size.items()}),
        )


def gradnorm(v: Vector) -> Iterator[Expected]:
    """Chen 2022, Algorithm 1: p_i in proportion to w_i ||U_i|| up to 1; each counts w_i / p_i."""
    norm: Values = {}
    for entry in v["rounds"]:
        here = entry["available"]
        known = [norm[c] for c in here if c in norm]
        usual = sum(known) / len(known) if known else 1.0
        total = sum(v["sizes"][c] for c in here)
        importance = {c: v["sizes"][c] / total * norm.get(c, usual) for c in here}
        least = v["parameters"]["floor"] * sum(importance.values()) / len(here)
        chance = in_proportion({c: max(x, least) for c, x in importance.items()}, entry["size"])
        scale = for_all_data(v, entry)
        yield Expected(chance, chance, weights={c: scale / chance[c] for c in entry["cohort"]})
        norm |= {row["client"]: row["update-norm"] for row in delivered(entry)}


def delta(v: Vector) -> Iterator[Expected]:
    """Wang 2023, Eq. 11: the cohort divides the sum of its probabilities by sqrt(zeta^2 + local variance)."""
    mass = dict.fromkeys(range(v["clients"]), 1.0)
    for entry in v["rounds"]:
        chance = in_proportion({c: mass[c] for c in entry["available"]}, entry["size"])
        scale = for_all_data(v, entry)
        yield Expected(chance, chance, weights={c: scale / chance[c] for c in entry["cohort"]})
        zeta = {row["client"]: row["update-distance"] for row in delivered(entry)}
        variance = v["parameters"]["local_variance"] * sum(z * z for z in zeta.values()) / max(len(zeta), 1)
        diversity = {c: math.sqrt(z * z + variance) for c, z in zeta.items()}
        together = sum(mass[c] for c in zeta)
        mass |= {c: d / sum(diversity.values()) * together for c, d in diversity.items()}


def feel(v: Vector) -> Iterator[Expected]:
    """Ren 2020: p_k = a_k sqrt((1 - rho) / (rho T_k + lambda)) of sum 1; Raj's weights (1956) of an ordered draw."""
    rho, m = v["parameters"]["rho"], v["rounds"][0]["size"]
    norm, seconds = dict[int, float](), dict[int, float]()
    for entry in v["rounds"]:
        here = entry["available"]
        norms, times = _filled(norm, here), _filled(seconds, here)
        usual, slow = (sum(x.values()) / len(here) for x in (norms, times))
        a = {c: v["sizes"][c] * max(norms[c], 0.01 * usual) for c in here}
        a = {c: x / sum(a.values()) for c, x in a.items()}
        t = {c: rho * times[c] / slow for c in here}
        low, high = -min(t.values()), 10.0  # of lambda
        for _ in range(300):
            middle = (low + high) / 2
            total = sum(a[c] * math.sqrt((1 - rho) / (t[c] + middle)) if t[c] + middle > 0 else 2.0 for c in here)
            low, high = (middle, high) if total > 1 else (low, middle)
        p = {c: a[c] * math.sqrt((1 - rho) / (t[c] + high)) for c in here}
        scale, before, weights = for_all_data(v, entry), 0.0, dict[int, float]()
        for r, c in enumerate(entry["cohort"], start=1):  # in the order of the draw
            weights[c] = scale * ((1 - before) / p[c] + m - r) / m
            before += p[c]
        yield Expected(one_by_one(p, m), p, weights=weights)
        norm |= {row["client"]: row["gradient-norm"] for row in delivered(entry)}
        seconds |= {row["client"]: row["duration"] for row in delivered(entry)}


def _filled(known: Values, clients: list[int]) -> Values:
    """Return the values of ``clients``, the mean for those without one."""
    here = [known[c] for c in clients if c in known]
    usual = sum(here) / len(here) if here else 1.0
    return {c: known.get(c, usual) for c in clients}


def e3cs(v: Vector) -> Iterator[Expected]:
    """Huang 2022: p = sigma + (k - K sigma) w' / sum w', w' = min(w, (1 - sigma) alpha), no p above 1."""
    fairness, rate = v["parameters"]["fairness"], v["parameters"]["rate"]
    log_weight = dict.fromkeys(range(v["clients"]), 0.0)
    for entry in v["rounds"]:
        here, k = entry["available"], entry["size"]
        sigma = fairness * k / len(here)
        free = k - len(here) * sigma
        weight = {c: math.exp(log_weight[c] - max(log_weight[i] for i in here)) for c in here}

        def chances(alpha: float, weight: Values = weight, free: float = free, sigma: float = sigma) -> Values:
            capped = {c: min(w, (1 - sigma) * alpha) for c, w in weight.items()}
            return {c: sigma + free * w / sum(capped.values()) for c, w in capped.items()}

        low, high = 0.0, 10.0 * len(here)
        for _ in range(300):
            alpha = (low + high) / 2
            low, high = (alpha, high) if max(chances(alpha).values()) <= 1 else (low, alpha)
        p = chances(low) if max(chances(high).values()) > 1 else chances(high)
        yield Expected(one_by_one(p, k), p)
        for row in delivered(entry):
            if p[row["client"]] < 1 - 1e-9:
                log_weight[row["client"]] += free * rate / len(here) / p[row["client"]]
        most = max(log_weight.values())
        log_weight = {c: max(w - most, -30.0) for c, w in log_weight.items()}
