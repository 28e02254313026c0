"""The selection strategies, one paper one file. Importing this package registers all of them."""

import importlib
import pkgutil

from fedcohort.selectors.active_fl import ActiveFL
from fedcohort.selectors.power_of_choice import PowerOfChoice
from fedcohort.selectors.size_weighted import SizeWeighted
from fedcohort.selectors.uniform import All, Uniform

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ActiveFL", "All", "PowerOfChoice", "SizeWeighted", "Uniform"]
