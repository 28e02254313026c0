"""Views, groups, unequal partitions, noise in rare classes."""

import numpy as np
import pytest

from fedcohort.core.errors import InputError, ParameterError, ScenarioError
from fedcohort.scenario import Scenario
from fedcohort.scenario.partition import Pool
from fedcohort.scenario.shift import VIEWS, Shift, meant, seen
from fedcohort.scenario.unequal import Quantity, RareHolders

LABELS = np.repeat(np.arange(10), 300)
IMAGES = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(20, 8, 8), (20, 8, 8, 3)])
def test_a_view_changes_each_image_independently(view, shape):
    images = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    whole = seen(view, images)
    assert whole.shape == images.shape and whole.dtype == np.uint8
    np.testing.assert_array_equal(seen(view, images[7:9]), whole[7:9])
    assert np.array_equal(whole, images) == (view in ("plain", "relabel"))


def test_what_views_do():
    image = IMAGES[:1]
    np.testing.assert_array_equal(seen("rotate", seen("rotate", image)), seen("upside-down", image))
    np.testing.assert_array_equal(seen("invert", seen("invert", image)), image)
    assert int(np.ptp(seen("contrast", image))) <= 64
    flat = np.full((1, 8, 8), 77, np.uint8)
    assert (seen("blur", flat) == 77).all() and (seen("sketch", flat) == 0).all()
    by_hand = np.pad(image[0].astype(float), 1, mode="edge")
    mean = sum(by_hand[i : i + 8, j : j + 8] for i in range(3) for j in range(3)) / 9
    np.testing.assert_allclose(seen("blur", image)[0], np.rint(mean), atol=1)  # a window of three pixels
    np.testing.assert_array_equal(meant("relabel", np.arange(10), 10), [5, 6, 7, 8, 9, 0, 1, 2, 3, 4])


