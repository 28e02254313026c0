"""Scores as bytes: small, and the same to four digits and more."""

import zlib

import numpy as np
import pytest

from fedcohort.core.errors import JournalError
from fedcohort.journal.codec import pack_many
from fedcohort.journal.scores import _MARK, pack_scores, unpack_scores


def arrays(score, seed=0, **parts):
    score = np.asarray(score, float)
    client = np.random.default_rng(seed).permutation(3 * len(score))[: len(score)]
    client.sort()
    order = np.argsort(-score, kind="stable")
    found = {"client": client[order], "rank": np.arange(1, len(order) + 1), "score": score[order]}
    return found | {f"part:{name}": np.asarray(values, float)[order] for name, values in parts.items()}


@pytest.mark.parametrize("seed", range(4))
def test_order_and_digits_are_kept(seed):
    rng = np.random.default_rng(seed)
    score = rng.normal(size=50).round(1)  # with ties
    score[:3] = np.inf, -np.inf, np.nan
    given = arrays(
        score, seed, big=rng.lognormal(0, 9, 50), odd=np.where(np.arange(50) % 9, rng.normal(size=50), np.nan)
    )
    found = unpack_scores(pack_scores(given), 150)
    assert list(found) == list(given)
    np.testing.assert_array_equal(found["client"], given["client"])
    np.testing.assert_array_equal(found["rank"], given["rank"])
    np.testing.assert_allclose(found["score"], given["score"], rtol=8e-6)
    for name in ("part:big", "part:odd"):
        np.testing.assert_allclose(found[name], given[name], rtol=6.2e-5)


def test_scores_that_differ_little_stay_different():
    given = arrays(1 + np.arange(50) * 1e-6)
    found = unpack_scores(pack_scores(given), 150)
    assert len(np.unique(found["score"])) == 50
    np.testing.assert_array_equal(found["client"], given["client"])


def test_a_part_that_the_others_leave_of_the_score_is_not_kept():
    draw = np.random.default_rng(0)
    own, others = draw.normal(size=(2, 100))
    for parts in ({"loss": own}, {"own": 10 + own, "others": others - 10}):
        score = sum(parts.values())
        all_but_one = dict(list(parts.items())[1:])
        less, given = pack_scores(arrays(score, **all_but_one)), arrays(score, **parts)
        assert len(pack_scores(given)) < len(less) + 40
        for name, values in unpack_scores(pack_scores(given), 300).items():
            np.testing.assert_allclose(values, given[name], rtol=2.0**-13)
    cancelled = arrays(others, own=1e6 + own, others=others - 1e6 - own)  # no digit of the difference would be left
    for name, values in unpack_scores(pack_scores(cancelled), 300).items():
        np.testing.assert_allclose(values, cancelled[name], rtol=2.0**-13)


def test_numbers_beyond_32_bits_stay_as_they_are():
    given = arrays([1e300, 1e-300, 2.0], tiny=[0.0, 1e-200, 1.0])
    for name, values in unpack_scores(pack_scores(given), 9).items():
        np.testing.assert_array_equal(values, given[name])


def test_the_best_of_many_keep_their_ranks():
    given = arrays([3.0, 2.0, 1.0], p=[1, 2, 3]) | {"rank": np.array([1, 2, -1])}
    for name, values in unpack_scores(pack_scores(given), 9).items():
        np.testing.assert_array_equal(values, given[name])


def test_scores_that_burst_or_make_no_sense_are_refused():
    many = pack_scores({"client": np.arange(200_000), "rank": np.arange(1, 200_001), "score": np.zeros(200_000)})
    with pytest.raises(JournalError):
        unpack_scores(many, 10)
    missing = b'{"n": 1, "whole": true, "wide": false, "rest": "score", "names": ["score"]}\n' + bytes(8)
    for body in (
        missing,
        b"",
        b"[]\n",
        b'{"n": 5, "whole": true, "wide": false, "names": ["score"]}\nabc',
        b'{"n": -1}\n',
    ):
        with pytest.raises(JournalError):
            unpack_scores(_MARK + zlib.compress(body), 10)


def test_they_take_less_than_a_third_of_what_they_took_and_a_ninth_where_much_repeats():
    rng = np.random.default_rng(1)
    different = arrays(rng.normal(size=100), own=rng.normal(size=100), others=rng.normal(size=100))
    assert len(pack_scores(different)) < 0.3 * len(pack_many(different))
    alike = arrays(rng.integers(0, 5, 100) / 7, staleness=rng.integers(0, 5, 100) / 3, unexplored=np.zeros(100))
    assert len(pack_scores(alike)) < 0.12 * len(pack_many(alike))
