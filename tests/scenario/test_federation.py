import numpy as np
import pytest

from fedcohort.scenario import Federation, Scenario
from fedcohort.scenario.classwise import Iid
from fedcohort.scenario.noise import LabelNoise

LABELS = np.array([0, 0, 1, 1, 2, 2, 2])


def small():
    return Federation(
        indices=np.array([4, 0, 2, 5, 6], np.int32),
        offsets=np.array([0, 3, 3, 5]),
        labels=np.array([2, 0, 0, 2, 1], np.int32),
        true_labels=np.array([2, 0, 1, 2, 2], np.int32),
        classes=3,
        validation=np.array([1, 0, 1]),
        noise_rate=np.array([1 / 3, 0.0, 0.5]),
        server_validation=np.array([1], np.int32),
    )


def test_sizes_and_counts():
    federation = small()
    assert len(federation) == 3
    assert federation.sizes.tolist() == [3, 0, 2]
    assert federation.train_sizes.tolist() == [2, 0, 1]
    assert federation.is_validation().tolist() == [False, False, True, False, True]
    assert federation.label_counts().tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 1]]
    assert federation.label_counts(part="all").tolist() == [[2, 0, 1], [0, 0, 0], [0, 1, 1]]
    assert federation.label_counts(part="validation").tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert federation.label_counts(part="all", true=True).tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 2]]
    assert federation.owner.tolist() == [0, 0, 0, 2, 2]
    assert federation.main_class.tolist() == [0, 0, 2]


def test_skewness_by_hand():
    # client distributions (1/3, 1/3, 1/3) and (0, 0, 1); together (1, 1, 3) / 5
    skewness = small().skewness()
    whole = np.array([0.2, 0.2, 0.6])
    assert skewness[0] == pytest.approx(((1 / 3 - whole) ** 2).sum())
    assert skewness[2] == pytest.approx(((np.array([0, 0, 1]) - whole) ** 2).sum())


def test_arrays_are_read_only():
    federation = small()
    for name in ("indices", "offsets", "labels", "true_labels", "validation", "noise_rate", "sizes", "owner"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(federation, name)[0] = 0


def test_clients_without_names_are_named_by_their_numbers():
    federation = Scenario(partition=Iid(clients=2), validation=0.5).build(LABELS, seed=3)
    assert federation.names == ("0", "1")


def test_describe_names_everything():
    text = (
        Scenario(partition=Iid(clients=2), noise=LabelNoise(level=0.4), validation=0.5, server_validation=1)
        .build(np.tile(LABELS, 4), seed=0)
        .describe()
    )
    assert "2 clients, 25 samples, 3 classes" in text
    for word in ("wrong labels", "local validation", "server validation   3 samples", "12 to 13"):
        assert word in text
