"""Conformance checks for selectors: fedcohort's own and yours.

>>> from fedcohort.selectors import Uniform
>>> from fedcohort.testing import check_selector
>>> check_selector(Uniform())
"""

from fedcohort.testing.conformance import CHECKS, ConformanceError, check_selector, checked_forms, run_check
from fedcohort.testing.host import ScriptedHost, Trace

__all__ = ["CHECKS", "ConformanceError", "ScriptedHost", "Trace", "check_selector", "checked_forms", "run_check"]
