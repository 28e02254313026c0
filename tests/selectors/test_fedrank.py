"""FedRank: features by hand, RankNet's loss pair by pair, gradients by differences, and the shipped network."""

import json
import subprocess
import sys
from math import exp, log, tanh
from pathlib import Path

import numpy as np
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import Slate
from fedcohort.selectors.baselines.fedrank import FedRank
from fedcohort.selectors.baselines.fedrank.network import FEATURES, Network, features, ranks, shipped_network
from fedcohort.selectors.baselines.fedrank.selector import RankState

NAN = np.nan
BENCH = Path(__file__).parents[2] / "bench" / "scripts"
sys.path.append(str(BENCH))
from fedrank_imitation import Demonstration, agreement, gradient, imitate, pairwise_loss  # noqa: E402


def test_features_by_hand():
    found = features(
        size=np.array([30.0, 10.0, 20.0]),
        loss=np.array([NAN, 1.0, 2.0]),
        seconds=np.array([NAN, 5.0, 5.0]),
        last=np.array([NAN, 3.0, 1.0]),
        picks=np.array([0.0, 2.0, 1.0]),
        round_=50,
    )
    by_name = dict(zip(FEATURES, found.T, strict=True))
    np.testing.assert_allclose(by_name["size"], [5 / 6, 1 / 6, 3 / 6])
    np.testing.assert_allclose(by_name["loss"], [0.5, 0.25, 0.75])
    np.testing.assert_allclose(by_name["duration"], [0.5, 0.5, 0.5])
    np.testing.assert_allclose(by_name["age"], [0.5, 0.25, 0.75])
    np.testing.assert_allclose(by_name["picks"], [1 / 6, 5 / 6, 3 / 6])
    np.testing.assert_array_equal(by_name["unheard"], [1, 0, 0])
    np.testing.assert_allclose(by_name["begin"], exp(-1))


def test_ranks_by_counting():
    values = np.random.default_rng(0).integers(0, 5, 20).astype(float)
    counted = [((values < v).sum() + (values <= v).sum()) / 2 / 20 for v in values]
    np.testing.assert_allclose(ranks(values), counted)
    np.testing.assert_array_equal(ranks(np.full(3, NAN)), [0.5] * 3)


def network(seed=0, hidden=5):
    rng = np.random.default_rng(seed)
    return Network(rng.normal(size=(len(FEATURES), hidden)), rng.normal(size=hidden), rng.normal(size=hidden))


def shown(seed, count=6):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        chosen = np.zeros(9, bool)
        chosen[rng.choice(9, 3, replace=False)] = True
        found.append(Demonstration(rng.random((9, len(FEATURES))), chosen))
    return found


def test_the_loss_pair_by_pair():
    net, (one,) = network(), shown(1, 1)
    q = [
        sum(v * tanh(b + sum(x * w for x, w in zip(row, column, strict=True))) for v, b, column in zip(
            net.output, net.bias, net.weight.T, strict=True))
        for row in one.features
    ]  # fmt: skip
    np.testing.assert_allclose(net.score(one.features), q, atol=1e-9)
    pairs = [(i, j) for i in range(9) for j in range(9) if one.chosen[i] and not one.chosen[j]]
    expected = sum(log(1 + exp(-(q[i] - q[j]))) for i, j in pairs) / len(pairs)
    assert pairwise_loss(np.array(q), one.chosen)[0] == pytest.approx(expected)
    right = sum(q[i] > q[j] for i, j in pairs) / len(pairs)
    assert agreement(net, [one]) == pytest.approx(right)


def test_gradients_by_differences():
    net, some = network(2), shown(3)
    loss, slopes = gradient(net, some)
    parts = [net.weight, net.bias, net.output]
    for which, slope in enumerate(slopes):
        for place in np.ndindex(slope.shape):
            moved = [part.copy() for part in parts]
            moved[which][place] += 1e-6
            change = (gradient(Network(*moved), some)[0] - loss) / 1e-6
            assert slope[place] == pytest.approx(change, abs=1e-5)


def test_it_learns_the_order_of_an_expert():
    """An expert that takes large losses of fast clients."""
    rng = np.random.default_rng(4)
    decisions = []
    for _ in range(60):
        seen = rng.random((20, len(FEATURES)))
        score = seen[:, FEATURES.index("loss")] - 0.5 * seen[:, FEATURES.index("duration")]
        decisions.append(Demonstration(seen, score >= np.sort(score)[-5]))
    learned = imitate(decisions[:40], rng, steps=300)
    assert agreement(learned, decisions[40:]) > 0.95
    assert agreement(network(), decisions[40:]) < 0.9


def test_choosing_all_or_none_teaches_nothing():
    assert pairwise_loss(np.arange(3.0), np.ones(3, bool))[0] == 0.0
    assert not pairwise_loss(np.arange(3.0), np.zeros(3, bool))[1].any()


def test_the_cohort_is_the_top_of_the_scores():
    rng = np.random.default_rng(5)
    n = 30
    state = RankState(rng.random(n), rng.random(n), rng.integers(0, 20, n).astype(float), rng.integers(0, 9, n) * 1.0)
    clients = ClientTable(sizes=rng.integers(5, 90, n))
    slate = Slate(round=20, size=6, candidates=np.arange(n), clients=clients)
    cohort, after = FedRank(exploration=0.0).select(state, slate, None, rng)
    seen = features(clients.sizes.astype(float), state.loss, state.seconds, state.last, state.picks, 20)
    best = np.argsort(-shipped_network().score(seen), kind="stable")[:6]
    assert sorted(cohort.clients) == sorted(best)
    np.testing.assert_array_equal(after.picks - state.picks, np.isin(np.arange(n), cohort.clients))
    drawn = [FedRank(exploration=0.5).select(state, slate, None, rng)[0].clients for _ in range(50)]
    assert all(len(set(one.tolist())) == 6 and set(best[:3]) <= set(one.tolist()) for one in drawn)
    assert len({client for one in drawn for client in one.tolist()}) == n


def test_the_shipped_network_has_learned_something():
    """It prefers large losses and fast clients, as its experts do, and was made for these features."""
    file = Path(sys.modules[FedRank.__module__].__file__).with_name("weights.json")
    facts = json.loads(file.read_text())
    assert facts["features"] == list(FEATURES)
    assert facts["the same, other federations"] > 0.65
    middle = np.full((1, len(FEATURES)), 0.5)
    middle[0, FEATURES.index("unheard")] = 0.0

    def with_(name, value):
        row = middle.copy()
        row[0, FEATURES.index(name)] = value
        return float(shipped_network().score(row)[0])

    assert with_("loss", 0.95) > with_("loss", 0.05)
    assert with_("duration", 0.05) > with_("duration", 0.95)


@pytest.mark.slow
def test_the_script_writes_weights(tmp_path):
    pytest.importorskip("torch")
    script, out = BENCH / "fedrank_pretrain.py", tmp_path / "weights.json"
    subprocess.run([sys.executable, script, "--rounds", "6", "--seeds", "1", "--out", out], check=True, timeout=300)
    assert json.loads(out.read_text())["network"].keys() == {"weight", "bias", "output"}
