"""Oort: statistical utility times speed, with exploration.

- :mod:`~fedcohort.selectors.baselines.oort.guidance`: the ranking, which PyramidFL also uses
- :mod:`~fedcohort.selectors.baselines.oort.selector`: the selector
- :mod:`~fedcohort.selectors.baselines.oort.plots`: its figure in a report
"""

from fedcohort.selectors.baselines.oort.guidance import Guidance, OortState
from fedcohort.selectors.baselines.oort.selector import Oort

__all__ = ["Guidance", "Oort", "OortState"]
