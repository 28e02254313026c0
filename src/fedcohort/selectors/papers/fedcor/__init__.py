"""FedCor [Tang2022]: a Gaussian process over the clients' losses says which cohort should lower the global loss most.

``selector.py`` is the strategy (Algorithm 2), ``choice.py`` the greedy choice (Sec. 4.3, Algorithm 1), ``process.py``
the process and its fit (Secs. 4.2 and 4.5), and ``diagnostics.py`` the two checks of Appendix D.
"""

from fedcohort.selectors.papers.fedcor.selector import CorrelationState, FedCor

__all__ = ["CorrelationState", "FedCor"]
