"""The live dashboard: follows running simulations and live journals in a folder, in a browser.

``feed`` reads what is on disk, ``app`` serves it, ``server`` starts it and refuses to be open to the world without a
token. Only ``app`` and ``server`` need the web framework.
"""

from fedcohort.report.dashboard.watcher import Watcher

__all__ = ["Watcher"]
