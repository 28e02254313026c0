"""FedRank: a network that has learned to rank clients by watching other selectors."""

from fedcohort.selectors.baselines.fedrank.selector import FedRank

__all__ = ["FedRank"]
