"""FLASH [Chang2024]: a linear contextual bandit over each client's losses, speed and last reward.

``context.py`` is what is known about each client (Sec. 2.3), ``contextual.py`` has the readings of the reward and the
round without the bandit (Algorithm 1), ``regression.py`` the ridge regression and its Thompson
draw (Eqs. 1, 2), and ``selector.py`` the linear bandit (Algorithm 2) with the early-stop rule.
"""

from fedcohort.selectors.papers.flash.context import ELEMENTS, LIMIT, VALIDATION_LOSS_AFTER
from fedcohort.selectors.papers.flash.contextual import READINGS
from fedcohort.selectors.papers.flash.selector import Flash, FlashState

__all__ = ["ELEMENTS", "LIMIT", "READINGS", "VALIDATION_LOSS_AFTER", "Flash", "FlashState"]
