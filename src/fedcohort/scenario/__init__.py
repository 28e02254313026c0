"""The heterogeneity of a simulated federation: partition, label noise, latency, availability, failures."""

from fedcohort.scenario.availability import (
    AVAILABILITIES,
    Always,
    Availability,
    Bernoulli,
    ClassBiased,
    DayNight,
    UniformShare,
)
from fedcohort.scenario.classwise import ClassesPerClient, DominantClass, Iid, Imbalanced, Shards
from fedcohort.scenario.dirichlet import (
    ClassHeterogeneity,
    ClientHeterogeneity,
    DirichletLabels,
    DirichletQp,
    MixedHeterogeneity,
    Skewness,
)
from fedcohort.scenario.federation import ClientSamples, Federation
from fedcohort.scenario.groups import Groups
from fedcohort.scenario.latency import LATENCIES, Latency, NoLatency, ShiftedExponential
from fedcohort.scenario.noise import LabelNoise
from fedcohort.scenario.partition import PARTITIONS, Assignment, Partition, Pool
from fedcohort.scenario.picture import text_picture
from fedcohort.scenario.predefined import Custom, Natural
from fedcohort.scenario.presets import PRESETS, Preset, preset
from fedcohort.scenario.scenario import RoundEvents, Scenario
from fedcohort.scenario.shift import VIEWS, Shift, meant, seen
from fedcohort.scenario.unequal import Quantity, RareHolders

__all__ = [
    "AVAILABILITIES",
    "LATENCIES",
    "PARTITIONS",
    "PRESETS",
    "VIEWS",
    "Always",
    "Assignment",
    "Availability",
    "Bernoulli",
    "ClassBiased",
    "ClassHeterogeneity",
    "ClassesPerClient",
    "ClientHeterogeneity",
    "ClientSamples",
    "Custom",
    "DayNight",
    "DirichletLabels",
    "DirichletQp",
    "DominantClass",
    "Federation",
    "Groups",
    "Iid",
    "Imbalanced",
    "LabelNoise",
    "Latency",
    "MixedHeterogeneity",
    "Natural",
    "NoLatency",
    "Partition",
    "Pool",
    "Preset",
    "Quantity",
    "RareHolders",
    "RoundEvents",
    "Scenario",
    "Shards",
    "Shift",
    "ShiftedExponential",
    "Skewness",
    "UniformShare",
    "meant",
    "preset",
    "seen",
    "text_picture",
]
