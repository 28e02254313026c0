"""Wraps a Flower strategy: makes it address exactly the chosen nodes, and saves its memory.

Flower's strategies sample nodes inside ``configure_train`` and ``configure_evaluate`` with an unseeded generator, and
wait forever for nodes to appear. If a strategy gets a grid of exactly the chosen nodes, and its fraction is set to all
of them, it has nothing to sample and nothing to wait for. Everything else it does stays the same.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    Strategy,
)

from fedcohort.core.arrays import AnyArray
from fedcohort.core.errors import FedcohortError, ParameterError

log = logging.getLogger("flwr.fedcohort")
SAMPLING = ("fraction_train", "fraction_evaluate", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
# What a strategy sets again in every configure_train; saving it would only double the checkpoint.
_TRANSIENT = frozenset({"current_arrays", "current_bst", "registered_nodes", "_pending_events", *SAMPLING})


class InnerStrategyError(FedcohortError, RuntimeError):
    """The wrapped strategy does something that selection does not support."""


class WrappedStrategy:
    """A Flower strategy, with what fedcohort must know about it and about those that it wraps itself.

    Attributes
    ----------
    strategy : Strategy
    levels : list of Strategy
        The strategy and those that it wraps, in any attribute, outermost first.
    weight_key : str
        The metric in a reply that is its weight.
    config_key : str
        The name of the ConfigRecord in a message.
    arrays_key : str
        The name of the record of the model.
    adds_trees : bool
        Whether the model changes its shape from round to round, like an ensemble of trees.
    extrapolates : bool
        Whether it is one of Flower's optimisers at the server, which move a model beyond those of clients.
    """

    def __init__(self, strategy: object) -> None:
        if not isinstance(strategy, Strategy):
            what = strategy.__name__ if isinstance(strategy, type) else type(strategy).__name__
            legacy = "flwr.server.strategy" in getattr(strategy, "__module__", type(strategy).__module__)
            raise ParameterError(
                f"The 'strategy' parameter of CohortStrategy must be a strategy of flwr.serverapp.strategy. Got {what}"
                + (", a class: an instance is needed." if isinstance(strategy, type) else "."),
                hint="flwr.server.strategy is Flower's legacy API; the same names are in flwr.serverapp.strategy"
                if legacy
                else None,
            )
        self.strategy = strategy
        self.levels = [strategy]
        for level in self.levels:  # grows while it is read
            for value in vars(level).values():
                if isinstance(value, Strategy) and not any(value is other for other in self.levels):
                    self.levels.append(value)
            if type(level).start is not Strategy.start:
                raise InnerStrategyError(
                    f"The strategy {type(level).__name__} has a start() of its own, which CohortStrategy would never "
                    "call.",
                    hint="do it in aggregate_train, in evaluate_fn, or around the call of CohortStrategy.start",
                )
        weighs = next((level for level in self.levels if hasattr(level, "weighted_by_key")), None)
        self.weight_key = str(getattr(weighs, "weighted_by_key", "num-examples"))
        self.config_key = str(getattr(weighs, "configrecord_key", "config"))
        self.arrays_key = str(self._first("arrayrecord_key") or "arrays")
        self.adds_trees = any(isinstance(level, (FedXgbBagging, FedXgbCyclic)) for level in self.levels)
        self.extrapolates = any(isinstance(level, (FedAdagrad, FedAdam, FedAvgM, FedYogi)) for level in self.levels)

    def __str__(self) -> str:
        return type(self.strategy).__name__

    def _first(self, name: str) -> Any:
        """Return the outermost level's value of an attribute, or None if no level has one."""
        values = (getattr(level, name, None) for level in self.levels)
        return next((value for value in values if value is not None), None)

    def sample_size(self, phase: Literal["train", "evaluate"], online: int) -> int | None:
        """Return how many of ``online`` nodes the strategy would sample, or None if it does not say."""
        for level in self.levels:
            fraction = getattr(level, f"fraction_{phase}", None)
            if fraction is not None:
                least = int(getattr(level, f"min_{phase}_nodes", 1))
                return 0 if fraction == 0.0 else max(int(online * fraction), least)
        return None

    @property
    def min_clients(self) -> int:
        """How many nodes must be online before the strategy starts."""
        names = ("min_available_nodes", "min_train_nodes")
        wanted = [int(getattr(level, name, 1)) for level in self.levels for name in names]
        return max(1, self.private_size or 1, *wanted)

    @property
    def private_size(self) -> int | None:
        """The number of clients for which a privacy wrapper makes its noise, or None without such a wrapper.

        All of Flower's wrappers divide the noise by ``num_sampled_clients``, however many take part. In an average of
        fewer clients, the noise would be too small.
        """
        sizes = {int(x.num_sampled_clients) for x in self.levels if hasattr(x, "num_sampled_clients")}
        if len(sizes) > 1:
            raise ParameterError(
                f"The strategy holds privacy wrappers for different cohorts: num_sampled_clients is "
                f"{' and '.join(map(str, sorted(sizes)))}.",
                hint="give all of them the same num_sampled_clients",
            )
        return sizes.pop() if sizes else None

    @property
    def has_accountant(self) -> bool:
        """Whether the strategy has a privacy accountant, which demands equal weights."""
        return self._first("accountant") is not None

    def copy(self) -> WrappedStrategy:
        """Return a copy for trials, without privacy accountants."""
        # Flower's accountants cannot be copied, so the copy's memo maps them to None.
        accountants = [getattr(level, "accountant", None) for level in self.levels]
        memo: dict[int, Any] = {id(accountant): None for accountant in accountants if accountant is not None}
        return WrappedStrategy(copy.deepcopy(self.strategy, memo))

    def forget_round(self, server_round: int) -> None:
        """Let the strategy be configured again for a round that released nothing; privacy wrappers allow it once."""
        for level in self.levels:
            pending = getattr(level, "_pending_events", None)
            if isinstance(pending, dict):
                pending.pop(server_round, None)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, nodes: Sequence[int]
    ) -> dict[int, Message]:
        """Return the strategy's train messages by node, in the order of ``nodes``; there is exactly one for each."""
        with self._taking_all(len(nodes)):
            written = self.strategy.configure_train(server_round, arrays, config, GridView(grid, nodes))
            by_node = {message.metadata.dst_node_id: message for message in written}
        if by_node.keys() != set(nodes):
            reached = len(by_node.keys() & set(nodes))
            raise InnerStrategyError(
                f"The strategy {self} was offered {len(nodes)} chosen nodes and wrote to {reached} of them and "
                f"{len(by_node) - reached} others.",
                hint="a strategy that picks nodes by itself can only be wrapped with Policy(size=1)",
            )
        return {node: by_node[node] for node in nodes}

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, nodes: Sequence[int]
    ) -> dict[int, Message]:
        """Return the strategy's evaluation messages by node, which may be fewer than ``nodes``."""
        with self._taking_all(len(nodes)):
            written = self.strategy.configure_evaluate(server_round, arrays, config, GridView(grid, nodes))
            return {message.metadata.dst_node_id: message for message in written}

    def step_from(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> None:
        """Let the strategy compute its next step from ``arrays``: some use the model that they configured last."""
        with self._taking_all(1):
            list(self.strategy.configure_train(server_round, arrays, config, GridView(grid, [1])))

    # Flower's strategies have no other way to say which nodes to write to.
    @contextlib.contextmanager
    def _taking_all(self, count: int) -> Iterator[None]:
        """Make every level take all of ``count`` nodes; a fraction of 0 stays 0."""
        saved = [(x, name, getattr(x, name)) for x in self.levels for name in SAMPLING if hasattr(x, name)]
        try:
            for level, name, value in saved:
                if name.startswith("min_"):
                    setattr(level, name, count)
                elif value != 0.0:  # 0 means no evaluation
                    setattr(level, name, 1.0)
            yield
        finally:
            for level, name, value in saved:
                setattr(level, name, value)


class GridView(Grid):
    """A grid on which only some nodes are online."""

    # Flower has no public names for the types of a run and of a node's information.

    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        self._grid = grid
        self._nodes = list(nodes)

    def set_run(self, run: Any) -> None:
        """Set the run of the underlying grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run of the underlying grid."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message with the underlying grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of this view."""
        return list(self._nodes)

    def get_nodes(self) -> Iterable[Any]:
        """Return the information about the nodes of this view."""
        chosen = set(self._nodes)
        return [node for node in self._grid.get_nodes() if node.node_id in chosen]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages through the underlying grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull messages through the underlying grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send and receive messages through the underlying grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)


