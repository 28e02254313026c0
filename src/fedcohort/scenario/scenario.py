"""Combine partition, shift, label noise, latency, availability, failures and validation into one scenario."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcohort.core import rng
from fedcohort.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from fedcohort.core.errors import ParameterError, ScenarioError
from fedcohort.core.params import Interval, Optional, Parameterized, param, parameters
from fedcohort.core.protocol import Status
from fedcohort.core.registry import Registry, suggest
from fedcohort.scenario.attributes import AttributeTable, draw_attributes, read_attributes
from fedcohort.scenario.availability import AVAILABILITIES, Always, Availability
from fedcohort.scenario.classwise import Iid
from fedcohort.scenario.counter_rng import uniforms
from fedcohort.scenario.devices import DEVICES, Devices
from fedcohort.scenario.drift import Drift
from fedcohort.scenario.federation import Federation
from fedcohort.scenario.groups import Groups
from fedcohort.scenario.latency import LATENCIES, Latency, NoLatency
from fedcohort.scenario.noise import LabelNoise
from fedcohort.scenario.partition import PARTITIONS, Partition, Pool
from fedcohort.scenario.predefined import Natural
from fedcohort.scenario.shift import RELABEL, Shift, meant

# Positions in the data stream. Never renumber them: every seeded federation would change.
_SERVER, _PARTITION, _SHUFFLE, _NOISE, _SHIFT, _DRIFT = 0, 1, 2, 3, 4, 5
_WHETHER, _WHEN = 0, 1  # positions in the failure stream


class RoundEvents(NamedTuple):
    """What happens to the clients of a cohort while they train.

    Attributes
    ----------
    durations : (k,) float64
        Seconds that each client works, until it answers or fails.
    status : (k,) int8
        OK or FAILED, as :class:`fedcohort.core.protocol.Status`. The round decides which clients are late
        (:func:`fedcohort.hosts.round.closing`).
    """

    durations: FloatArray
    status: AnyArray


@dataclass(frozen=True, kw_only=True)
class Scenario(Parameterized):
    """How the clients of a simulated federation differ.

    Two selectors that are compared under one seed get the identical scenario. Data, noise, availability, latency and
    failures have their own random streams, and a client's draws do not depend on which other clients were selected.

    Examples
    --------
    >>> from fedcohort.scenario.classwise import Shards
    >>> scenario = Scenario(partition=Shards(clients=4, per_client=1))
    >>> federation = scenario.build(np.repeat([0, 1], 6), classes=2, seed=0)
    >>> federation.label_counts().max(axis=1)
    array([3, 3, 3, 3])
    >>> print(scenario.describe())
    partition     shards(clients=4, per_client=1, pure=True)
    label noise   none
    latency       none()
    availability  always()
    """

    partition: Partition = dataclasses.field(default_factory=Iid)
    noise: LabelNoise = dataclasses.field(default_factory=LabelNoise)
    shift: Shift = dataclasses.field(default_factory=Shift)
    latency: Latency = dataclasses.field(default_factory=NoLatency)
    availability: Availability = dataclasses.field(default_factory=Always)
    devices: Devices | None = None  # replaces latency and availability by a clock
    drift: Drift | None = None  # data that change in a round
    failure: float = param(0.0, Interval(float, 0, 1, "left"), "probability that a client fails during a round")
    rare_slowness: float = param(
        1.0,
        Interval(float, 0, None, "neither"),
        "how many times longer clients take whose samples are a third or more of rare classes",
    )
    deadline: float | None = param(
        None, Optional(Interval(float, 0, None, "neither")), "seconds after which a client is late; None waits for all"
    )
    validation: float = param(0.0, Interval(float, 0, 1, "left"), "share of each client's data held out for validation")
    server_validation: int = param(
        0, Interval(int, 0, None), "samples of each class kept at the server, taken from the training set"
    )
    attributes: Mapping[str, Any] | None = param(
        None, Optional(AttributeTable()), "what clients report about themselves, for an operator's rules"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in _PARTS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name in _OPTIONAL and value is None):
                raise ParameterError(
                    f"The '{name}' of a scenario must be a {kind.__name__} object. Got {value!r}.",
                    hint="Scenario.from_dict accepts names and tables",
                )
        if self.devices is None:
            return
        for name, none in (("latency", NoLatency), ("availability", Always)):
            part = getattr(self, name)
            if not isinstance(part, none):
                raise ParameterError(
                    f"A scenario with devices gets availability and durations from them. Got the {name} {part.name!r}.",
                    hint=f"leave out {name}, or devices",
                )

    def build(
        self,
        labels: npt.ArrayLike,
        classes: int | None = None,
        seed: int = 0,
        writers: npt.ArrayLike | None = None,
        writer_names: tuple[str, ...] | None = None,
    ) -> Federation:
        """Divide a training set among clients.

        Parameters
        ----------
        labels : (n,) int array
            Labels of the training set.
        classes : int, optional
            How many classes there are; default: the largest label + 1.
        seed : int
            The experiment's seed.
        writers : (n,) int array, optional
            The writer of each sample, for the partition "natural".
        writer_names : tuple of str, optional
            Names of writers 0, 1, ...
        """
        pool = Pool.of(labels, classes, writers, writer_names)
        # Each step has its own random stream, so a scenario with noise has the same clients as one without.
        kept = self._server_share(pool, rng.stream(seed, rng.DATA, _SERVER))
        rest = pool.without(kept) if len(kept) else pool
        if len(rest) == 0:
            raise ScenarioError(
                f"The server keeps {self.server_validation:,} samples of each class, which is the whole training set."
            )
        part = self.partition.assign(rest, rng.stream(seed, rng.DATA, _PARTITION))
        # In random order within each client, so that its last samples are a random share.
        owner = np.repeat(np.arange(len(part.offsets) - 1, dtype=np.int32), np.diff(part.offsets))
        places = part.places[np.lexsort((rng.stream(seed, rng.DATA, _SHUFFLE).random(len(owner)), owner))]
        true_labels = rest.labels[places].astype(np.int32)
        groups = None
        if self.shift.views:
            groups = self.shift.groups(len(part.offsets) - 1, rng.stream(seed, rng.DATA, _SHIFT))
        if groups is not None and RELABEL in groups.views:
            relabelled = np.repeat(groups.of == groups.views.index(RELABEL), np.diff(part.offsets))
            # For these clients the new labels are the true ones, so noise is applied after this.
            true_labels[relabelled] = meant(RELABEL, true_labels[relabelled], pool.classes)
        noisy, exact, drawn = self.noise.apply(
            true_labels, part.offsets, pool.classes, rng.stream(seed, rng.DATA, _NOISE)
        )
        traits = dict(part.traits)
        if self.noise.level:
            traits["noise_drawn"] = drawn
        if self.devices is not None:
            self.devices.check_clients(len(part.offsets) - 1)
        # The rounded share, but at least one sample if a client has two or more.
        sizes, held_out = np.diff(part.offsets), np.zeros(len(part.offsets) - 1, dtype=np.int64)
        if self.validation:
            rounded = np.floor(self.validation * sizes + 0.5).astype(np.int64)
            held_out = np.where(sizes >= 2, np.clip(rounded, 1, np.maximum(sizes - 1, 1)), 0)
        federation = Federation(
            indices=rest.positions[places].astype(np.int32),
            offsets=part.offsets,
            labels=noisy,
            true_labels=true_labels,
            classes=pool.classes,
            validation=held_out,
            noise_rate=exact,
            server_validation=pool.positions[kept].astype(np.int32),
            traits=traits,
            remarks=part.remarks,
            client_names=part.names,
            groups=groups,
        )
        # Without views, whoever owns the data is a group, or else all clients with the same main class.
        if groups is None and isinstance(self.partition, Natural):
            return dataclasses.replace(federation, groups=Groups.by_client(federation.names))
        if groups is None and pool.classes > 1:
            return dataclasses.replace(federation, groups=Groups.by_class(federation.main_class))
        return federation

    def before(self, federation: Federation, *, seed: int) -> Federation | None:
        """Return what clients hold until the drift; None if nothing changes."""
        return None if self.drift is None else self.drift.before(federation, rng.stream(seed, rng.DATA, _DRIFT))

    def _server_share(self, pool: Pool, draw: np.random.Generator) -> IntArray:
        """Return the sorted places of ``server_validation`` random samples of each class."""
        if self.server_validation == 0:
            return np.zeros(0, dtype=np.int64)
        if int(pool.counts.min()) < self.server_validation:
            c, most = int(pool.counts.argmin()), int(pool.counts.min())
            fewer = f"set scenario.server_validation to {most} or less; " if most else ""
            raise ScenarioError(
                f"The server cannot keep {self.server_validation:,} samples of each class: class {c} has only {most}.",
                hint=f"{fewer}to keep none, set it to 0 and leave out selectors whose filter needs these samples, such "
                "as fedcm-ts (a comparison takes 20 for them)",
            )
        # A stable sort of a random order, so the first samples of each class are a random choice.
        shuffled = draw.permutation(len(pool))
        by_class = shuffled[np.argsort(pool.labels[shuffled], kind="stable")]
        starts = np.concatenate([[0], np.cumsum(pool.counts)])[:-1]
        kept: IntArray = np.sort(by_class[(starts[:, None] + np.arange(self.server_validation)).reshape(-1)])
        return kept

    def available(self, federation: Federation, *, seed: int, round: int) -> BoolArray:
        """Return which clients can take part in a round (N,); with devices, those that are on at the start."""
        if self.devices is not None:
            return self.devices.presence(np.arange(len(federation)), seed=seed, time=0.0).on
        return self.availability.mask(federation, seed=seed, round=round)

    def seconds(
        self, federation: Federation, clients: IntArray, *, seed: int, round: int, work: float | FloatArray = 1.0
    ) -> FloatArray:
        """Return how long each of ``clients`` (k,) takes for a share of its usual work if it does not fail."""
        durations = self.latency.durations(federation.sizes, clients, seed=seed, round=round, work=work)
        return self._slow_rare_holders(durations, federation, clients)

    def _slow_rare_holders(self, durations: FloatArray, federation: Federation, clients: IntArray) -> FloatArray:
        if self.rare_slowness == 1:
            return durations
        return durations * np.where(federation.holds_rare[clients], self.rare_slowness, 1.0)

    def timed_events(
        self,
        federation: Federation,
        clients: IntArray,
        *,
        seed: int,
        ticket: int,
        time: float,
        samples: FloatArray,
        transfer: FloatArray | float,
    ) -> RoundEvents:
        """Return how long each of ``clients`` works by the clock, and which fail, at random or when a session ends.

        Parameters
        ----------
        clients : (k,) int array
            The clients that begin at ``time``.
        seed, ticket : int
            Which experiment, which cohort.
        samples : (k,) float array
            Samples that each client processes, counted again in every pass.
        transfer : float or (k,) array
            Bytes that each client receives and sends.
        """
        assert self.devices is not None
        seconds = self._slow_rare_holders(
            self.devices.durations(clients, samples, transfer, seed=seed), federation, clients
        )
        seconds = self.devices.spread_work(seconds, clients, seed=seed, ticket=ticket)
        durations, status = self.devices.work(clients, seconds, seed=seed, time=time)
        rates = self.devices.failure_rates(clients, self.failure)
        return _with_failures(rates, durations, status, seconds, clients, seed, ticket)

    def events(
        self,
        federation: Federation,
        clients: IntArray,
        *,
        seed: int,
        round: int,
        work: float | FloatArray = 1.0,
    ) -> RoundEvents:
        """Return how long each of ``clients`` (k,) takes, and which fail.

        ``work``, one number or (k,), is the share of the usual local work that each client does.
        """
        clients = np.asarray(clients, dtype=np.int64)
        durations = self.seconds(federation, clients, seed=seed, round=round, work=work)
        status = np.zeros(len(clients), dtype=np.int8)
        return _with_failures(self.failure, durations, status, durations, clients, seed, round)

    def client_attributes(
        self, names: tuple[str, ...], *, seed: int, round: int, changing: bool = False
    ) -> dict[str, dict[str, str | float | int | bool]]:
        """Return what clients report about themselves in a round, by name; empty without ``attributes``.

        With ``changing``, it is also empty if the attributes are the same in every round.
        """
        if self.attributes is None:
            return {}
        return draw_attributes(self.attributes, names, seed=seed, round=round, changing=changing)

    def describe(self) -> str:
        """Return the scenario as a few lines of text."""
        lines = [
            f"partition     {self.partition.describe()}",
            f"label noise   {self.noise.describe()}",
            *([f"shift         {self.shift.describe()}"] if self.shift.views else []),
            *([f"drift         {self.drift.describe()}"] if self.drift else []),
        ]
        if self.devices is not None:
            lines.append(f"devices       {self.devices.describe()}")
        else:
            lines.append(f"latency       {self.latency.describe()}")
            lines.append(f"availability  {self.availability.describe()}")
        if self.rare_slowness != 1:
            lines.append(f"rare classes  their holders take {self.rare_slowness:g} times as long")
        if self.failure:
            lines.append(f"failure       probability {self.failure:g} per client and round")
        if self.deadline is not None:
            lines.append(f"deadline      {self.deadline:g} s")
        if self.validation:
            lines.append(f"validation    {self.validation:.0%} of each client's data")
        if self.server_validation:
            lines.append(f"server        keeps {self.server_validation:,} samples of each class for validation")
        if self.attributes:
            lines.append(f"attributes    {', '.join(self.attributes)}")
        return "\n".join(lines)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Scenario:
        """Build a scenario from a table of names and numbers, such as a section of a configuration file.

        A part is a name, or a table with ``name`` and parameters. ``preset`` is a named scenario that the other keys
        change; a table without ``name`` changes parameters of the preset's part.

        Examples
        --------
        >>> Scenario.from_dict({"preset": "fedcor-dir", "partition": {"alpha": 0.5}}).partition
        DirichletQp(clients=100, alpha=0.5, least=1.0, redraws=100)
        >>> Scenario.from_dict({"partitoin": "iid"})
        Traceback (most recent call last):
            ...
        fedcohort.core.errors.ParameterError: A scenario has no key 'partitoin'. ...
          hint: did you mean 'partition'?
        """
        known = ["preset", *(field.name for field in dataclasses.fields(cls))]
        for key in table:
            if key not in known:
                raise ParameterError(
                    f"A scenario has no key {key!r}. Known: {', '.join(known)}.",
                    hint=suggest(str(key), known),
                )
        # The other keys change the preset, so that a paper's setting with one difference is one line.
        base = preset(table["preset"]) if "preset" in table else cls()
        changes = {key: value for key, value in table.items() if key != "preset"}
        for key in set(_PARTS) & set(changes):
            changes[key] = _part_from(key, changes[key], getattr(base, key))
        if "attributes" in changes:
            changes["attributes"] = read_attributes(changes["attributes"])
        return dataclasses.replace(base, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the complete table for :meth:`from_dict`, without a preset and without None values.

        >>> Scenario.from_dict(Scenario().to_dict()) == Scenario()
        True
        """
        table: dict[str, Any] = {}
        for name in _PARTS:
            part = getattr(self, name)
            if part is not None:
                values = {info.name: getattr(part, info.name) for info in parameters(type(part))}
                table[name] = ({"name": part.name} if name in _REGISTRIES else {}) | _toml_values(values)
        return table | _toml_values({info.name: getattr(self, info.name) for info in parameters(Scenario)})


