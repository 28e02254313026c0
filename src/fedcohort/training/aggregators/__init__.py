"""Aggregators: how the kept models become the next global model, found by name in :data:`AGGREGATORS`.

=======================  ===============================================================================================
``fedavg``               the default: weights n_k over the kept cohort, summing to 1
``mean``                 plain mean of the kept models (FedCor Eq. 4)
``fedavg-with-absent``   FedCM Table 1's FedAvg: everybody who is absent keeps the old global model
``inverse-probability``  w plus the sum of p_k m_k (w_k - w): unbiased for selectors that declare probabilities
``fedprox``              plain (or size-weighted) mean, with a proximal term in local training
``fedpdp``               FedAvg with partial device participation, p_k N / n(S); FedCA's Eq. 5 when a filter is used
``fednova``              updates normalised by each client's number of local steps
``scaffold``             control variates correct the drift of local training
``fedavgm``              momentum at the server
``fedadam``              Adam at the server
``fedyogi``              Yogi at the server
``median``               coordinate-wise median
``trimmed-mean``         coordinate-wise mean without the extremes
``krum``                 the one model with the closest company
``multi-krum``           the mean of the models with the closest company
``feddf``                the mean, distilled from the ensemble on unlabelled samples of the server
``rhfl``                 models count by the confidence in their clients, in the mean and in what is distilled
``fedbio``               weights of clients are learned from the loss on labelled samples of the server
=======================  ===============================================================================================
"""

from fedcohort.training.aggregators.base import (
    AGGREGATORS,
    Aggregator,
    Combined,
    Corrections,
    Members,
    Memory,
    Mix,
    Server,
    WeightedSum,
    fitting,
)
from fedcohort.training.aggregators.distillation import FedDf, Rhfl
from fedcohort.training.aggregators.fedbio import Cleaning, FedBio
from fedcohort.training.aggregators.fednova import FedNova
from fedcohort.training.aggregators.fedopt import FedAdam, FedAvgM, FedYogi, Moments
from fedcohort.training.aggregators.linear import FedAvg, FedAvgWithAbsent, FedPdp, FedProx, InverseProbability, Mean
from fedcohort.training.aggregators.robust import Krum, Median, MultiKrum, TrimmedMean
from fedcohort.training.aggregators.scaffold import ControlVariates, Scaffold

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "Cleaning",
    "Combined",
    "ControlVariates",
    "Corrections",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedAvgWithAbsent",
    "FedBio",
    "FedDf",
    "FedNova",
    "FedPdp",
    "FedProx",
    "FedYogi",
    "InverseProbability",
    "Krum",
    "Mean",
    "Median",
    "Members",
    "Memory",
    "Mix",
    "Moments",
    "MultiKrum",
    "Rhfl",
    "Scaffold",
    "Server",
    "TrimmedMean",
    "WeightedSum",
    "fitting",
]
