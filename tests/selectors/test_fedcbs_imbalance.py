"""QCID and its sampling against the paper's formulas, written out with exact fractions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fedcohort.core.clients import LabelCounts, LabelFactor, LabelGram
from fedcohort.core.errors import InputError
from fedcohort.selectors.numerics import class_balance as imbalance
from fedcohort.selectors.ours.fedcbs_chance import _ChanceWeighting, _swap_members
from fedcohort.selectors.papers import fedcbs as selector

from . import fedcbs_enumeration as enumeration

FIGURE_3 = np.array([[5] * 6, [6, 6, 6, 6, 6, 0], [0, 0, 0, 10, 10, 10], [10, 10, 10, 0, 0, 0]])


def exact_qcid(counts, group):
    """The definition: squared distance of the grouped label distribution to the uniform one."""
    rows = [[Fraction(int(v)) for v in counts[n]] for n in group]
    total = sum(map(sum, rows))
    classes = len(rows[0])
    return sum((sum(row[b] for row in rows) / total - Fraction(1, classes)) ** 2 for b in range(classes))


def paper_probability(counts, pick, k, pulls, by_chance=False):
    """P(C_1 = c_1, ..., C_M = c_M) by the formulas of Sec. 3.3, beta_m = m, with their denominators."""
    strength, floor = 10.0, Fraction(1, 10**20)
    classes = len(counts[0])

    def raise_to_floor(group):
        least = Fraction(classes - 1, classes * int(counts[group].sum())) if by_chance else floor
        return max(exact_qcid(counts, group), least)

    def first(c):
        return 1 / raise_to_floor([c]) + Fraction(strength * math.sqrt(3 * math.log(k) / (2 * pulls[c])))

    everybody = range(len(counts))
    probability = first(pick[0]) / sum(first(c) for c in everybody)
    for m in range(2, len(pick) + 1):
        before = list(pick[: m - 1])
        above = first(pick[0]) if m == 2 else 1 / raise_to_floor(before) ** (m - 1)

        def weight(c, before=before, above=above, m=m):
            return 1 / raise_to_floor([*before, c]) ** m / above

        rest = [c for c in everybody if c not in before]
        probability *= weight(pick[m - 1]) / sum(weight(c) for c in rest)
    return float(probability)


def seven_clients(seed=1):
    rng = np.random.default_rng(seed)
    return rng.multinomial(40, rng.dirichlet(np.full(4, 0.4), 7)) + rng.integers(0, 9, (7, 1))


def forms(counts, seed=0):
    """The three forms of the same labels, with sizes if the form does not contain them."""
    counts = np.asarray(counts, dtype=float)
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(counts.shape[1],) * 2))[0]
    sizes = counts.sum(axis=1)
    return [
        (LabelCounts(counts), None),
        (LabelFactor(counts @ rotation, counts.shape[1]), sizes),
        (LabelGram(counts @ counts.T, counts.shape[1]), sizes),
    ]


@pytest.mark.parametrize("form", [0, 1, 2])
def test_theorem_3_1_equals_the_definition(form):
    counts = seven_clients()
    labels, sizes = forms(counts)[form]
    for size in (1, 2, 4, 7):
        for group in itertools.combinations(range(7), size):
            assert imbalance.qcid(labels, group, sizes) == pytest.approx(float(exact_qcid(counts, group)), abs=1e-14)


@pytest.mark.parametrize("form", [0, 1, 2])
def test_running_sums_follow_adding_and_removing(form):
    counts = seven_clients(2)
    labels, sizes = forms(counts)[form]
    candidates = np.array([0, 2, 3, 5, 6])
    group = imbalance.group_of(labels, sizes, candidates)
    for move in (1, 4, 0, -4, 3, -1):
        (group.remove if move < 0 else group.add)(abs(move))
        found = group.qcid_with_each(np.empty(5))
        for c in range(5):
            if c in group.members:
                assert found[c] == np.inf
            else:
                wanted = exact_qcid(counts, candidates[[*group.members, c]])
                assert found[c] == pytest.approx(float(wanted), abs=1e-14)


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_every_ordered_pick_has_the_papers_probability(k, form):
    counts = seven_clients()
    pulls = np.array([1, 3, 2, 1, 5, 1, 2])
    labels, sizes = forms(counts)[form]
    weighting = selector.Weighting(exploration=selector.exploration_bonus(10.0, k, pulls))
    picks, chances = enumeration.ordered_probabilities(labels, 3, weighting, sizes)
    assert len(picks) == 7 * 6 * 5
    assert chances.sum() == pytest.approx(1.0)
    for pick, chance in zip(picks.tolist(), chances, strict=True):
        assert chance == pytest.approx(paper_probability(counts, pick, k, pulls.tolist()), rel=1e-8)


@pytest.mark.parametrize("form", [0, 1, 2])
def test_the_floor_of_chance_in_every_ordered_pick(form):
    """Nearly balanced clients, most groups of which are below the imbalance of chance."""
    counts = np.random.default_rng(3).multinomial(30, np.full(4, 0.25), 6)
    counts[2] = [30, 0, 0, 0]
    labels, sizes = forms(counts)[form]
    bonus = selector.exploration_bonus(10.0, 5, np.ones(6))
    weighting = _ChanceWeighting(floor=imbalance.RESOLUTION, exploration=bonus)
    picks, chances = enumeration.ordered_probabilities(labels, 3, weighting, sizes)
    for pick, chance in zip(picks.tolist(), chances, strict=True):
        assert chance == pytest.approx(paper_probability(counts, pick, 5, [1] * 6, by_chance=True), rel=1e-8)
    below = [float(exact_qcid(counts, g)) < 0.75 / 90 for g in itertools.combinations(range(6), 3)]
    groups, target = enumeration.target_probabilities(labels, 3, weighting, sizes)
    assert 0 < sum(below) < len(groups)
    assert np.ptp(target[below]) == pytest.approx(0.0, abs=1e-12)  # all of 90 samples: one floor
    assert target[below].min() == pytest.approx(target.max())


def test_chance_is_the_mean_imbalance_of_balanced_samples():
    """Over all 3^4 = 81 equally likely ways to draw four samples of three classes."""
    draws = [np.bincount(labels, minlength=3) for labels in itertools.product(range(3), repeat=4)]
    mean = sum(exact_qcid(np.array([draw]), [0]) for draw in draws) / 81
    assert mean == Fraction(2, 12)
    assert imbalance.chance(np.array([4.0, 0.0]), 3).tolist() == pytest.approx([1 / 6, 2 / 3])


def test_draws_have_these_probabilities():
    labels = LabelCounts(seven_clients())
    weighting = selector.Weighting(exploration=selector.exploration_bonus(10.0, 4, np.ones(7)))
    picks, chances = enumeration.ordered_probabilities(labels, 3, weighting)
    index = {tuple(pick): i for i, pick in enumerate(picks.tolist())}
    rng = np.random.default_rng(11)
    seen = np.zeros(len(picks))
    draws = 6000
    for _ in range(draws):
        draw = selector.draw_group(imbalance.group_of(labels), 3, weighting, rng)
        seen[index[tuple(draw.picks.tolist())]] += 1
    common = chances * draws >= 5
    observed = np.append(seen[common], seen[~common].sum())
    expected = np.append(chances[common], chances[~common].sum()) * draws
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_figure_3_by_the_papers_own_formulas():
    """The optimum has a probability of only 0.074: the joint is not the 1 / QCID^beta that the paper aims for."""
    picks, chances = enumeration.ordered_probabilities(LabelCounts(FIGURE_3), 3, selector.Weighting(), None)
    found: dict[frozenset[int], float] = {}
    for pick, chance in zip(picks.tolist(), chances, strict=True):
        found[frozenset(pick)] = found.get(frozenset(pick), 0.0) + chance
    assert found[frozenset({0, 1, 2})] == pytest.approx(0.823, abs=5e-4)
    assert found[frozenset({0, 1, 3})] == pytest.approx(0.103, abs=5e-4)
    assert found[frozenset({0, 2, 3})] == pytest.approx(0.074, abs=5e-4)
    for group, chance in found.items():
        brute = sum(paper_probability(FIGURE_3, p, 1, [1] * 4) for p in itertools.permutations(group))
        assert chance == pytest.approx(brute, rel=1e-9)


def draw_and_swap(labels, sizes, size, weighting, swaps, rng, candidates=None):
    group = imbalance.group_of(labels, sizes, candidates)
    return _swap_members(group, selector.draw_group(group, size, weighting, rng), weighting, swaps, rng)


def test_swaps_find_the_optimum_of_figure_3():
    groups, target = enumeration.target_probabilities(LabelCounts(FIGURE_3), 3, selector.Weighting())
    assert target[groups.tolist().index([0, 2, 3])] > 0.9999
    rng = np.random.default_rng(1)
    labels = LabelCounts(FIGURE_3)
    found = [sorted(draw_and_swap(labels, None, 3, selector.Weighting(), 10, rng).picks.tolist()) for _ in range(300)]
    assert np.mean([group == [0, 2, 3] for group in found]) > 0.9


def test_swaps_have_the_target_distribution():
    """P(M) ~ QCID(M)^-beta_M by enumeration, against the sampler after many swaps."""
    labels = LabelCounts(seven_clients(5))
    weighting = selector.Weighting(beta=0.5)
    groups, target = enumeration.target_probabilities(labels, 3, weighting)
    counts = labels.counts.astype(int)
    brute = np.array([float(exact_qcid(counts, g)) ** -1.5 for g in groups])
    assert np.allclose(target, brute / brute.sum())
    index = {tuple(group): i for i, group in enumerate(groups.tolist())}
    rng = np.random.default_rng(3)
    seen = np.zeros(len(groups))
    for _ in range(2000):
        draw = draw_and_swap(labels, None, 3, weighting, 24, rng)
        seen[index[tuple(sorted(draw.picks.tolist()))]] += 1
    assert stats.chisquare(seen, target * 2000).pvalue > 1e-3
    picks, chances = enumeration.ordered_probabilities(labels, 3, weighting)
    sequential = np.zeros(len(groups))
    for pick, chance in zip(picks.tolist(), chances, strict=True):
        sequential[index[tuple(sorted(pick))]] += chance
    assert stats.chisquare(seen, sequential * 2000).pvalue < 1e-6  # and it is not the paper's


@pytest.mark.parametrize("seed", range(4))
def test_expected_qcid_is_below_uniform(seed):
    """Theorem 3.3, for the sequential draw and for the target distribution, and falling with beta."""
    labels = LabelCounts(seven_clients(seed))
    groups, target = enumeration.target_probabilities(labels, 3, selector.Weighting())
    uniform = enumeration.expected_qcid(labels, groups, np.full(len(groups), 1 / len(groups)))
    picks, chances = enumeration.ordered_probabilities(
        labels, 3, selector.Weighting(exploration=selector.exploration_bonus(10, 9, np.ones(7)))
    )
    assert enumeration.expected_qcid(labels, picks, chances) < uniform
    wanted = enumeration.expected_qcid(labels, groups, target)
    sharper = enumeration.expected_qcid(
        labels, *enumeration.target_probabilities(labels, 3, selector.Weighting(beta=2.0))
    )
    assert sharper < wanted < uniform


@pytest.mark.parametrize("m", [1, 2, 10, 100])
def test_the_cut_off_loses_nothing_in_double_precision(m):
    rng = np.random.default_rng(m)
    values = rng.gamma(0.5, 0.01, 5000) + 1e-9
    values[rng.choice(5000, 40, replace=False)] = np.inf
    power = np.exp(-m * (np.log(values) - np.log(values.min())))
    cumulated = np.cumsum(power) / power.sum()
    for uniform in rng.random(200):
        position, log_probability = selector.draw_next(values, m, selector.Weighting(), uniform)
        assert position == np.searchsorted(cumulated, uniform, side="right")
        assert log_probability == pytest.approx(math.log(power[position] / power.sum()), rel=1e-9, abs=1e-12)


def test_balance_is_exactly_zero_and_floored():
    labels = LabelCounts([[7, 0, 0], [0, 7, 0], [0, 0, 7], [3, 2, 2]])
    group = imbalance.group_of(labels)
    group.add(0)
    group.add(1)
    found = group.qcid_with_each(np.empty(4))
    assert found[2] == 0.0
    weights = selector.Weighting().balance(found, 3)
    assert weights[2] == pytest.approx(60 * math.log(10))  # L_b^-3
    assert weights[:2].tolist() == [-np.inf, -np.inf]


def test_values_below_rounding_count_as_balanced():
    found = selector.Weighting(floor=1e-20).raise_to_floor(np.array([-1e-17, 0.0, 1e-18, 1e-3]))
    assert found.tolist() == [1e-20, 1e-20, 1e-20, 1e-3]
    assert selector.Weighting(floor=0.01).raise_to_floor(np.array([0.0, 1e-3, 0.5])).tolist() == [0.01, 0.01, 0.5]


def test_clients_without_samples_count_as_worst():
    labels = LabelCounts([[0, 0], [5, 5], [9, 1]])
    group = imbalance.group_of(labels)
    assert group.qcid() == 0.5
    assert group.qcid_with_each(np.empty(3)).tolist() == [0.5, 0.0, pytest.approx(0.32)]
    group.add(1)
    assert group.qcid_with_each(np.empty(3))[0] == 0.5
    rng = np.random.default_rng(0)
    empty = selector.draw_group(imbalance.group_of(LabelCounts(np.zeros((4, 3)))), 3, selector.Weighting(), rng)
    assert len(set(empty.picks.tolist())) == 3
    assert np.isfinite(empty.log_probability[empty.picks]).all()


@pytest.mark.parametrize("swaps", [0, 7])
def test_all_clients_and_one_client(swaps):
    counts = seven_clients()
    rng = np.random.default_rng(2)
    for labels, sizes in forms(counts):
        everybody = draw_and_swap(labels, sizes, 7, selector.Weighting(), swaps, rng)
        assert sorted(everybody.picks.tolist()) == list(range(7))
        one = draw_and_swap(labels, sizes, 1, selector.Weighting(), swaps, rng, candidates=np.array([4]))
        assert one.picks.tolist() == [0]
        assert one.log_probability[0] == pytest.approx(0.0, abs=1e-12)


def test_numbers_behind_a_draw_are_probabilities():
    counts = seven_clients(3)
    bonus = selector.exploration_bonus(10.0, 6, np.arange(1.0, 8.0))
    draw = selector.draw_group(
        imbalance.group_of(LabelCounts(counts)), 3, selector.Weighting(exploration=bonus), np.random.default_rng(5)
    )
    c1, c2, c3 = draw.picks.tolist()
    joint = paper_probability(counts, [c1, c2, c3], 6, list(range(1, 8)))
    assert math.exp(draw.log_probability[draw.picks].sum()) == pytest.approx(joint, rel=1e-8)
    rest = [c for c in range(7) if c not in (c1, c2)]
    weights = {c: float(exact_qcid(counts, [c1, c2, c])) ** -3 for c in rest}
    for c in rest:
        assert math.exp(draw.log_probability[c]) == pytest.approx(weights[c] / sum(weights.values()), rel=1e-8)
    assert (draw.exploration[[c for c in range(7) if c != c1]] == 0).all()
    share = bonus[c1] * float(exact_qcid(counts, [c1]))
    assert draw.exploration[c1] == pytest.approx(math.log1p(share))
    assert draw.qcid == pytest.approx(float(exact_qcid(counts, [c1, c2, c3])))


def test_one_client_of_many_is_explored():
    """With M = 1 the exploration decides for every candidate."""
    labels = LabelCounts([[4, 0], [4, 0], [4, 0]])
    bonus = selector.exploration_bonus(1.0, 3, np.array([1.0, 4.0, 16.0]))
    draw = selector.draw_group(
        imbalance.group_of(labels), 1, selector.Weighting(exploration=bonus), np.random.default_rng(0)
    )
    weights = 2.0 + bonus
    assert np.allclose(np.exp(draw.log_probability), weights / weights.sum())


def test_blocks_do_not_change_a_group(monkeypatch):
    rng = np.random.default_rng(6)
    labels = LabelCounts(rng.integers(0, 30, (500, 10)) * (rng.random((500, 1)) < 0.9))
    whole, parts = imbalance.group_of(labels), None
    monkeypatch.setattr(imbalance, "BLOCK", 64)
    parts = imbalance.group_of(labels)
    for c in (3, 77, 499):
        assert np.array_equal(whole.qcid_with_each(np.empty(500)), parts.qcid_with_each(np.empty(500)))
        whole.add(c)
        parts.add(c)


def test_invalid_input_is_refused():
    with pytest.raises(InputError, match="samples"):
        imbalance.group_of(LabelGram(np.eye(3), 3))
    with pytest.raises(InputError, match="classes"):
        imbalance.group_of(LabelFactor(np.ones((3, 2)), 0), np.ones(3))
