"""Rounds, and the live federations that run them.

The names below are all that a host of your own needs. They are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcohort.hosts.early_stop import EarlyStop
    from fedcohort.hosts.flow import Flow, FlowPolicy
    from fedcohort.hosts.live import Aggregation, Host, Online, play
    from fedcohort.hosts.round import Policy, Reply

__all__ = ["Aggregation", "EarlyStop", "Flow", "FlowPolicy", "Host", "Online", "Policy", "Reply", "play"]
_HOMES = {
    "fedcohort.hosts.early_stop": ("EarlyStop",),
    "fedcohort.hosts.flow": ("Flow", "FlowPolicy"),
    "fedcohort.hosts.live": ("Aggregation", "Host", "Online", "play"),
    "fedcohort.hosts.round": ("Policy", "Reply"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
