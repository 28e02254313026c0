"""Aggregators: how the kept models become the next global model, found by name in :data:`AGGREGATORS`.

==============  ===============================================================================================
``size-mean``   the default, and what most people call FedAvg: weights n_k over the kept cohort, summing to 1
``mean``        plain mean of the kept models (FedCor Eq. 4)
``fedavg``      FedCM Table 1's FedAvg: everybody who is absent keeps the old global model
``fedprox``     plain (or size-weighted) mean, with a proximal term in local training
``fedpdp``      FedAvg with partial device participation, p_k N / n(S); FedCA's Eq. 5 when a filter is used
``fednova``     updates normalised by each client's number of local steps
``scaffold``    control variates correct the drift of local training
==============  ===============================================================================================
"""

from fedcohort.aggregators.base import AGGREGATORS, Aggregator, Members, Memory, Mix
from fedcohort.aggregators.fednova import FedNova
from fedcohort.aggregators.linear import FedAvg, FedPdp, FedProx, Mean, SizeMean
from fedcohort.aggregators.scaffold import ControlVariates, Scaffold

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "ControlVariates",
    "FedAvg",
    "FedNova",
    "FedPdp",
    "FedProx",
    "Mean",
    "Members",
    "Memory",
    "Mix",
    "Scaffold",
    "SizeMean",
]
