"""How much each reply of a round may weigh: no more than the client can account for.

A client writes the weight of its model into its reply. Without a limit, a weight of 2**53 would be the whole average.
There are three bounds. Each follows from the replies of one round, so a restart finds the same weights:

- A client that declared a number of samples weighs at most that number. If apps count samples over several epochs, or
  tokens, the median weight per declared sample of the other clients is above 1; then twice that median is allowed. A
  weight that more than half of the cohort has, such as 1 for everybody, is always allowed.
- A client that declared nothing weighs at most ten times the median of the others, because the sizes of real clients
  differ that much. The same holds for the only client that declared something, since it cannot be compared.
- ``max_share`` limits one client's share of the total. The operator sets it, and only this bound also works against
  clients that lie about their size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

_UNDECLARED = 10.0  # times the median of the others
_UNIT = 2.0  # times the usual weight per sample, if that is above 1


def bounded_weights(
    weights: Mapping[str, float], sizes: Mapping[str, int | None], max_share: float | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the weights within their bounds, by client, and the reason for each that was lowered.

    Parameters
    ----------
    weights : mapping of str to float
        The weights that the clients sent, 0 or more.
    sizes : mapping of str to int or None
        The number of samples that each client declared.
    max_share : float, optional
        Largest share of the sum that one client may have.

    >>> bounded_weights({"anna": 2.0**53, "ben": 30}, {"anna": 10, "ben": 30})[0]
    {'anna': 10.0, 'ben': 30.0}
    """
    bounded = {name: float(weight) for name, weight in weights.items()}
    reasons: dict[str, str] = {}
    unchecked = _bound_by_samples(weights, sizes, bounded, reasons)
    _bound_by_others(weights, sizes, unchecked, bounded, reasons)
    if max_share is not None:
        # Last, so that the share is one of weights that are already bounded.
        most = _largest(list(bounded.values()), max_share)
        for name in [name for name, weight in bounded.items() if weight > most]:
            _lower(bounded, reasons, name, most, f"no client may have more than {max_share:g} of a round's weight")
    return bounded, reasons


def bounded_shares(
    weights: Mapping[int, float], clients: Mapping[int, str], max_share: float
) -> tuple[dict[int, float], dict[str, str]]:
    """Return the final weights of a model's answers with no client above its share, and by client why they are lower.

    Parameters
    ----------
    weights : mapping of int to float
        By answer, a client may have given several.
    clients : mapping of int to str
        The client of each answer.

    >>> bounded_shares({0: 1.0, 1: 2.0, 2: 1.0, 3: 1.0}, {0: "anna", 1: "anna", 2: "ben", 3: "cem"}, 0.5)[0]
    {0: 0.6666666666666666, 1: 1.3333333333333333, 2: 1.0, 3: 1.0}
    """
    sums: dict[str, float] = {}
    for answer, weight in weights.items():
        sums[clients[answer]] = sums.get(clients[answer], 0.0) + weight
    most = _largest(list(sums.values()), max_share)
    reasons = {
        name: f"the weight of its answers was lowered from {total:g} to {most:g}: no client may have more than "
        f"{max_share:g} of a model"
        for name, total in sums.items()
        if total > most
    }
    factors = {name: most / sums[name] for name in reasons}
    return {answer: weight * factors.get(clients[answer], 1.0) for answer, weight in weights.items()}, reasons


def _bound_by_samples(
    weights: Mapping[str, float], sizes: Mapping[str, int | None], bounded: dict[str, float], reasons: dict[str, str]
) -> list[str]:
    """Lower weights that are too large for the declared samples; return the clients that cannot be checked this way."""
    common_weight = _majority(list(bounded.values())) or 0.0
    ratios = sorted(weight / size for name, weight in bounded.items() if (size := sizes.get(name)))
    # A weight that most clients share whatever their sizes says nothing about the weight of a sample.
    by_samples = not common_weight or _majority(ratios) is not None
    unchecked: list[str] = []
    for name, weight in weights.items():
        size = sizes.get(name)
        if size is None or (size and len(ratios) == 1):
            unchecked.append(name)
            continue
        per_sample = 1.0
        if size and by_samples:
            middle = (len(ratios) - 2) // 2  # the lower of two medians of the others
            usual = ratios[middle + (bisect_left(ratios, weight / size) <= middle)]
            # Above 1, the app counts epochs or tokens.
            per_sample = _UNIT * usual if usual > 1 else 1.0
        most = max(per_sample * size, common_weight)
        if weight > most:
            _lower(bounded, reasons, name, most, f"it declared {size:,} samples")
    return unchecked


def _bound_by_others(
    weights: Mapping[str, float],
    sizes: Mapping[str, int | None],
    unchecked: Sequence[str],
    bounded: dict[str, float],
    reasons: dict[str, str],
) -> None:
    """Lower weights far above the others' if their clients declared no size, or only they did."""
    ordered = sorted(weight for weight in bounded.values() if weight > 0)
    for name in [name for name in unchecked if bounded[name] > 0 and len(ordered) > 1]:
        size = sizes.get(name)
        middle = (len(ordered) - 1) // 2  # of the others: of all but one entry of its own weight
        median = ordered[middle + (bisect_left(ordered, float(weights[name])) <= middle)]
        if bounded[name] > (most := max(_UNDECLARED * median, size or 0.0)):
            why = "it declared no size" if size is None else f"it alone declared a size, {size:,} samples"
            _lower(bounded, reasons, name, most, f"{why}, and others weigh {median:g}")


def _majority(values: Sequence[float]) -> float | None:
    """Return the value that more than half of the values have, or None."""
    common, count = Counter(values).most_common(1)[0] if values else (None, 0)
    return common if 2 * count > len(values) else None


def _lower(bounded: dict[str, float], reasons: dict[str, str], name: str, most: float, why: str) -> None:
    reasons[name] = f"its weight of {bounded[name]:g} was lowered to {most:g}: {why}"
    bounded[name] = most


def _largest(weights: Sequence[float], share: float) -> float:
    """Return the largest weight with which nobody has more than ``share`` of the sum."""
    ordered = sorted((weight for weight in weights if weight > 0), reverse=True)
    for count, weight in enumerate(ordered):
        # Is this weight within the share once the larger ones are lowered to one value?
        left = 1 - count * share
        if left <= 0:
            break
        most = share * math.fsum(ordered[count:]) / left
        if weight <= most:
            return most if count else math.inf
    return ordered[-1] if ordered else math.inf  # too few clients for this share, so all weigh the same
