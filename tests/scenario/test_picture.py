import dataclasses

import numpy as np

from fedcohort.scenario import Federation, Scenario, text_picture
from fedcohort.scenario.classwise import Shards
from fedcohort.scenario.noise import LabelNoise

FEDERATION = Scenario(partition=Shards(clients=20, per_client=2)).build(np.repeat(np.arange(10), 40), seed=0)


def test_many_clients_are_thinned_out_and_the_last_line_says_so():
    many = Federation.of([[0]] * 500, labels=[0], classes=1)
    text = text_picture(many, limit=10)
    assert "(10 of 500 clients)" in text and len(text.splitlines()) == 12


def test_text_shows_classes_sizes_and_noise():
    scenario = Scenario(partition=Shards(clients=4, per_client=1))
    lines = text_picture(scenario.build(np.repeat([0, 1], 40), seed=0)).splitlines()
    assert len(lines) == 5 and lines[0] == "client  classes 0 to 1"
    assert all(("|█ |" in line) != ("| █|" in line) for line in lines[1:])
    assert all("20 samples" in line and "wrong labels" not in line for line in lines[1:])
    noisy = dataclasses.replace(scenario, noise=LabelNoise(level=0.5, concentration=100))
    lines = text_picture(noisy.build(np.repeat([0, 1], 40), seed=0)).splitlines()
    assert all("20 samples" in line and "wrong labels" in line for line in lines[1:])