def _with_failures(
    rates: float | FloatArray,
    durations: FloatArray,
    status: AnyArray,
    seconds: FloatArray,
    clients: IntArray,
    seed: int,
    position: int,
) -> RoundEvents:
    """Let clients fail at a random moment of their ``seconds`` of work, unless their session ended even earlier."""
    if np.any(rates):
        failed = uniforms(seed, rng.FAILURE, clients, _WHETHER, position) < rates
        # Anywhere in the work: an early failure costs the round little time, a late one nearly all of it.
        moment = seconds * uniforms(seed, rng.FAILURE, clients, _WHEN, position)
        durations = np.where(failed, np.minimum(moment, durations), durations)
        status[failed] = Status.FAILED
    return RoundEvents(durations, status)


def preset(name: str) -> Scenario:
    """Return the scenario of a paper by name.

    >>> preset("fedacs-low").partition
    Skewness(clients=200, samples=2000, median=0.2, maximum=3.0)
    >>> preset("fedacs-lo")
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.UnknownNameError: There is no scenario 'fedacs-lo'. ...
      hint: did you mean 'fedacs-low'?
    """
    from fedcohort.scenario.presets import find_preset  # a preset has a Scenario, so it imports this module

    return find_preset(name).scenario


_PARTS: dict[str, type] = {
    "partition": Partition,
    "noise": LabelNoise,
    "shift": Shift,
    "latency": Latency,
    "availability": Availability,
    "devices": Devices,
    "drift": Drift,
}
_OPTIONAL = ("devices", "drift")
_UNNAMED = {
    "noise": "{level = 0.15}",
    "shift": '{views = ["rotate"], share = 0.2}',
    "drift": '{kind = "class", at = 20}',
}
_REGISTRIES: dict[str, Registry[Any]] = {
    "partition": PARTITIONS,
    "latency": LATENCIES,
    "availability": AVAILABILITIES,
    "devices": DEVICES,
}


