"""The live dashboard: it follows running simulations and live journals in a browser.

``watcher`` finds what is in a folder, ``feed`` follows experiments and ``sessions`` follows journals. ``app`` serves
them. ``server`` starts it, and needs a token unless it serves only this machine. Only ``app`` and ``server`` need the
web framework.
"""

from fedcohort.report.dashboard.watcher import Watcher

__all__ = ["Watcher"]
