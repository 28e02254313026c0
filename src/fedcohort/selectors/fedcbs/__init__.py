"""Fed-CBS [Zhang2023]: draw cohorts whose grouped data is balanced over the classes.

``selector.py`` is the draw (Sec. 3.3), ``imbalance.py`` the class imbalance QCID of a group that grows (Theorem 3.1),
``enumeration.py`` the exact distribution of small cohorts, and ``blind.py`` the draw from estimated labels.
"""

from fedcohort.selectors.fedcbs.blind import BlindFedCBS, BlindState
from fedcohort.selectors.fedcbs.imbalance import ClassBalance, group_of, qcid
from fedcohort.selectors.fedcbs.selector import BalancedState, FedCBS, Weighting, draw_group

__all__ = [
    "BalancedState",
    "BlindFedCBS",
    "BlindState",
    "ClassBalance",
    "FedCBS",
    "Weighting",
    "draw_group",
    "group_of",
    "qcid",
]
