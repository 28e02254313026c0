"""How the clients of a simulated federation differ: partition, label noise, latency, availability, failures."""

# Whoever looks up a partition or devices by name finds those of these modules.
from fedcohort.scenario import classwise, dirichlet, predefined, traces, unequal  # noqa: F401
from fedcohort.scenario.availability import AVAILABILITIES
from fedcohort.scenario.devices import DEVICES
from fedcohort.scenario.federation import Federation
from fedcohort.scenario.groups import Groups
from fedcohort.scenario.latency import LATENCIES
from fedcohort.scenario.partition import PARTITIONS
from fedcohort.scenario.picture import text_picture
from fedcohort.scenario.presets import PRESETS
from fedcohort.scenario.scenario import Scenario, preset

__all__ = [
    "AVAILABILITIES",
    "DEVICES",
    "LATENCIES",
    "PARTITIONS",
    "PRESETS",
    "Federation",
    "Groups",
    "Scenario",
    "preset",
    "text_picture",
]
