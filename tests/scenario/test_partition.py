"""What all partitions share, and the ones by class and by writer."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.core.errors import InputError, ParameterError, ScenarioError
from fedcohort.core.params import parameters
from fedcohort.scenario import PARTITIONS, Scenario
from fedcohort.scenario.classwise import ClassesPerClient, DominantClass, Iid, Imbalanced, Shards
from fedcohort.scenario.partition import Pool, dirichlet, round_to_total
from fedcohort.scenario.predefined import Custom, Natural

FMNIST = np.repeat(np.arange(10), 6000)  # the label counts of Fashion-MNIST
CIFAR = np.repeat(np.arange(10), 5000)  # and of CIFAR-10
WITHOUT_REPLACEMENT = [
    "iid",
    "shards",
    "classes-per-client",
    "client-heterogeneity",
    "class-heterogeneity",
    "mixed-heterogeneity",
    "dirichlet-qp",
    "dirichlet",
    "imbalanced",
    "dominant-class",
    "natural",
]


def build(partition, labels, seed=0, **more):
    return Scenario(partition=partition).build(labels, seed=seed, **more)


def test_registry_is_complete():
    assert set(PARTITIONS.names()) == {*WITHOUT_REPLACEMENT, "skewness", "custom", "quantity", "rare-holders", "listed"}


def small(name, clients=20):
    values = {"clients": clients}
    if name == "custom":
        return Custom.of([[1, 2], [5], [2, 9]])
    if name == "skewness":
        values["samples"] = 30
    if name == "dirichlet-qp":
        values["alpha"] = 5.0
    return PARTITIONS.create(name, **values)


@pytest.mark.parametrize("name", sorted([*WITHOUT_REPLACEMENT, "skewness", "custom"]))
def test_every_partition_is_consistent_deterministic_and_seeded(name):
    labels = np.repeat(np.arange(10), 60)
    writers = np.arange(600) % 25
    one, again, other = (build(small(name), labels, seed, writers=writers) for seed in (4, 4, 5))
    for field in ("indices", "offsets", "labels"):
        assert np.array_equal(getattr(one, field), getattr(again, field))
    assert not np.array_equal(one.indices, other.indices)
    assert one.offsets[0] == 0 and one.offsets[-1] == len(one.indices)
    assert one.indices.min() >= 0 and one.indices.max() < 600
    assert np.array_equal(one.labels, labels[one.indices])
    assert (one.sizes > 0).all()
    if name in WITHOUT_REPLACEMENT:
        assert len(np.unique(one.indices)) == len(one.indices)


@pytest.mark.parametrize("name", sorted([*WITHOUT_REPLACEMENT, "skewness"]))
def test_generated_bad_parameters_are_refused(name):
    cls = PARTITIONS.get(name)
    for info in parameters(cls):
        for bad in info.constraint.bad_values():
            with pytest.raises(ParameterError, match=f"'{info.name}'"):
                PARTITIONS.create(name, **{info.name: bad})


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([n for n in WITHOUT_REPLACEMENT if n not in ("natural", "imbalanced")]),
    clients=st.integers(1, 25),
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_any_training_set_is_divided_or_a_scenario_error(name, clients, counts, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    partition = PARTITIONS.create(name, clients=clients)
    refused = None
    try:
        federation = build(partition, labels, seed)
    except ScenarioError as error:
        refused = str(error)
    if refused is not None:
        assert any(character.isdigit() for character in refused)
        return
    assert len(federation) == clients
    assert federation.offsets[-1] == len(federation.indices) <= len(labels)
    assert (np.diff(federation.offsets) >= 0).all()
    assert len(np.unique(federation.indices)) == len(federation.indices)
    assert np.array_equal(federation.labels, labels[federation.indices])
    assert federation.label_counts().sum() == len(federation.indices)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(lambda v: sum(v) > 1e-3), st.integers(0, 10_000))
def test_rounding_keeps_the_total_and_stays_near(values, total):
    shares = np.array(values)
    rounded = round_to_total(shares, total)
    assert rounded.sum() == total
    assert (rounded >= 0).all()
    assert np.abs(rounded - shares * total / shares.sum()).max() <= 1.0 + 1e-6


def test_dirichlet_moments_and_extremes():
    draws = dirichlet(np.random.default_rng(0), np.tile([0.5, 1.0, 2.5, 0.0], (40_000, 1)))
    assert draws.sum(axis=1) == pytest.approx(np.ones(40_000))
    assert draws.mean(axis=0) == pytest.approx(np.array([0.125, 0.25, 0.625, 0.0]), abs=0.005)
    mean = np.array([0.125, 0.25, 0.625])
    assert draws[:, :3].var(axis=0) == pytest.approx(mean * (1 - mean) / 5.0, rel=0.03)
    assert (draws[:, 3] == 0).all()
    tiny = dirichlet(np.random.default_rng(1), np.full((2000, 10), 1e-9))
    assert np.isfinite(tiny).all() and (tiny.max(axis=1) > 0.999999).all()
    assert np.bincount(tiny.argmax(axis=1), minlength=10).min() > 140


def test_deal_gives_exactly_the_counts_and_names_the_scarce_class():
    pool = Pool.of([0] * 5 + [1] * 3)
    counts = np.array([[2, 0], [3, 1], [0, 2]])
    part = Iid().deal(pool, counts, np.random.default_rng(0))
    owners = np.repeat(np.arange(3), np.diff(part.offsets))
    assert np.array_equal(
        np.array([[((owners == k) & (pool.labels[part.places] == c)).sum() for c in (0, 1)] for k in range(3)]), counts
    )
    with pytest.raises(ScenarioError, match=r"4 samples of class 1\b.* 3\."):
        Iid().deal(pool, np.array([[0, 4]]), np.random.default_rng(0))


def test_samples_are_shuffled_within_a_client():
    # the last samples become the validation set, so they must not be ordered by class
    federation = Scenario(partition=Shards(clients=100, per_client=2), validation=0.1).build(FMNIST, seed=0)
    mixed = [
        len(np.unique(federation.true_labels[federation.offsets[k + 1] - 60 : federation.offsets[k + 1]]))
        for k in range(100)
    ]
    classes = (federation.label_counts(part="all") > 0).sum(axis=1)
    assert np.array_equal(mixed, classes)


# --- IID


def test_iid_uses_all_and_is_representative():
    federation = build(Iid(clients=7), FMNIST)
    assert len(federation.indices) == 60_000 and federation.sizes.max() - federation.sizes.min() <= 1
    expected = federation.sizes[:, None] / 10
    chi_square = ((federation.label_counts() - expected) ** 2 / expected).sum()
    assert chi_square < 100  # 54 degrees of freedom; hypergeometric counts vary less than multinomial


def test_iid_with_replacement_can_exceed_the_training_set():
    federation = build(Iid(clients=200, samples=2000, replacement=True), CIFAR)
    assert len(federation.indices) == 400_000
    # share of a set that n draws with replacement reach: 1 - exp(-8)
    assert len(np.unique(federation.indices)) == pytest.approx(50_000 * (1 - np.exp(-8)), abs=20)


# --- shards (FedCor 1SPC, 2SPC)


def test_one_shard_per_client():
    federation = build(Shards(clients=100, per_client=1), FMNIST)
    counts = federation.label_counts()
    assert (federation.sizes == 600).all()
    assert ((counts > 0).sum(axis=1) == 1).all()
    assert np.bincount(counts.argmax(axis=1)).tolist() == [10] * 10


def test_two_shards_per_client():
    singles = []
    for seed in range(20):
        counts = build(Shards(clients=100, per_client=2), FMNIST, seed).label_counts()
        assert set(np.unique(counts)) <= {0, 300, 600}
        assert counts.sum() == 60_000
        singles.append(int((counts == 600).sum()))
    # two random ones of 200 shards share a label with probability 19 / 199
    assert np.mean(singles) == pytest.approx(100 * 19 / 199, abs=2.0)


def test_shards_of_unequal_classes_are_pure_or_cut_as_sorted():
    labels = np.repeat(np.arange(3), [70, 50, 33])
    pure = build(Shards(clients=5, per_client=2), labels)
    assert ((pure.label_counts() > 0).sum(axis=1) <= 2).all()
    assert (pure.sizes == 2 * 14).all()  # 70 // 14 + 50 // 14 + 33 // 14 = 10 shards; 15 would give 9
    assert "left out" in pure.remarks[0]
    cut = build(Shards(clients=5, per_client=2, pure=False), labels)
    assert (cut.sizes == 2 * 15).all()


def test_too_many_shards():
    with pytest.raises(ScenarioError, match=r"8 shards.* 6 samples"):
        build(Shards(clients=4, per_client=2), np.array([0, 0, 0, 1, 1, 1]))


# --- one or two classes per client (Fed-CBS C.1)


@pytest.mark.parametrize("each", [1, 2, 3])
def test_classes_per_client(each):
    federation = build(ClassesPerClient(clients=100, per_client=each), FMNIST, seed=each)
    counts = federation.label_counts()
    assert ((counts > 0).sum(axis=1) == each).all()
    assert len(np.unique(counts[counts > 0])) == 1
    assert (counts > 0).sum(axis=0).tolist() == [10 * each] * 10
    assert federation.sizes[0] == 600 if each == 1 else federation.sizes[0] == each * (6000 // (10 * each))


def test_pairs_of_classes_are_spread():
    counts = build(ClassesPerClient(clients=100, per_client=2), FMNIST).label_counts() > 0
    pairs = {tuple(np.flatnonzero(row)) for row in counts}
    assert len(pairs) > 25  # of 45; a fixed pairing would give 5


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (ClassesPerClient(clients=10, per_client=11), r"11 classes.* 10"),
        (ClassesPerClient(clients=10, per_client=2, samples=7), "7 samples"),
        (ClassesPerClient(clients=20, samples=400), "400 samples of each class .* 300"),
        (ClassesPerClient(clients=7000), "0 for each"),
    ],
)
def test_impossible_classes_per_client(partition, words):
    with pytest.raises(ScenarioError, match=words):
        build(partition, np.repeat(np.arange(10), 600))


# --- class-imbalanced (Fed-CBS Case 1)


@pytest.mark.parametrize(("ratio", "many", "few"), [(3, 18, 6), (5, 20, 4)])
def test_case_1_has_the_papers_client_counts(ratio, many, few):
    federation = build(Imbalanced(clients=120, ratio=ratio, out_of=200), CIFAR)
    counts = federation.label_counts()
    assert ((counts > 0).sum(axis=1) == 1).all()
    assert (counts > 0).sum(axis=0).tolist() == [many] * 5 + [few] * 5
    assert (federation.sizes == 250).all()
    total = counts.sum(axis=0)
    assert total[0] / total[-1] == ratio


def test_case_1_qcid_of_the_whole_set_is_the_papers():
    # Table 3, "all" is near the QCID of the whole global set: sum (n_c / n - 1/10)^2 = 2.5e-2 and 4.44e-2
    for ratio, expected in ((3, 0.025), (5, 0.0444)):
        total = build(Imbalanced(clients=120, ratio=ratio), CIFAR).label_counts().sum(axis=0)
        assert ((total / total.sum() - 0.1) ** 2).sum() == pytest.approx(expected, abs=5e-5)


def test_impossible_imbalance():
    with pytest.raises(ScenarioError, match="= 20") as caught:
        build(Imbalanced(clients=110, ratio=3), CIFAR)
    assert "100 and 120" in caught.value.hint
    with pytest.raises(ScenarioError, match=r"100 clients.* 10 "):
        build(Imbalanced(clients=120, ratio=3, out_of=100), CIFAR)
    with pytest.raises(ScenarioError, match=r"frequent.*rare"):
        build(Imbalanced(clients=120, ratio=3, frequent=10), CIFAR)


# --- dominant class (FLASH)


def test_dominant_class_is_80_to_20_on_the_given_share():
    federation = build(DominantClass(clients=100, samples=500, share=0.3), CIFAR)
    counts = federation.label_counts()
    dominant = federation.traits["dominant_class"]
    assert (dominant >= 0).sum() == 30
    assert (counts[dominant >= 0, dominant[dominant >= 0]] == 400).all()
    rest = counts[dominant >= 0].copy()
    rest[np.arange(30), dominant[dominant >= 0]] = 11
    assert rest.min() == 11 and rest.max() == 12  # 100 over nine classes
    assert (counts[dominant < 0] == 50).all()
    assert np.bincount(dominant[dominant >= 0]).tolist() == [3] * 10
    assert len(federation.indices) == 50_000  # all of CIFAR-10


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_dominant_class_takes_the_largest_equal_size(share):
    federation = build(DominantClass(clients=40, share=share), CIFAR)
    assert len(np.unique(federation.sizes)) == 1
    assert federation.sizes[0] >= 0.75 * 1250
    assert federation.label_counts().sum(axis=0).max() <= 5000


def test_dominant_class_with_log_normal_sizes_keeps_80_to_20():
    federation = build(DominantClass(clients=100, samples=400, share=0.3, replacement=True, spread=0.5), CIFAR)
    sizes, dominant = federation.label_counts().sum(axis=1), federation.traits["dominant_class"]
    assert 0.35 < np.log(sizes).std() < 0.65
    assert abs(sizes.mean() / 400 - 1) < 0.2
    skewed = dominant >= 0
    own = federation.label_counts()[skewed, dominant[skewed]]
    np.testing.assert_allclose(own / sizes[skewed], 0.8, atol=0.01)


def test_impossible_dominant_class():
    with pytest.raises(ScenarioError, match="samples of class"):
        build(DominantClass(clients=100, samples=600, share=0.3), CIFAR)
    with pytest.raises(ScenarioError, match="class 1 has none"):
        build(DominantClass(clients=2), np.array([0, 2, 0, 2]))
    rare = np.concatenate([CIFAR, [10]])
    with pytest.raises(ScenarioError, match=r"samples of class 10\b.* 1\."):
        build(DominantClass(clients=100, samples=50), rare)
    assert len(build(DominantClass(clients=100, samples=50, replacement=True), rare)) == 100


# --- writers, custom


def test_writers_keep_their_own_samples():
    rng = np.random.default_rng(0)
    writers = rng.integers(0, 12, 400)
    labels = rng.integers(0, 5, 400)
    names = tuple(f"w{i}" for i in range(12))
    federation = Scenario(partition=Natural()).build(labels, 5, 1, writers=writers, writer_names=names)
    assert federation.names == names
    for k in range(12):
        assert sorted(federation.indices[federation.owner == k]) == np.flatnonzero(writers == k).tolist()
    fewer = Scenario(partition=Natural(clients=3, least=30)).build(labels, 5, 1, writers=writers, writer_names=names)
    assert len(fewer) == 3 and (fewer.sizes >= 30).all()
    assert all(
        sorted(fewer.indices[fewer.owner == k]) == np.flatnonzero(writers == fewer.traits["writer"][k]).tolist()
        for k in range(3)
    )


def test_impossible_writers():
    with pytest.raises(ScenarioError, match="natural"):
        build(Natural(), np.array([0, 1]))
    with pytest.raises(ScenarioError, match=r"3 writers.* 2 samples.* 1 "):
        build(Natural(clients=3, least=2), np.array([0, 1, 1]), writers=[0, 1, 1])


def test_custom_lists():
    federation = build(Custom.of([np.array([3, 1]), [], [1]]), np.array([0, 1, 0, 1]))
    assert federation.sizes.tolist() == [2, 0, 1]
    assert set(federation.indices[federation.owner == 0].tolist()) == {1, 3}
    with pytest.raises(ScenarioError, match=r"client 1 .*9"):
        build(Custom(parts=((0,), (9,))), np.array([0, 1]))
    with pytest.raises(ParameterError, match="'parts'"):
        Custom(parts=((-1,),))


def test_custom_lists_may_not_use_the_samples_of_the_server():
    scenario = Scenario(partition=Custom(parts=(tuple(range(20)),)), server_validation=2)
    with pytest.raises(ScenarioError, match="server"):
        scenario.build(np.repeat([0, 1], 10))


# --- input


@pytest.mark.parametrize(
    "labels", [[], [[0, 1]], [0.5, 1.0], ["a"], [-1, 0]], ids=["empty", "matrix", "floats", "text", "negative"]
)
def test_bad_labels(labels):
    with pytest.raises(InputError, match="Labels"):
        build(Iid(clients=1), labels)


def test_labels_beyond_the_classes_and_bad_writers():
    with pytest.raises(InputError, match=r"0 \.\. 2 for 3 classes\. Got 0 \.\. 3"):
        Scenario(partition=Iid(clients=1)).build([0, 3], classes=3)
    with pytest.raises(InputError, match="label"):
        Scenario(partition=Natural()).build([0, 1], writers=[0])


@pytest.mark.parametrize("name", ["iid", "class-heterogeneity", "dirichlet"])
def test_more_samples_than_the_training_set_has(name):
    with pytest.raises(ScenarioError, match=r"10 clients x 7 samples = 70\b.* 60"):
        build(PARTITIONS.create(name, clients=10, samples=7), np.repeat(np.arange(3), 20))
    with pytest.raises(ScenarioError, match=r"100 .*60 "):
        build(PARTITIONS.create(name, clients=100), np.repeat(np.arange(3), 20))


def test_every_partition_documents_its_parameters():
    for name in PARTITIONS.names():
        cls = PARTITIONS.get(name)
        declared = {info.name for info in parameters(cls)}
        assert declared == {field.name for field in dataclasses.fields(cls)}
        assert cls.__doc__
