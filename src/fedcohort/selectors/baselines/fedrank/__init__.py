"""FedRank: a network that learned to rank clients by imitating other selectors."""

from fedcohort.selectors.baselines.fedrank.selector import FedRank

__all__ = ["FedRank"]
