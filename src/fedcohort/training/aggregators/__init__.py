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

# "as" marks a name that this package gives on. So each module needs one line here.
from fedcohort.training.aggregators.asynchronous import FedAsync as FedAsync
from fedcohort.training.aggregators.asynchronous import FedAvgStale as FedAvgStale
from fedcohort.training.aggregators.asynchronous import FedBuff as FedBuff
from fedcohort.training.aggregators.base import AGGREGATORS as AGGREGATORS
from fedcohort.training.aggregators.base import Aggregator as Aggregator
from fedcohort.training.aggregators.base import Combined as Combined
from fedcohort.training.aggregators.base import Corrections as Corrections
from fedcohort.training.aggregators.base import Members as Members
from fedcohort.training.aggregators.base import Memory as Memory
from fedcohort.training.aggregators.base import Mix as Mix
from fedcohort.training.aggregators.base import OwnModels as OwnModels
from fedcohort.training.aggregators.base import Server as Server
from fedcohort.training.aggregators.base import WeightedSum as WeightedSum
from fedcohort.training.aggregators.base import fitting as fitting
from fedcohort.training.aggregators.distillation import FedDf as FedDf
from fedcohort.training.aggregators.distillation import Rhfl as Rhfl
from fedcohort.training.aggregators.fedau import FedAu as FedAu
from fedcohort.training.aggregators.fedawe import FedAwe as FedAwe
from fedcohort.training.aggregators.fedbio import FedBio as FedBio
from fedcohort.training.aggregators.fednova import FedNova as FedNova
from fedcohort.training.aggregators.fedopt import FedAdam as FedAdam
from fedcohort.training.aggregators.fedopt import FedAvgM as FedAvgM
from fedcohort.training.aggregators.fedopt import FedYogi as FedYogi
from fedcohort.training.aggregators.last_updates import FedVarp as FedVarp
from fedcohort.training.aggregators.last_updates import Mifa as Mifa
from fedcohort.training.aggregators.linear import FedAvg as FedAvg
from fedcohort.training.aggregators.linear import FedAvgWithAbsent as FedAvgWithAbsent
from fedcohort.training.aggregators.linear import FedPdp as FedPdp
from fedcohort.training.aggregators.linear import FedProx as FedProx
from fedcohort.training.aggregators.linear import InverseProbability as InverseProbability
from fedcohort.training.aggregators.linear import Mean as Mean
from fedcohort.training.aggregators.robust import Krum as Krum
from fedcohort.training.aggregators.robust import Median as Median
from fedcohort.training.aggregators.robust import MultiKrum as MultiKrum
from fedcohort.training.aggregators.robust import TrimmedMean as TrimmedMean
from fedcohort.training.aggregators.scaffold import Scaffold as Scaffold
