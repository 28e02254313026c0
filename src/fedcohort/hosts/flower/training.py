"""A cohort's training messages, made by the wrapped strategy, and the bounds for the replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedcohort.core.protocol import Status
from fedcohort.hosts.flower.replies import CheckedMessage, with_common_names
from fedcohort.hosts.flower.roster import Card
from fedcohort.hosts.flower.wrapped_strategy import WrappedStrategy
from fedcohort.hosts.weights import bounded_weights
from fedcohort.hosts.wire import CONFIRMATION, RECORD, SEED, WORK

LATE_GRACE_SECONDS = 60.0  # seconds, at least, between a train message's deadline and its end, for late answers


def train_messages(
    wrapped: WrappedStrategy,
    server_round: int,
    cards: Mapping[str, Card],
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
    *,
    seed: int,
    ask: Mapping[str, Any],
    work: Mapping[str, float],
    confirmations: Mapping[str, bytes],
) -> dict[str, Message]:
    """Return the strategy's own train messages for ``cards``, with fedcohort's additions for each client.

    Parameters
    ----------
    ask : mapping
        The :func:`~fedcohort.hosts.wire.question` for clients that answer.
    work : mapping of str to float
        By client, its amount of training as a multiple of the default.
    confirmations : mapping of str to bytes
        By client, the key holder's confirmation for it.
    """
    if not cards:
        return {}
    nodes = [card.node for card in cards.values()]
    messages = wrapped.configure_train(server_round, arrays, config, grid, nodes)
    # Equal contents share one object, which Flower then hashes and uploads only once.
    variants: dict[tuple[int, float | None, bool, bytes | None], tuple[RecordDict, RecordDict]] = {}
    by_name: dict[str, Message] = {}
    for name, card in cards.items():
        message = by_name[name] = messages[card.node]
        original, factor, confirmation = message.content, work.get(name), confirmations.get(name)
        variant = (id(original), factor, card.answers, confirmation)
        if variant not in variants:
            content = RecordDict(dict(original))
            before = content.config_records.get(wrapped.config_key, ConfigRecord())
            ours = {SEED: seed} if factor is None else {SEED: seed, WORK: float(factor)}
            # A copy, because the strategy may write into its config while this message is on its way.
            content[wrapped.config_key] = ConfigRecord({**before, **ours})
            if card.answers:
                confirmed = {} if confirmation is None else {CONFIRMATION: confirmation}
                content[RECORD] = ConfigRecord({**ask, **confirmed})
            # The original must stay alive, or its id could be used again.
            variants[variant] = (original, content)
        message.content = variants[variant][1]
    return by_name


def as_errors(replies: Iterable[CheckedMessage], sent: Mapping[str, Message]) -> list[Message]:
    """Return the replies without a valid model as errors, for strategies that count them.

    Parameters
    ----------
    sent : mapping of str to Message
        The message that each client got.
    """
    errors = []
    for reply in replies:
        if reply.message is not None and reply.message.has_error():
            errors.append(reply.message)
        elif reply.status is not Status.OK:
            # For the strategy, a reply that we refuse is an error of the app.
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reply.reason)
            errors.append(Message(error, reply_to=sent[reply.name]))
    return errors


def with_bounded_weights(
    replies: Iterable[CheckedMessage],
    wrapped: WrappedStrategy,
    sizes: Mapping[str, int | None],
    max_share: float | None,
) -> tuple[list[CheckedMessage], dict[str, list[str]]]:
    """Return checked replies with weights within their bounds, and the corrections by client.

    ``sizes`` are the numbers of samples that clients declared.
    """
    # First, because the weights of replies that are refused here must not influence the bounds.
    bounded = with_common_names(list(replies), wrapped.arrays_key)
    sent_weights = {reply.name: reply.weight for reply in bounded if reply.status is Status.OK}
    weights, lowered = bounded_weights(sent_weights, sizes, max_share)
    for i, reply in enumerate(bounded):
        if reply.name in lowered:
            bounded[i] = reply.with_weight(wrapped.weight_key, weights[reply.name])
    return bounded, {name: [why] for name, why in lowered.items()}
