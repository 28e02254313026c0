"""FedCM [Kim2020]: combinatorial bandits that learn which clients' models are kept."""

from fedcohort.selectors.papers.fedcm.selector import FedCmTs, FedCmUcb

__all__ = ["FedCmTs", "FedCmUcb"]
