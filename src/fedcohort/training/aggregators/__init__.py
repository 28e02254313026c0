"""Aggregators turn the kept models into the next global model. :data:`AGGREGATORS` finds them by name.

=======================  ===============================================================================================
``fedavg``               the default: weights n_k over the kept cohort, summing to 1
``mean``                 plain mean of the kept models (FedCor Eq. 4)
``fedavg-with-absent``   FedCM Table 1's FedAvg: absent clients keep the old global model
``inverse-probability``  w plus the sum of p_k m_k (w_k - w): unbiased for selectors that declare probabilities
``fedprox``              plain (or size-weighted) mean, with a proximal term in local training
``fedpdp``               FedAvg with partial device participation, p_k N / n(S); FedCA's Eq. 5 when a filter is used
``fednova``              updates normalised by each client's number of local steps
``scaffold``             control variates correct the drift of local training
``fedavgm``              momentum at the server
``fedadam``              Adam at the server
``fedyogi``              Yogi at the server
``fedvarp``              the cohort's updates, corrected by the last updates of absent clients
``mifa``                 the mean of all clients' last updates
``fedau``                updates times the mean number of rounds between a client's participations
``fedawe``               updates times the rounds missed, from the model each client last received
``fedbuff``              the mean of buffered updates, stale ones discounted
``fedasync``             each model mixed in when it arrives, with less weight the staler it is
``fedavg-stale``         weights by size and staleness, summing to 1
``median``               coordinate-wise median
``trimmed-mean``         coordinate-wise mean without the extremes
``krum``                 the model that is closest to its neighbours
``multi-krum``           the mean of the models that are closest to their neighbours
``feddf``                the mean, distilled from the ensemble on unlabelled samples of the server
``rhfl``                 mean and distillation, both weighted by the confidence in each client
``fedbio``               client weights learned from the loss on labelled samples at the server
=======================  ===============================================================================================
"""

from fedcohort.training.aggregators.asynchronous import FedAsync, FedAvgStale, FedBuff
from fedcohort.training.aggregators.base import (
    AGGREGATORS,
    Aggregator,
    Combined,
    Corrections,
    Members,
    Memory,
    Mix,
    OwnModels,
    Server,
    WeightedSum,
    fitting,
)
from fedcohort.training.aggregators.distillation import FedDf, Rhfl
from fedcohort.training.aggregators.fedau import FedAu
from fedcohort.training.aggregators.fedawe import FedAwe
from fedcohort.training.aggregators.fedbio import FedBio
from fedcohort.training.aggregators.fednova import FedNova
from fedcohort.training.aggregators.fedopt import FedAdam, FedAvgM, FedYogi
from fedcohort.training.aggregators.last_updates import FedVarp, Mifa
from fedcohort.training.aggregators.linear import FedAvg, FedAvgWithAbsent, FedPdp, FedProx, InverseProbability, Mean
from fedcohort.training.aggregators.robust import Krum, Median, MultiKrum, TrimmedMean
from fedcohort.training.aggregators.scaffold import Scaffold

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "Combined",
    "Corrections",
    "FedAdam",
    "FedAsync",
    "FedAu",
    "FedAvg",
    "FedAvgM",
    "FedAvgStale",
    "FedAvgWithAbsent",
    "FedAwe",
    "FedBio",
    "FedBuff",
    "FedDf",
    "FedNova",
    "FedPdp",
    "FedProx",
    "FedVarp",
    "FedYogi",
    "InverseProbability",
    "Krum",
    "Mean",
    "Median",
    "Members",
    "Memory",
    "Mifa",
    "Mix",
    "MultiKrum",
    "OwnModels",
    "Rhfl",
    "Scaffold",
    "Server",
    "TrimmedMean",
    "WeightedSum",
    "fitting",
]