def test_views_need_images():
    with pytest.raises(InputError, match="bytes"):
        seen("blur", np.zeros((3, 5), np.float32))
    with pytest.raises(InputError, match="square"):
        seen("rotate", np.zeros((3, 5, 6), np.uint8))


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_each_view_has_its_share_and_always_the_same_clients(share):
    scenario = Scenario(shift=Shift(views=("rotate", "blur"), share=share))
    first, again = (scenario.build(LABELS, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.groups.of, again.groups.of)
    counts = np.bincount(first.groups.of)
    assert counts[-1] == counts[-2] == round(100 * share)
    assert first.groups.kind == "view"
    assert first.groups.names == (("rotate", "blur") if share == 0.5 else ("plain", "rotate", "blur"))
    other = scenario.build(LABELS, seed=4)
    assert (first.groups.of != other.groups.of).any()
    plain = Scenario().build(LABELS, seed=3)
    np.testing.assert_array_equal(first.indices, plain.indices)  # the partition is the same without a shift


def test_relabel_changes_the_true_labels_and_is_not_noise():
    federation = Scenario(shift=Shift(views=("relabel",), share=0.2)).build(LABELS, seed=0)
    theirs = (federation.groups.of == 1)[federation.owner]
    of_dataset = LABELS[federation.indices]
    np.testing.assert_array_equal(federation.true_labels[theirs], (of_dataset[theirs] + 5) % 10)
    np.testing.assert_array_equal(federation.true_labels[~theirs], of_dataset[~theirs])
    assert not federation.noise_rate.any()
    np.testing.assert_array_equal(federation.labels, federation.true_labels)


def test_invalid_shifts_are_an_error():
    with pytest.raises(ParameterError, match="all clients"):
        Shift(views=("rotate", "blur", "invert"), share=0.4)
    with pytest.raises(ParameterError, match="once"):
        Shift(views=("rotate", "rotate"))
    with pytest.raises(ScenarioError, match="1 clients"):
        Shift(views=("rotate", "blur", "invert"), share=0.1).groups(2, np.random.default_rng(0))
    with pytest.raises(ParameterError, match="table"):
        Scenario.from_dict({"shift": "rotate"})


def test_groups_are_views_or_owners_or_classes():
    assert Scenario().build(LABELS).groups.kind == "class"
    skewed = Scenario.from_dict({"partition": {"name": "shards", "clients": 20, "per_client": 1}}).build(LABELS)
    assert len(skewed.groups) == 10
    np.testing.assert_array_equal(
        np.array([int(n[-1]) for n in skewed.groups.names])[skewed.groups.of], skewed.main_class
    )
    owners = Scenario.from_dict({"partition": "natural"}).build(LABELS, writers=np.arange(3000) % 7)
    assert owners.groups.kind == "client" and len(owners.groups) == 7
    assert Scenario().build(np.zeros(500, int), classes=1).groups is None
    scenario = Scenario.from_dict({"shift": {"views": ["blur"], "share": 0.3}})
    assert Scenario.from_dict(scenario.to_dict()) == scenario
    assert "shift         blur: 30% of the clients each" in scenario.describe()


@pytest.mark.parametrize("alpha", [None, 0.3])
def test_sizes_span_three_orders_of_magnitude(alpha):
    part = Quantity(clients=50, smallest=2, alpha=alpha).assign(
        Pool.of(np.repeat(np.arange(10), 4000)), np.random.default_rng(1)
    )
    sizes = np.diff(part.offsets)
    assert sorted(sizes.tolist()) == np.rint(2 * 10 ** np.linspace(0, 3, 50)).astype(int).tolist()
    assert len(np.unique(part.places)) == len(part.places)
    short = Quantity(clients=50, smallest=2, alpha=alpha).assign(Pool.of(LABELS), np.random.default_rng(1))
    assert "with replacement" in short.remarks[0]
    np.testing.assert_array_equal(np.sort(np.diff(short.offsets)), np.sort(sizes))


def test_rare_classes_have_few_holders_that_can_be_slow():
    scenario = Scenario.from_dict(
        {
            "partition": {"name": "rare-holders", "clients": 40, "rare": 2, "share": 0.1, "samples": 40},
            "latency": {"name": "shifted-exponential", "straggling": 0.0},
            "rare_slowness": 5.0,
        }
    )
    federation = scenario.build(LABELS, seed=2)
    holds = federation.traits["rare"]
    counts = federation.label_counts(part="all", true=True)
    assert holds.sum() == 4 and not counts[~holds][:, 8:].any()
    assert (counts[holds][:, 8:].sum(1) == 20).all() and (counts.sum(1) == 40).all()
    np.testing.assert_array_equal(federation.holds_rare, holds)
    seconds = scenario.events(federation, np.arange(40), seed=0, round=0).durations
    np.testing.assert_allclose(seconds, np.where(holds, 5.0, 1.0) * 0.04)
    with pytest.raises(ScenarioError, match="10 rare classes"):
        RareHolders(rare=10).assign(Pool.of(LABELS), np.random.default_rng(0))


def test_wrong_labels_only_in_the_rarest_classes():
    labels = np.repeat(np.arange(4), [1000, 1000, 60, 40])
    federation = Scenario.from_dict(
        {"partition": {"name": "iid", "clients": 20}, "noise": {"level": 0.4, "rare": 2, "concentration": 1000}}
    ).build(labels, seed=0)
    wrong = federation.labels != federation.true_labels
    assert not wrong[federation.true_labels < 2].any()
    assert 0.25 < wrong[federation.true_labels >= 2].mean() < 0.55
    by_hand = [wrong[federation.owner == k].mean() for k in range(20)]
    np.testing.assert_allclose(federation.noise_rate, by_hand)


def test_a_share_of_the_clients_uses_one_permutation_of_labels():
    federation = Scenario.from_dict({"noise": {"permuted": 0.3}}).build(LABELS, seed=0)
    wrong = federation.labels != federation.true_labels
    theirs = federation.noise_rate > 0
    assert theirs.sum() == 30
    mine = theirs[federation.owner]
    assert not wrong[~mine].any()
    pairs = set(zip(federation.true_labels[mine].tolist(), federation.labels[mine].tolist(), strict=True))
    assert len(pairs) == 10 and len({new for _, new in pairs}) == 10
