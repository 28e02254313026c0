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
from flwr.app import Array, ArrayRecord, Message, RecordDict
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
from fedcohort.hosts.round import Policy

log = logging.getLogger("flwr.fedcohort")
Phase = Literal["train", "evaluate"]
SAMPLING = ("fraction_train", "fraction_evaluate", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
# What a strategy sets again in every configure_train; saving it would only double the checkpoint.
_TRANSIENT = frozenset({"current_arrays", "current_bst", "registered_nodes", "_pending_events", *SAMPLING})


class InnerStrategyError(FedcohortError, RuntimeError):
    """The wrapped strategy does something that selection does not support."""


def levels(strategy: Strategy) -> list[Strategy]:
    """Return a strategy and those that it wraps, in any attribute, outermost first."""
    strategies = [strategy]
    for level in strategies:
        for value in vars(level).values():
            if isinstance(value, Strategy) and not any(value is other for other in strategies):
                strategies.append(value)
    return strategies


def sample_size(strategies: Iterable[Strategy], phase: Phase, online: int) -> int | None:
    """Return how many of ``online`` nodes the levels of a strategy would sample, or None if they do not say."""
    for level in strategies:
        fraction = getattr(level, f"fraction_{phase}", None)
        if fraction is not None:
            return 0 if fraction == 0.0 else max(int(online * fraction), int(getattr(level, f"min_{phase}_nodes", 1)))
    return None


def min_clients(strategy: Strategy) -> int:
    """Return how many nodes must be online before the strategy starts."""
    least = 1
    for level in levels(strategy):
        for name in ("min_available_nodes", "min_train_nodes"):
            least = max(least, int(getattr(level, name, 1)))
    return max(least, private_cohort_size(strategy) or 1)


def private_cohort_size(strategy: Strategy) -> int | None:
    """Return the number of clients for which a privacy wrapper makes its noise, or None without such a wrapper.

    All of Flower's wrappers divide the noise by ``num_sampled_clients``, however many take part. In an average of fewer
    clients, the noise would be too small.
    """
    sizes = {int(level.num_sampled_clients) for level in levels(strategy) if hasattr(level, "num_sampled_clients")}
    if len(sizes) > 1:
        raise ParameterError(
            f"The strategy holds privacy wrappers for different cohorts: num_sampled_clients is "
            f"{' and '.join(map(str, sorted(sizes)))}.",
            hint="give all of them the same num_sampled_clients",
        )
    return sizes.pop() if sizes else None


def has_accountant(strategy: Strategy) -> bool:
    """Whether the strategy has a privacy accountant, which demands equal weights."""
    return any(getattr(level, "accountant", None) is not None for level in levels(strategy))


def strategy_copy(strategy: Strategy) -> Strategy:
    """Return a copy of a strategy for trials, without its privacy accountants."""
    accountants = [getattr(level, "accountant", None) for level in levels(strategy)]
    # Flower's accountants cannot be copied, so the copy's memo maps them to None.
    return copy.deepcopy(strategy, {id(accountant): None for accountant in accountants if accountant is not None})


def forget_round(strategy: Strategy, server_round: int) -> None:
    """Let a strategy be configured again for a round that released nothing, which privacy wrappers allow only once."""
    for level in levels(strategy):
        pending = getattr(level, "_pending_events", None)
        if isinstance(pending, dict):
            pending.pop(server_round, None)


def check_strategy(strategy: object) -> Strategy:
    """Refuse a strategy that cannot be wrapped: one of another API, or one with its own ``start``."""
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
    for level in levels(strategy):
        if type(level).start is not Strategy.start and type(level).__name__ != "CohortStrategy":
            raise InnerStrategyError(
                f"The strategy {type(level).__name__} has a start() of its own, which CohortStrategy would never call.",
                hint="do it in aggregate_train, in evaluate_fn, or around the call of CohortStrategy.start",
            )
    return strategy


def check_private(strategy: Strategy, policy: Policy, everybody_kept: bool) -> Any:
    """Return the size of a policy, which under differential privacy is what the noise is calibrated for."""
    size = private_cohort_size(strategy)
    if size is None:
        return policy.size
    if policy.size not in (None, size):
        raise ParameterError(
            f"The size of the policy must be {size}: the privacy wrapper makes its noise for "
            f"num_sampled_clients={size}. Got {policy.size}.",
            hint="leave it out, or give the wrapper the same number",
        )
    if policy.spares:
        raise ParameterError(
            f"There must be no spares under differential privacy: exactly {size} clients train. Got {policy.spares}.",
            hint="a client that fails is replaced in the next try of the round",
        )
    if not everybody_kept:
        raise ParameterError(
            f"A filter cannot be used under differential privacy: it leaves models out, and the noise is "
            f"calibrated for {size} of them.",
            hint="pass filter='keep-all'",
        )
    return size


def keys(strategy: Strategy) -> tuple[str, str]:
    """Return the strategy's keys for the weight in a reply's metrics and for the ConfigRecord in a message."""
    for level in levels(strategy):
        if hasattr(level, "weighted_by_key"):
            return str(level.weighted_by_key), str(getattr(level, "configrecord_key", "config"))
    return "num-examples", "config"


def record_names(strategy: Strategy) -> tuple[str, str]:
    """Return the strategy's name for the record of the model, and the usual name for the record of metrics."""
    names = (str(level.arrayrecord_key) for level in levels(strategy) if hasattr(level, "arrayrecord_key"))
    return next(names, "arrays"), "metrics"


def changes_shape(strategy: Strategy) -> bool:
    """Whether the model changes its shape from round to round, like an ensemble of trees."""
    return any(isinstance(level, (FedXgbBagging, FedXgbCyclic)) for level in levels(strategy))


def extrapolates(strategy: Strategy) -> bool:
    """Whether the strategy is one of Flower's optimisers at the server, which move a model beyond those of clients."""
    return any(isinstance(level, (FedAdagrad, FedAdam, FedAvgM, FedYogi)) for level in levels(strategy))


@contextlib.contextmanager
def taking_all(strategy: Strategy, count: int) -> Iterator[None]:
    """Make every level of a strategy take all of ``count`` nodes; a fraction of 0 stays 0."""
    saved: list[tuple[Strategy, str, Any]] = []
    try:
        for level in levels(strategy):
            for name in SAMPLING:
                if not hasattr(level, name):
                    continue
                value = getattr(level, name)
                saved.append((level, name, value))
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


def messages_by_node(strategy: Strategy, messages: Iterable[Message], nodes: Sequence[int]) -> dict[int, Message]:
    """Return a strategy's messages by node, in the order of ``nodes``; there must be exactly one for each."""
    by_node = {message.metadata.dst_node_id: message for message in messages}
    if by_node.keys() != set(nodes):
        raise InnerStrategyError(
            f"The strategy {type(strategy).__name__} was offered {len(nodes)} chosen nodes and wrote to "
            f"{len(set(by_node) & set(nodes))} of them and {len(set(by_node) - set(nodes))} others.",
            hint="a strategy that picks nodes by itself can only be wrapped with Policy(size=1)",
        )
    return {node: by_node[node] for node in nodes}


# -- the memory of a strategy -----------------------------------------------------------------------------------------


def _arrays_of(value: Any) -> dict[str, AnyArray] | None:
    """Return the arrays in an attribute by key, or None if it is something else."""
    match value:
        case np.ndarray():
            return {"": value}
        case ArrayRecord():
            return {key: array.numpy() for key, array in value.items()}
        case dict() if all(isinstance(key, str) for key in value):
            parts = value
        case list() | tuple():
            parts = {str(i): part for i, part in enumerate(value)}
        case _:
            return None
    # Not only arrays: from those without dimensions, such as a counter's moments, NumPy computes scalars.
    if not parts or not all(isinstance(part, (np.ndarray, np.generic)) for part in parts.values()):
        return None
    return {key: np.asarray(part) for key, part in parts.items()}


def _has_own_state(value: Any) -> bool:
    """Whether an object can be saved and restored like torch's optimisers, such as a privacy accountant."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _rebuild(kind: str, arrays: dict[str, AnyArray]) -> Any:
    match kind:
        case "array":
            return arrays[""]
        case "record":
            return ArrayRecord({key: Array(array) for key, array in arrays.items()})
        case "dict":
            return dict(arrays)
        case _:
            return list(arrays.values())


def _kind_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "array"
    if isinstance(value, ArrayRecord):
        return "record"
    return "dict" if isinstance(value, dict) else "list"


class StrategyState:
    """The attributes of a strategy that change from round to round, saved and restored with the model.

    An attribute is saved if it differs from what the constructor set and holds a number, a string, None, an array, a
    list or dict of arrays, or an ArrayRecord (the moments of FedAdam, FedYogi and FedAdagrad, the momentum of FedAvgM,
    the clipping norm of adaptive DP). Objects with ``state_dict`` and ``load_state_dict`` (privacy accountants) are
    saved too. For any other attribute that changes, there is one warning.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._levels = levels(strategy)
        self._fresh = [dict(vars(level)) for level in self._levels]
        self._warned: set[str] = set()

    def save(self) -> tuple[dict[str, Any], dict[str, AnyArray]]:
        """Return the changed attributes: values for JSON, and arrays under flat keys."""
        plain: dict[str, Any] = {}
        arrays: dict[str, AnyArray] = {}
        for path, level, name, value in self._changed_attributes():
            parts = _arrays_of(value)
            if _has_own_state(value):
                plain[path] = {"kind": "state", "value": value.state_dict()}
            elif parts is not None:
                plain[path] = {"kind": _kind_of(value), "keys": list(parts)}
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

    def _changed_attributes(self) -> Iterator[tuple[str, Strategy, str, Any]]:
        """Yield path, level, name and value of each attribute that may differ from what the constructor set."""
        for i, (level, fresh) in enumerate(zip(self._levels, self._fresh, strict=True)):
            for name, value in vars(level).items():
                if name in _TRANSIENT or isinstance(value, Strategy) or callable(value):
                    continue
                # Strategies replace values by new objects, except those with their own state, which change inside.
                if _has_own_state(value) or value is not fresh.get(name):
                    yield f"{i}.{name}", level, name, value

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
            match entry["kind"]:
                case "plain":
                    setattr(level, name, entry["value"])
                case "state":
                    getattr(level, name).load_state_dict(entry["value"])
                case kind:
                    setattr(level, name, _rebuild(kind, {key: arrays[f"{path}/{key}"] for key in entry["keys"]}))
