"""FedACS [Wang2021]: prefer clients whose data is not skewed, found by duels of their gradients.

``selector.py`` is the strategy (Algorithms 1 and 2). ``pool.py`` draws its pool without lambda N^2 draws.
``ranking.py`` is the analytics: it ranks clients by skewness, with credible intervals.
"""

from fedcohort.selectors.papers.fedacs.ranking import Ranking, ranking
from fedcohort.selectors.papers.fedacs.selector import FedAcs, FedAcsState

__all__ = ["FedAcs", "FedAcsState", "Ranking", "ranking"]
