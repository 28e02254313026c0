"""Selectors from papers in which clients answer one by one."""

from fedcohort.selectors.baselines.asynchronous.fedcompass import FedCompass
from fedcohort.selectors.baselines.asynchronous.oort_async import AsyncOort
from fedcohort.selectors.baselines.asynchronous.pisces import Pisces

__all__ = ["AsyncOort", "FedCompass", "Pisces"]
