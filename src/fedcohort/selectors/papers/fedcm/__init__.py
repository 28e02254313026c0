"""FedCM [Kim2020]: combinatorial bandits that learn which clients' models are kept."""

from fedcohort.selectors.papers.fedcm.selector import FedCmTs, FedCmUcb, ThompsonState, UcbState

__all__ = ["FedCmTs", "FedCmUcb", "ThompsonState", "UcbState"]
