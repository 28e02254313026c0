"""The heterogeneity of a simulated federation: partition, label noise, latency, availability, failures."""

from fedcohort.scenario import classwise, dirichlet, given  # noqa: F401  # they register their partitions
from fedcohort.scenario.federation import ClientSamples, Federation
from fedcohort.scenario.partition import PARTITIONS, Assignment, Partition, Pool

__all__ = ["PARTITIONS", "Assignment", "ClientSamples", "Federation", "Partition", "Pool"]
