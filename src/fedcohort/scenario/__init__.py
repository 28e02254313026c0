"""How the clients of a simulated federation differ: partition, label noise, latency, availability, failures."""

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
from fedcohort.scenario.devices import DEVICES, Attendance, Devices, DrawnDevices, OnlineDevices, Sessions
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
from fedcohort.scenario.presets import PRESETS, Preset
from fedcohort.scenario.scenario import RoundEvents, Scenario, preset
from fedcohort.scenario.shift import VIEWS, Shift, meant, seen
from fedcohort.scenario.traces import Trace, TraceDevices, fit, read_fedscale, read_flash, read_trace, write_trace
from fedcohort.scenario.unequal import Quantity, RareHolders

__all__ = [
    "AVAILABILITIES",
    "DEVICES",
    "LATENCIES",
    "PARTITIONS",
    "PRESETS",
    "VIEWS",
    "Always",
    "Assignment",
    "Attendance",
    "Availability",
    "Bernoulli",
    "ClassBiased",
    "ClassHeterogeneity",
    "ClassesPerClient",
    "ClientHeterogeneity",
    "ClientSamples",
    "Custom",
    "DayNight",
    "Devices",
    "DirichletLabels",
    "DirichletQp",
    "DominantClass",
    "DrawnDevices",
    "Federation",
    "Groups",
    "Iid",
    "Imbalanced",
    "LabelNoise",
    "Latency",
    "MixedHeterogeneity",
    "Natural",
    "NoLatency",
    "OnlineDevices",
    "Partition",
    "Pool",
    "Preset",
    "Quantity",
    "RareHolders",
    "RoundEvents",
    "Scenario",
    "Sessions",
    "Shards",
    "Shift",
    "ShiftedExponential",
    "Skewness",
    "Trace",
    "TraceDevices",
    "UniformShare",
    "fit",
    "meant",
    "preset",
    "read_fedscale",
    "read_flash",
    "read_trace",
    "seen",
    "text_picture",
    "write_trace",
]
