"""Fed-CBS [Zhang2023]: draw cohorts whose grouped data is balanced over the classes.

``selector.py`` is the draw (Sec. 3.3), ``imbalance.py`` the class imbalance QCID of a group that grows (Theorem 3.1),
and ``enumeration.py`` the exact distribution of small cohorts.
"""

from fedcohort.selectors.fedcbs.imbalance import ClassBalance, group_of, qcid
from fedcohort.selectors.fedcbs.selector import BalancedState, FedCBS, Weighting, draw_group

__all__ = ["BalancedState", "ClassBalance", "FedCBS", "Weighting", "draw_group", "group_of", "qcid"]
