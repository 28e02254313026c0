"""HiCS-FL [Chen2024]: prefer clients with balanced labels, estimated from updates of the output layer's bias.

``estimates.py`` has the entropies, distances and probabilities (Eqs. 7, 9, 10), ``selector.py`` Algorithm 1, and
``plots.py`` its figure in a report.
"""

from fedcohort.selectors.baselines.hics_fl.selector import HicsFL

__all__ = ["HicsFL"]
