"""FedACS [Wang2021]: prefer clients whose data is not skewed, found out by letting their gradients duel.

``selector.py`` is the strategy (Algorithms 1 and 2), ``pool.py`` how its pool is drawn without lambda N^2 draws, and
``ranking.py`` the analytics: clients by skewness, with credible intervals.
"""

from fedcohort.selectors.papers.fedacs.ranking import Ranking, ranking
from fedcohort.selectors.papers.fedacs.selector import FedAcs, FedAcsState, duels

__all__ = ["FedAcs", "FedAcsState", "Ranking", "duels", "ranking"]
