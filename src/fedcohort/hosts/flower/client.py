"""The client side: answers to what a selector may ask.

Two lines at the end of an existing ClientApp::

    from fedcohort.hosts.flower.client import cohort_client, torch_answers
    app = cohort_client(app, torch_answers(model=make_model, data=load_data))

``make_model(context)`` returns a torch module, ``load_data(context)`` the client's training data as (inputs, labels).
Without torch, or with a loss of one's own, :class:`Answers` takes the functions one by one. A server that does not use
fedcohort sees no difference.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client.mod import LocalDpMod as LegacyLocalDpMod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import FedcohortError, InputError, ParameterError
from fedcohort.core.signals import LOSS_SIGNALS, Signal
from fedcohort.core.validate import instance
from fedcohort.hosts.answers import Answers as AnyAnswers
from fedcohort.hosts.answers import Facts, TorchMeasures
from fedcohort.hosts.flower.wire import DESCRIBE, LOSSES, only_arrays, report_record
from fedcohort.hosts.wire import (
    COMMITMENT,
    CONFIRMATION,
    GRADIENT_SIGNALS,
    RECORD,
    Attribute,
    asked_signals,
    normal_form,
    plain,
)
from fedcohort.privacy.scheme import LabelSeal

log = logging.getLogger("flwr.fedcohort")

if TYPE_CHECKING:
    import torch

    from fedcohort.hosts.flower.private import Private
    from fedcohort.training.local import LocalTraining


def client_name(context: Context) -> str:
    """Return the client's stable name from its node config, or an empty string.

    ``client-name`` comes first (``--node-config 'client-name="hospital-north"'``), then ``partition-id`` as
    ``partition-3``. Without either the server falls back to the name the node was registered under, and at last to the
    node id, which changes with every start of the SuperNode.
    """
    config = context.node_config
    if "client-name" in config:
        return str(config["client-name"])
    if "partition-id" in config:
        return f"partition-{config['partition-id']}"
    return ""


@dataclass(frozen=True)
class Answers(AnyAnswers):
    """What a client can tell a selector. Every function is given the Context of the ClientApp.

    Parameters
    ----------
    facts : callable, optional
        ``facts(context)`` returns :class:`Facts`.
    losses : callable, optional
        ``losses(arrays, context, received)`` returns losses of the model ``arrays`` on the client's data, by name
        (those of ``signals``). ``received`` is the model the round started with: pseudo-labels come from it. It is the
        same as ``arrays`` except after training.
    signals : set of Signal
        Which losses that function returns.
    gradient : callable, optional
        ``gradient(arrays, context)`` returns the (d,) full-batch gradient of the mean training loss.
    name : callable
        ``name(context)`` returns the stable name; see :func:`client_name`.
    noised : bool
        Whether labels and losses carry noise of their own, as those of ``torch_answers(private=...)`` do. Beside
        Flower's ``LocalDpMod`` nothing else may leave the client.
    confirm : callable, optional
        ``confirm(context, confirmation)`` checks what the key holder says it opened of this client's sealed labels
        and returns the digest of the set of clients (``LabelSeal.confirm``). When it raises, the client does not train.
    """

    name: Callable[[Context], str] = client_name
    noised: bool = False
    confirm: Callable[[Context, bytes], str] | None = None


def cohort_client(app: ClientApp, answers: Answers | None = None) -> ClientApp:
    """Return ``app`` with the answers a selector may ask for.

    Parameters
    ----------
    app : ClientApp
        Any ClientApp, with its functions and mods; it is not changed. One with Flower's ``LocalDpMod`` may tell nothing
        about its data that has no noise: no losses, no gradients, no labels, unless they are ``noised``.
    answers : Answers, optional
        What the client can tell. Default: its name only.
    """
    instance(app, ClientApp, "'app'")
    answers = Answers() if answers is None else instance(answers, Answers, "'answers'")
    bare = _adds_local_noise(app) and not answers.noised
    if bare and (answers.losses is not None or answers.gradient is not None):
        given = [name for name in ("losses", "gradient") if getattr(answers, name) is not None]
        raise _useless_noise(" and ".join(given), f"leave {' and '.join(map(repr, given))} out of the Answers")
    return _CohortClient(app, answers, bare)


def _useless_noise(what: str, instead: str) -> ParameterError:
    return ParameterError(
        f"The ClientApp has a LocalDpMod, whose noise would be useless: exact {what} of the data would leave the "
        "client along with the noisy model.",
        hint=f"{instead}, or add noise to them: torch_answers(..., private=Private(...))",
    )


def _adds_local_noise(app: ClientApp) -> bool:
    """Whether a ClientApp, or one of its functions, has a mod for local differential privacy."""
    found: list[Any] = [*getattr(app, "_registered_funcs", {}).values(), *getattr(app, "_mods", [])]
    seen = 0
    while seen < len(found):  # mods are closures around each other
        thing = found[seen]
        seen += 1
        if isinstance(thing, (LocalDpMod, LegacyLocalDpMod)):
            return True
        inside = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
        found += [each for part in inside for each in (part if isinstance(part, list) else [part]) if callable(each)]
    return False


class _CohortClient(ClientApp):
    """A ClientApp that answers fedcohort's questions itself and hands everything else on."""

    def __init__(self, app: ClientApp, answers: Answers, bare: bool) -> None:
        super().__init__()
        self._app = app
        self._answers = answers
        self._bare = bare  # beside a mod for local differential privacy, without noise of their own

    def __call__(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        if kind == DESCRIBE:
            return self._describe(message, context)
        if kind == LOSSES:
            return self._losses(message, context)
        if kind.split(".")[0] == MessageType.TRAIN and RECORD in message.content:
            return self._train(message, context)
        return self._app(message, context)

    def _describe(self, message: Message, context: Context) -> Message:
        facts = Facts() if self._answers.facts is None else self._answers.facts(context)
        if self._bare and (facts.label_counts is not None or facts.sealed_labels is not None):
            # Sealed ones too: the key holder learns exact products of the counts.
            raise _useless_noise("label counts", "leave the labels out of the Facts")
        description = self._answers.description(self._answers.name(context), facts)
        return Message(RecordDict({RECORD: ConfigRecord(description.to_record())}), reply_to=message)

    def _losses(self, message: Message, context: Context) -> Message:
        arrays = only_arrays(message.content)
        if arrays is None:
            raise InputError("A question for losses must carry exactly one model.")
        wanted = asked_signals(cast(ConfigRecord, message.content[RECORD]))
        values = self._answers.measure(wanted & LOSS_SIGNALS, arrays, context, arrays)
        return Message(RecordDict({RECORD: report_record(self._answers.name(context), values)}), reply_to=message)

    def _train(self, message: Message, context: Context) -> Message:
        question = cast(ConfigRecord, message.content[RECORD])
        wanted = asked_signals(question)
        if COMMITMENT in question:  # kept, it shows later whether the server's journal is the one it was
            log.info("the server is committed to %s", question[COMMITMENT])
        if self._answers.confirm is not None:
            self._confirm(self._answers.confirm, question.get(CONFIRMATION), context)
        received = only_arrays(message.content)
        # Mods of Flower's own refuse a message with a second ConfigRecord, and the app has no use for it.
        message.content = RecordDict({k: v for k, v in message.content.items() if k != RECORD})
        values: dict[Signal, float] = {}
        gradient = None
        if received is not None:
            values.update(self._answers.measure(wanted & LOSS_SIGNALS, received, context, received))
            if wanted & GRADIENT_SIGNALS and self._answers.gradient is not None:
                gradient = plain(self._answers.gradient(received, context))
        # Measured around the app alone: what we ask beside training must not make a client look slow.
        begun = time.monotonic()
        reply = self._app(message, context)
        seconds = time.monotonic() - begun
        if reply.has_content():
            trained = only_arrays(reply.content)
            if trained is not None and received is not None:
                values.update(self._answers.measure_trained(wanted, trained, context, received))
            reply.content[RECORD] = report_record(self._answers.name(context), values, seconds, gradient)
        return reply

    def _confirm(self, confirm: Callable[[Context, bytes], str], word: object, context: Context) -> None:
        if not isinstance(word, bytes):
            log.warning("the server shows no confirmation from the key holder, so it is not known what was opened")
            return
        try:
            digest = confirm(context, word)
        except FedcohortError as error:
            log.error("this client does not train: %s", error)
            raise
        log.info("the key holder opened this client's labels as sealed, in the set of clients %s", digest)


class LabelSealer(Protocol):
    """How label counts leave a client; :class:`~fedcohort.privacy.LabelSeal` also checks what became of them."""

    def seal(self, client: str, counts: Any) -> bytes:
        """Return a client's label counts as they may travel."""


def torch_answers(
    model: Callable[[Context], torch.nn.Module],
    data: Callable[[Context], tuple[Any, Any]],
    *,
    classes: int | None = None,
    validation: Callable[[Context], tuple[Any, Any]] | None = None,
    robust: LocalTraining | None = None,
    share_labels: bool = True,
    seal: LabelSealer | None = None,
    private: Private | None = None,
    attributes: Callable[[Context], Mapping[str, Attribute]] | None = None,
    batch_size: int = 1024,
    name: Callable[[Context], str] = client_name,
) -> Answers:
    """Return answers for a torch classifier: size, label counts, cross-entropy losses and the full-batch gradient.

    Parameters
    ----------
    model : callable
        ``model(context)`` returns a module whose ``state_dict`` fits the arrays of the federation.
    data : callable
        ``data(context)`` returns the client's training inputs and integer labels, or a DataLoader of them, or several
        DataLoaders of which the first is for training, as the ``load_data`` of Flower's quickstart does. Batches are
        pairs, or tables with a column of labels (``label``, ``labels``, ``target`` or ``y``).
    classes : int, optional
        Number of classes, for the label counts. Without it no label counts are reported.
    validation : callable, optional
        ``validation(context)`` returns held-out inputs and labels of the client.
    robust : LocalTraining, optional
        Weights of FLASH's noise-robust loss; with it robust and pseudo-label losses can be reported.
    share_labels : bool
        Whether label counts may leave the client in the clear.
    seal : LabelSeal or SecretRotation, optional
        Its ``seal(name, counts)`` returns label counts as they may leave the client instead. With a ``LabelSeal`` the
        client also checks what the key holder made of them before it trains.
    private : Private, optional
        Noise on label counts and losses and the ledger that books them; gradients are then not reported.
    attributes : callable, optional
        ``attributes(context)`` returns what else an operator's rules go by: ``{"battery": 80, "region": "north"}``.
    batch_size : int
        How many samples are evaluated at once.
    name : callable
        ``name(context)`` returns the stable name.
    """
    if seal is not None and not hasattr(seal, "seal"):
        raise ParameterError(f"'seal' must be a LabelSeal or a SecretRotation of fedcohort.privacy. Got {seal!r}.")

    client = _TorchClient(
        model, data, classes, validation, robust, share_labels, seal, private, attributes, batch_size, name
    )
    if private is not None:
        # No gradient: the ledger books counts and losses, and nothing else may leave.
        tells = client.noisy_losses if private.losses is not None else None
        return Answers(facts=client.facts, losses=tells, signals=frozenset({Signal.LOSS}), name=name, noised=True)
    return Answers(
        facts=client.facts,
        losses=client.losses,
        signals=TorchMeasures.signals(validation is not None, robust is not None),
        gradient=client.gradient,
        name=name,
        confirm=client.confirm if isinstance(seal, LabelSeal) and classes is not None else None,
    )


@dataclass(frozen=True)
class _TorchClient:
    """The answers of :func:`torch_answers`, whose parameters these are."""

    model: Callable[[Context], torch.nn.Module]
    data: Callable[[Context], tuple[Any, Any]]
    classes: int | None
    validation: Callable[[Context], tuple[Any, Any]] | None
    robust: LocalTraining | None
    share_labels: bool
    seal: LabelSealer | None
    private: Private | None
    attributes: Callable[[Context], Mapping[str, Attribute]] | None
    batch_size: int
    name: Callable[[Context], str]

    def _measures(self, context: Context) -> TorchMeasures:
        return TorchMeasures(
            partial(self.model, context),
            partial(self.data, context),
            validation=None if self.validation is None else partial(self.validation, context),
            robust=self.robust,
            batch_size=self.batch_size,
        )

    def facts(self, context: Context) -> Facts:
        """Return size, attributes and label counts: noisy, sealed or in the clear."""
        labels = self._measures(context).labels()
        known = Facts(size=len(labels), attributes={} if self.attributes is None else self.attributes(context))
        if self.classes is None:
            return known
        counts = np.bincount(labels, minlength=self.classes)
        if self.private is not None:
            sealed = self.private.seal(context, normal_form(self.name(context)), counts)
            return replace(known, sealed_labels=sealed)
        if self.seal is not None:
            return replace(known, sealed_labels=self.seal.seal(normal_form(self.name(context)), counts))
        return replace(known, label_counts=counts if self.share_labels else None)

    def confirm(self, context: Context, confirmation: bytes) -> str:
        """Compare what the key holder opened with the counts as they are."""
        assert isinstance(self.seal, LabelSeal)
        counts = np.bincount(self._measures(context).labels(), minlength=self.classes or 0)
        return self.seal.confirm(self.name(context), counts, confirmation)

    def losses(self, arrays: ArrayRecord, context: Context, received: ArrayRecord) -> dict[str, float]:
        """Return every loss that can be measured."""
        state = arrays.to_torch_state_dict()
        teacher = state if received is arrays else received.to_torch_state_dict()
        return self._measures(context).losses(state, teacher)

    def noisy_losses(self, arrays: ArrayRecord, context: Context, received: ArrayRecord) -> dict[str, float]:
        """Return one loss, so that one answer is one release."""
        assert self.private is not None
        by_label = self._measures(context).by_label(arrays.to_torch_state_dict())
        return {Signal.LOSS.value: self.private.loss(context, by_label) if len(by_label) else float("nan")}

    def gradient(self, arrays: ArrayRecord, context: Context) -> FloatArray:
        """Return the full-batch gradient."""
        return self._measures(context).gradient(arrays.to_torch_state_dict())
