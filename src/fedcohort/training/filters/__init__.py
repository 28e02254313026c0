"""Filters decide which returned models enter the average. :data:`FILTERS` finds them by name.

============  =========================================================================================
``keep-all``  every valid model that arrived in time; the default
``fedca``     the subset of models that validates best together (FedCM's combinatorial averaging)
``cmfl``      updates whose signs agree with the round's mean update
============  =========================================================================================
"""

from fedcohort.training.filters.base import FILTERS, Filter, FilterDecision, KeepAll, Need, Replies, checked_decision
from fedcohort.training.filters.cmfl import CMFL
from fedcohort.training.filters.combinatorial import FedCA

__all__ = ["CMFL", "FILTERS", "FedCA", "Filter", "FilterDecision", "KeepAll", "Need", "Replies", "checked_decision"]
