"""FedCA against brute force over all subsets, CMFL against its definition, and edge cases of both."""

import itertools
import logging

import numpy as np
import pytest

from fedcohort.core.errors import InputError, ParameterError, UnknownNameError
from fedcohort.training.filters import CMFL, FILTERS, FedCA, KeepAll, Need, Replies
from fedcohort.training.filters.subsets import _score_all, best_by_beam, best_of_all, margins


def keep(filter_, replies):
    return filter_.judge(replies).kept


def brute_force(logits, labels, score):
    """Eq. 4 literally: every subset, its mean logits, its score; the largest subset among equals."""
    m = len(logits)
    best = None
    for size in range(m, 0, -1):
        for subset in itertools.combinations(range(m), size):
            mean = logits[list(subset)].mean(0)
            if score == "accuracy":
                value = int((mean.argmax(-1) == labels).sum())
            else:
                shifted = mean - mean.max(-1, keepdims=True)
                log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
                value = log_p[np.arange(len(labels)), labels].mean()
            if best is None or value > best[0]:
                best = (value, subset)
    return np.isin(np.arange(m), best[1])


def federation(seed, m, samples=120, classes=5, dtype=np.float64):
    """Models of different skill, some of them biased towards one class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    logits = rng.normal(size=(m, samples, classes))
    logits[:, np.arange(samples), labels] += rng.uniform(0, 2, (m, 1))
    for model in range(0, m, 3):
        logits[model, :, rng.integers(classes)] += rng.uniform(1, 6)
    return logits.astype(dtype), labels


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("score", ["accuracy", "loss"])
@pytest.mark.parametrize("m", [1, 2, 3, 6, 9])
def test_fedca_is_the_best_of_all_subsets(m, score, kind):
    torch = pytest.importorskip("torch") if kind == "torch" else None
    for seed in range(4):
        logits, labels = federation(seed, m)
        given = (logits, labels) if torch is None else (torch.tensor(logits), torch.tensor(labels))
        kept = keep(FedCA(score=score), Replies(np.ones(m, bool), logits=given[0], labels=given[1]))
        assert kept.tolist() == brute_force(logits, labels, score).tolist()


def test_single_precision_finds_the_same_subset():
    logits, labels = federation(3, 8, dtype=np.float32)
    for score in ("accuracy", "loss"):
        kept = keep(FedCA(score=score), Replies(np.ones(8, bool), logits=logits, labels=labels))
        assert kept.tolist() == brute_force(logits.astype(np.float64), labels, score).tolist()


def test_chunks_do_not_change_scores(monkeypatch):
    logits, labels = federation(1, 7, samples=300)
    whole = _score_all(margins(logits, labels), "loss")
    monkeypatch.setattr("fedcohort.training.filters.subsets._CPU_CHUNK", 1)
    np.testing.assert_allclose(_score_all(margins(logits, labels), "loss"), whole, rtol=1e-12)


def test_half_precision_tensors_are_widened():
    torch = pytest.importorskip("torch")
    logits, labels = federation(2, 4)
    half = torch.tensor(logits).bfloat16()
    kept = keep(FedCA(), Replies(np.ones(4, bool), logits=half, labels=torch.tensor(labels)))
    assert kept.tolist() == brute_force(half.double().numpy(), labels, "loss").tolist()


@pytest.mark.gpu
def test_fedca_stays_on_the_device():
    torch = pytest.importorskip("torch")
    for score in ("accuracy", "loss"):
        logits, labels = federation(5, 9)
        given = torch.tensor(logits, device="cuda"), torch.tensor(labels, device="cuda")
        kept = keep(FedCA(score=score), Replies(np.ones(9, bool), logits=given[0], labels=given[1]))
        assert kept.tolist() == brute_force(logits, labels, score).tolist()


def test_equal_subsets_keep_the_largest_then_the_first():
    labels = np.array([0, 1])
    right = np.array([[1.0, 0], [0, 1]])
    wrong = -9 * right
    # Each of the right models is perfect, and so are all three together; a wrong one spoils every mean.
    kept = keep(
        FedCA(score="accuracy"), Replies([True] * 4, logits=np.stack([right, wrong, right, right]), labels=labels)
    )
    assert kept.tolist() == [True, False, True, True]
    # Each model has one right and one wrong sample. Pairs cancel to ties, which are wrong, so one model is best.
    first, second = np.array([[1.0, 0], [1, 0]]), np.array([[0, 1.0], [0, 1]])
    kept = keep(FedCA(score="accuracy"), Replies([True] * 2, logits=np.stack([first, second]), labels=labels))
    assert kept.tolist() == [True, False]


def test_a_tie_between_classes_is_wrong():
    zeros = np.zeros((1, 3, 4))
    assert _score_all(margins(zeros, [0, 1, 2]), "accuracy").tolist() == [-np.inf, 0.0]


def test_huge_logits_do_not_overflow():
    labels = np.array([0, 1, 1])
    wild = np.array([[[-1e30, 1e30], [1e30, 0], [0.0, 1.0]]])
    calm = np.array([[[1.0, 0], [0, 1], [0, 1]]])
    for dtype in (np.float32, np.float64):
        logits = np.concatenate([wild, calm]).astype(dtype)
        scores = _score_all(margins(logits, labels), "loss")
        assert not np.isnan(scores).any()
        assert keep(FedCA(), Replies([True, True], logits=logits, labels=labels)).tolist() == [False, True]
    moderate = np.array([[[200.0, 0], [0, 90], [120, 0]]])
    expected = -(np.log1p(np.exp(-200)) + np.log1p(np.exp(-90)) + 120)
    assert _score_all(margins(moderate, labels), "loss")[1] == pytest.approx(expected)


def test_failed_and_invalid_models_are_never_kept():
    logits, labels = federation(4, 5)
    logits[1, 3, 2] = np.nan
    logits[2, 0, 0] = np.inf
    ok = np.array([True, True, True, False, True])
    kept = keep(FedCA(), Replies(ok, logits=logits, labels=labels))
    expected = brute_force(logits[[0, 4]], labels, "loss")
    assert kept.tolist() == [expected[0], False, False, False, expected[1]]
    logits[:] = np.nan
    assert not keep(FedCA(), Replies(ok, logits=logits, labels=labels)).any()
    assert not keep(FedCA(), Replies([False] * 5, logits=logits, labels=labels)).any()
    assert keep(FedCA(), Replies([])).shape == (0,)


def test_beam_search_warns_and_beats_simple_choices(caplog):
    logits, labels = federation(6, 20)
    with caplog.at_level(logging.WARNING):
        verdict = FedCA(score="loss").judge(Replies(np.ones(20, bool), logits=logits, labels=labels))
    assert "beam search" in caplog.text
    assert verdict.notes["search"] == "beam"

    def loss(members):
        mean = logits[members].mean(0)
        return (np.log(np.exp(mean).sum(-1)) - mean[np.arange(len(labels)), labels]).mean()

    assert verdict.notes["validation loss"] == pytest.approx(loss(verdict.kept))
    assert loss(verdict.kept) <= min(loss([i]) for i in range(20))
    assert loss(verdict.kept) <= loss(np.arange(20))


@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_a_wide_beam_is_exact_and_a_narrow_one_close(score):
    logits, labels = federation(8, 8)
    differences = margins(logits, labels)
    exact, value = best_of_all(differences, score)
    wide, wide_value = best_by_beam(differences, score, 200)
    assert wide_value == pytest.approx(value, rel=1e-12)
    assert wide.sum() == exact.sum()
    assert best_by_beam(differences, score, 8)[1] == pytest.approx(value, abs=0.02)


def test_notes_carry_the_score():
    logits, labels = federation(9, 4)
    verdict = FedCA(score="accuracy").judge(Replies(np.ones(4, bool), logits=logits, labels=labels))
    accuracy = (logits[verdict.kept].mean(0).argmax(-1) == labels).mean()
    assert verdict.notes == {"search": "all subsets", "validation accuracy": pytest.approx(accuracy)}


@pytest.mark.parametrize(
    ("logits", "labels", "says"),
    [
        (np.zeros((2, 3, 1)), [0, 0, 0], "two classes"),
        (np.zeros((2, 0, 3)), [], "at least one sample"),
        (np.zeros((2, 3)), [0, 0, 0], "shape"),
        (np.zeros((2, 3, 4)), [0, 0], "one per sample"),
        (np.zeros((2, 3, 4)), [0.0, 1.0, 2.0], "whole numbers"),
        (np.zeros((2, 3, 4)), [0, 1, 4], "classes 0 to 3"),
        ([[1.0]], [0], "NumPy array or a torch tensor"),
    ],
)
def test_bad_logits_and_labels_are_named(logits, labels, says):
    with pytest.raises(InputError, match=says):
        keep(FedCA(), Replies([True] * (1 if isinstance(logits, list) else 2), logits=logits, labels=labels))


def test_hosts_compute_only_what_is_read():
    calls = []

    def updates():
        calls.append("updates")
        return np.ones((2, 3))

    def logits():
        raise AssertionError("nobody asked for logits")

    replies = Replies([True, True], updates=updates, logits=logits)
    assert keep(KeepAll(), replies).all() and calls == []
    assert keep(CMFL(), replies).all()
    assert keep(CMFL(), replies).all() and calls == ["updates"]
    assert CMFL().needs == {Need.UPDATES} and FedCA().needs == {Need.LOGITS} and KeepAll().needs == set()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_cmfl_matches_its_definition(kind):
    rng = np.random.default_rng(0)
    for seed in range(20):
        updates = rng.normal(size=(6, 50)) + rng.normal(size=50) * rng.uniform(0, 2)
        updates[rng.random((6, 50)) < 0.1] = 0
        mean = updates.mean(0)
        relevance = np.array(
            [sum(np.sign(a) == np.sign(b) for a, b in zip(row, mean, strict=True)) / 50 for row in updates]
        )
        expected = relevance >= 0.7
        if not expected.any():
            expected = np.arange(6) == relevance.argmax()
        if kind == "torch":
            updates = pytest.importorskip("torch").tensor(updates)
        assert keep(CMFL(), Replies([True] * 6, updates=updates)).tolist() == expected.tolist(), seed


def test_cmfl_keeps_the_best_update_if_none_passes():
    updates = np.array([[1.0, 1, 1, -1, -1], [-1, 1, 1, 1, -1], [1, -1, -1, 1, 1]])
    verdict = CMFL(threshold=1.0).judge(Replies([True] * 3, updates=updates))
    assert verdict.kept.sum() == 1
    assert verdict.notes["relevance max"] < 1


def test_cmfl_ignores_failed_and_invalid_updates():
    updates = np.array([[1.0, 1.0], [np.nan, 1.0], [-9.0, -9.0], [1.0, 0.5]])
    assert keep(CMFL(), Replies([True, True, False, True], updates=updates)).tolist() == [True, False, False, True]
    assert not keep(CMFL(), Replies([False] * 4, updates=updates)).any()
    assert not keep(CMFL(), Replies([True], updates=np.array([[np.inf]]))).any()


def test_registry():
    assert {"cmfl", "fedca", "keep-all"} <= set(FILTERS.names())
    assert FILTERS.create("fedca", score="accuracy") == FedCA(score="accuracy")
    with pytest.raises(UnknownNameError, match="fedca"):
        FILTERS.create("fedac")
    for bad in ({"score": "f1"}, {"exact": 0}, {"exact": 21}, {"beam": 0}):
        with pytest.raises(ParameterError):
            FedCA(**bad)
    with pytest.raises(ParameterError):
        CMFL(threshold=1.5)