def _toml_values(values: dict[str, Any]) -> dict[str, Any]:
    """Drop None and turn tuples into lists, for TOML and JSON."""

    def as_list(value: Any) -> Any:
        return [as_list(item) for item in value] if isinstance(value, tuple) else value

    return {key: as_list(value) for key, value in values.items() if value is not None}


def _part_from(kind: str, value: Any, base: Any) -> Any:
    """Return a part of a scenario: ``value`` itself, the part that it names, or ``base`` with other parameters."""
    if value is None or isinstance(value, _PARTS[kind]):
        return value
    named = kind in _REGISTRIES
    if not isinstance(value, Mapping) and not (named and isinstance(value, str)):
        allowed = "a name or a table" if named else f"a table such as {_UNNAMED[kind]}"
        raise ParameterError(f"The '{kind}' of a scenario must be {allowed}. Got {value!r}.")
    values = {"name": value} if isinstance(value, str) else dict(value)
    if kind == "drift" and base is None:
        base = Drift()
    if named:
        name = values.pop("name", "drawn" if base is None else base.name)
        # A name on its own means the part with its defaults, also where the preset has other parameters.
        if base is None or name != base.name or isinstance(value, str):
            return _REGISTRIES[kind].create(name, **values)
    known, title = [info.name for info in parameters(type(base))], f"{kind} {base.name!r}" if named else kind
    for key in values:
        if key not in known:
            raise ParameterError(
                f"The {title} has no parameter {key!r}. Known: {', '.join(known) or 'none'}.",
                hint=suggest(str(key), known),
            )
    return dataclasses.replace(base, **values)
