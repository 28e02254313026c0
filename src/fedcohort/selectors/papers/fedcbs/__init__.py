"""Fed-CBS [Zhang2023]: draw cohorts whose combined data is balanced over the classes.

``selector.py`` is the draw (Sec. 3.3). The class imbalance QCID of a group (Theorem 3.1) is in
:mod:`fedcohort.selectors.numerics.class_balance`, because other selectors use it too.
"""

from fedcohort.selectors.papers.fedcbs.selector import FedCBS, Weighting, draw_group

__all__ = ["FedCBS", "Weighting", "draw_group"]
