"""Fed-CBS [Zhang2023]: draw cohorts whose grouped data is balanced over the classes.

``selector.py`` is the draw (Sec. 3.3). The class imbalance QCID of a group that grows (Theorem 3.1) is in
:mod:`fedcohort.selectors.numerics.class_balance`, because others use it too.
"""

from fedcohort.selectors.papers.fedcbs.selector import BalancedState, FedCBS, Weighting, draw_group

__all__ = ["BalancedState", "FedCBS", "Weighting", "draw_group"]
