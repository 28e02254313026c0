import sys

import numpy as np
import pytest

from fedcohort.core.errors import InputError, MissingExtraError
from fedcohort.scenario import Federation, LabelNoise, Scenario, Shards, picture, text_picture

FEDERATION = Scenario(partition=Shards(clients=20, per_client=2)).build(np.repeat(np.arange(10), 40), seed=0)


def test_bars_hold_the_counts():
    pytest.importorskip("plotly")
    figure = picture(FEDERATION, class_names=[f"kind {c}" for c in range(10)])
    assert [bar.name for bar in figure.data] == [f"kind {c}" for c in range(10)]
    assert np.array_equal(np.stack([bar.y for bar in figure.data], axis=1), FEDERATION.label_counts())
    assert "20 clients, 400 samples" in figure.layout.title.text


def test_bubbles_hold_the_counts():
    pytest.importorskip("plotly")
    figure = picture(FEDERATION, kind="bubbles")
    (bubbles,) = figure.data
    counts = FEDERATION.label_counts()
    assert len(bubbles.x) == (counts > 0).sum()
    assert sum(bubbles.marker.size) == 400


def test_many_clients_are_thinned_out_and_the_title_says_so():
    pytest.importorskip("plotly")
    many = Federation.of([[0]] * 500, labels=[0], classes=1)
    figure = picture(many, limit=50)
    assert len(figure.data[0].x) == 50 and "(50 clients shown)" in figure.layout.title.text
    text = text_picture(many, limit=10)
    assert "(10 of 500 clients)" in text and len(text.splitlines()) == 12


def test_text_shows_classes_sizes_and_noise():
    noisy = Scenario(partition=Shards(clients=4, per_client=1), noise=LabelNoise(level=0.5, concentration=100)).build(
        np.repeat([0, 1], 40), seed=0
    )
    lines = text_picture(noisy, true=True).splitlines()
    assert len(lines) == 5 and lines[0] == "client  classes 0 to 1"
    assert all(("|█ |" in line) != ("| █|" in line) for line in lines[1:])
    assert all("20 samples" in line and "wrong labels" in line for line in lines[1:])


def test_bad_requests():
    with pytest.raises(InputError, match="'bars' or 'bubbles'"):
        picture(FEDERATION, kind="pie")
    with pytest.raises(InputError, match="10 classes and 1 class names"):
        picture(FEDERATION, class_names=["a"])
    with pytest.raises(InputError, match="at least 1"):
        text_picture(FEDERATION, limit=0)


def test_without_plotly_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(MissingExtraError, match=r"fedcohort\[report\]"):
        picture(FEDERATION)
