"""Oort: statistical utility times speed, with exploration.

- :mod:`~fedcohort.selectors.oort.guidance`: the ranking, which PyramidFL shares
- :mod:`~fedcohort.selectors.oort.selector`: the selector
"""

from fedcohort.selectors.oort.guidance import Guidance, OortState
from fedcohort.selectors.oort.selector import Oort

__all__ = ["Guidance", "Oort", "OortState"]
