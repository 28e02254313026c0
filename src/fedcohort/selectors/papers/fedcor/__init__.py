"""FedCor [Tang2022]: choose the cohort that should lower the global loss most, by a Gaussian process over losses.

``selector.py`` is the strategy (Algorithm 2), ``choice.py`` the greedy choice (Sec. 4.3, Algorithm 1), and
``process.py`` the Gaussian process and its fit (Secs. 4.2 and 4.5).
"""

from fedcohort.selectors.papers.fedcor.selector import FedCor

__all__ = ["FedCor"]
