"""fedcohort: choose which clients train in each round of federated learning, and show why."""

__version__ = "0.1.0"
