"""Our own selector: the rule is in ``selector``, its promise in ``turns``, its draw in ``draw``."""

from fedcohort.selectors.ours.balanced.selector import Balanced, BalanceState

__all__ = ["BalanceState", "Balanced"]