# -- the memory of a strategy -----------------------------------------------------------------------------------------


def _arrays_in(value: Any) -> tuple[str, dict[str, AnyArray]] | None:
    """Return the kind of an attribute that holds arrays, and these by key; None for anything else."""
    match value:
        case np.ndarray():
            return "array", {"": value}
        case ArrayRecord():
            return "record", {key: array.numpy() for key, array in value.items()}
        case dict() if all(isinstance(key, str) for key in value):
            kind, parts = "dict", value
        case list() | tuple():
            kind, parts = "list", {str(i): part for i, part in enumerate(value)}
        case _:
            return None
    # Not only arrays: from those without dimensions, such as a counter's moments, NumPy computes scalars.
    if not parts or not all(isinstance(part, (np.ndarray, np.generic)) for part in parts.values()):
        return None
    return kind, {key: np.asarray(part) for key, part in parts.items()}


def _has_own_state(value: Any) -> bool:
    """Whether an object can be saved and restored like torch's optimisers, such as a privacy accountant."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class StrategyState:
    """The attributes of a strategy that change from round to round, saved and restored with the model.

    An attribute is saved if it differs from what the constructor set and holds a number, a string, None, an array, a
    list or dict of arrays, or an ArrayRecord (the moments of FedAdam, FedYogi and FedAdagrad, the momentum of FedAvgM,
    the clipping norm of adaptive DP). Objects with ``state_dict`` and ``load_state_dict`` (privacy accountants) are
    saved too. For any other attribute that changes, there is one warning.
    """

    def __init__(self, wrapped: WrappedStrategy) -> None:
        self._levels = wrapped.levels
        self._fresh = [dict(vars(level)) for level in self._levels]
        self._warned: set[str] = set()

    def save(self) -> tuple[dict[str, Any], dict[str, AnyArray]]:
        """Return the changed attributes: values for JSON, and arrays under flat keys."""
        plain: dict[str, Any] = {}
        arrays: dict[str, AnyArray] = {}
        for i, (level, fresh) in enumerate(zip(self._levels, self._fresh, strict=True)):
            for name, value in vars(level).items():
                if name in _TRANSIENT or isinstance(value, Strategy) or callable(value):
                    continue
                path = f"{i}.{name}"
                # Strategies replace values by new objects, except those with their own state, which change inside.
                if _has_own_state(value):
                    plain[path] = {"kind": "state", "value": value.state_dict()}
                elif value is fresh.get(name):
                    continue
                elif (found := _arrays_in(value)) is not None:
                    kind, parts = found
                    plain[path] = {"kind": kind, "keys": list(parts)}
                    arrays.update({f"{path}/{key}": array for key, array in parts.items()})
                elif value is None or isinstance(value, (bool, int, float, str)):
                    plain[path] = {"kind": "plain", "value": value}
                elif isinstance(value, np.generic):
                    plain[path] = {"kind": "plain", "value": value.item()}
                elif path not in self._warned:
                    self._warned.add(path)
                    log.warning(
                        "attribute %r of %s changed, but a %s cannot be saved: a restart begins with its first value",
                        name, type(level).__name__, type(value).__name__,
                    )  # fmt: skip
        return plain, arrays

    def restore(self, plain: dict[str, Any], arrays: dict[str, AnyArray]) -> None:
        """Restore saved attributes of the strategy."""
        for path, entry in plain.items():
            index, _, name = path.partition(".")
            if int(index) >= len(self._levels):
                raise InnerStrategyError(
                    f"The checkpoint was written by {int(index) + 1} or more strategies around each other; now there "
                    f"are {len(self._levels)}.",
                    hint="continue with the strategy the journal was started with, or start a new journal",
                )
            level = self._levels[int(index)]
            parts = {key: arrays[f"{path}/{key}"] for key in entry.get("keys", ())}
            match entry["kind"]:
                case "plain":
                    setattr(level, name, entry["value"])
                case "state":
                    getattr(level, name).load_state_dict(entry["value"])
                case "array":
                    setattr(level, name, parts[""])
                case "record":
                    setattr(level, name, ArrayRecord({key: Array(array) for key, array in parts.items()}))
                case kind:
                    setattr(level, name, parts if kind == "dict" else list(parts.values()))
