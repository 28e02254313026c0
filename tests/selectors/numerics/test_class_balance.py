"""Groups that include data of the past, by brute force."""

import numpy as np
import pytest

from fedcohort import LabelCounts
from fedcohort.core.clients import LabelFactor, LabelGram
from fedcohort.selectors.numerics.class_balance import Past, group_of


def imbalance(total):
    return float(((total / total.sum() - 1 / len(total)) ** 2).sum())


def in_form(form, counts):
    classes = counts.shape[1]
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(classes, classes)))[0]
    return {
        "counts": lambda: LabelCounts(counts),
        "factor": lambda: LabelFactor(counts @ rotation, classes),
        "gram": lambda: LabelGram(counts @ counts.T, classes),
    }[form]()


@pytest.mark.parametrize("form", ["counts", "factor", "gram"])
@pytest.mark.parametrize("candidates", [None, np.array([1, 2, 5, 6])])
@pytest.mark.parametrize("scale", [1.0, 2.0**47])
def test_the_past_counts_in_every_sum_except_that_of_the_members(form, candidates, scale):
    rng = np.random.default_rng(4)
    counts = rng.integers(1, 30, (8, 3)).astype(float) * scale
    labels = in_form(form, counts)
    past = Past(np.array([3, 6]), np.array([0.5, 0.25]))
    before = past.weights @ counts[past.clients]
    who = np.arange(8) if candidates is None else candidates
    group = group_of(labels, counts.sum(1), candidates, past)

    def check(members):
        total = counts[who[members]].sum(0)
        assert group.qcid() == pytest.approx(imbalance(before + total), abs=1e-12)
        assert group.qcid_of_members() == pytest.approx(imbalance(total) if members else 2 / 3, abs=1e-12)
        extended = group.qcid_with_each(np.empty(len(who)))
        chance = group.extended_by_chance()
        for position, client in enumerate(who):
            if position not in members:
                whole = before + total + counts[client]
                assert extended[position] == pytest.approx(imbalance(whole), abs=1e-12)
                assert chance[position] == pytest.approx(2 / 3 / whole.sum())

    check([])
    group.add(2)
    check([2])
    group.add(0)
    check([2, 0])
    group.remove(2)
    check([0])
