"""A selector that learns from which models are kept has a filter on Flower too."""

import logging

import numpy as np
import pytest

from fedcohort.core.errors import ParameterError
from fedcohort.hosts.flower import CohortStrategy, ServerValidation
from fedcohort.training.filters import KeepAll


def test_the_default_filter_of_the_selector_is_taken():
    with pytest.raises(ParameterError, match=r"The filter 'fedca'"):
        CohortStrategy("fedcm-ts")
    validation = ServerValidation(logits=lambda arrays: np.zeros((2, 2)), labels=np.array([0, 1]))
    assert CohortStrategy("fedcm-ts", validation=validation).filter.name == "fedca"
    assert CohortStrategy("fedcm-ts", filter=KeepAll()).filter.name == "keep-all"
    assert CohortStrategy("uniform").filter.name == "keep-all"


@pytest.mark.parametrize(
    ("name", "biased"), [("gradnorm", True), ("feel", True), ("clustered", False), ("oort", False)]
)
def test_a_selector_that_flowers_mean_makes_biased_is_logged(name, biased, caplog):
    with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
        CohortStrategy(name)
    assert (f"'{name}' is unbiased with the aggregator 'inverse-probability'" in caplog.text) is biased
