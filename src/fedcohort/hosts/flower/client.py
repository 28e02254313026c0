"""The client's side: answers to the questions of selectors.

Add two lines at the end of an existing ClientApp::

    from fedcohort.hosts.flower.client import cohort_client, torch_answers
    app = cohort_client(app, torch_answers(model=make_model, data=load_data))

``make_model(context)`` returns a torch module, ``load_data(context)`` the client's training data as (inputs, labels).
Without torch, or with your own loss, pass the functions to :class:`Answers` one by one. For a server without fedcohort,
nothing changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.core.errors import FedcohortError, InputError, ParameterError
from fedcohort.core.signals import Signal
from fedcohort.core.validate import instance
from fedcohort.hosts.answers import Answers as AnyAnswers
from fedcohort.hosts.answers import Facts, Measurement, TorchMeasures
from fedcohort.hosts.flower.wire import DESCRIBE, LOSSES
from fedcohort.hosts.wire import (
    COMMITMENT,
    CONFIRMATION,
    RECORD,
    Attribute,
    asked_signals,
    normal_form,
    report,
)
from fedcohort.privacy.scheme import LabelSeal

log = logging.getLogger("flwr.fedcohort")

if TYPE_CHECKING:
    import torch

    from fedcohort.hosts.flower.private import Private
    from fedcohort.training.local import LocalTraining


def client_name(context: Context) -> str:
    """Return the client's stable name from its node config, or an empty string.

    This is ``client-name`` (``--node-config 'client-name="hospital-north"'``), or else ``partition-id``, as
    ``partition-3``. Without either, the server uses the name that the node was registered under, or else the node id,
    which changes with every start of the SuperNode.
    """
    config = context.node_config
    if "client-name" in config:
        return str(config["client-name"])
    if "partition-id" in config:
        return f"partition-{config['partition-id']}"
    return ""


@dataclass(frozen=True)
class Answers(AnyAnswers):
    """What a client can tell a selector. Every function gets the Context of the ClientApp.

    Parameters
    ----------
    facts : callable, optional
        ``facts(context)`` returns :class:`Facts`.
    losses : callable, optional
        ``losses(arrays, context, received)`` returns the losses of the model ``arrays`` on the client's data, by the
        names of ``signals``. ``received`` is the model that the round started with; pseudo-labels come from it. It is
        the same as ``arrays`` except after training.
    signals : set of Signal
        The losses that this function returns: those of fedcohort, or your own signals with ``how=LossOf(...)``.
    gradient : callable, optional
        ``gradient(arrays, context)`` returns the (d,) full-batch gradient of the mean training loss.
    reports : mapping of Signal or str to callable
        By signal, a function that is called after training, with the same arguments as ``losses``, and returns a
        number (or a vector, if the signal has a width). It is for signals of your own that only the client knows.
    name : callable
        ``name(context)`` returns the stable name; see :func:`client_name`.
    noised : bool
        Whether labels, losses and reports already have noise, like those of ``torch_answers(private=...)``. With
        Flower's ``LocalDpMod``, nothing without noise may leave the client.
    confirm : callable, optional
        ``confirm(context, confirmation)`` checks what the key holder says it opened of this client's sealed labels
        and returns the digest of the set of clients (``LabelSeal.confirm``). If it raises an error, the client does not
        train.
    """

    name: Callable[[Context], str] = client_name
    noised: bool = False
    confirm: Callable[[Context, bytes], str] | None = None


def cohort_client(app: ClientApp, answers: Answers | None = None) -> ClientApp:
    """Return ``app`` with answers to the questions of selectors.

    Parameters
    ----------
    app : ClientApp
        Any ClientApp, with its functions and mods; it is not changed. If it has Flower's ``LocalDpMod``, losses,
        gradients, reports and labels must be ``noised``.
    answers : Answers, optional
        What the client can tell. Default: only its name.
    """
    instance(app, ClientApp, "'app'")
    answers = Answers() if answers is None else instance(answers, Answers, "'answers'")
    bare = _adds_local_noise(app) and not answers.noised
    exact = [name for name in ("losses", "gradient") if getattr(answers, name) is not None]
    exact += ["reports"] if answers.reports else []
    if bare and exact:
        raise _useless_noise(" and ".join(exact), f"leave {' and '.join(map(repr, exact))} out of the Answers")
    return _CohortClient(app, answers, bare)


def _useless_noise(what: str, instead: str) -> ParameterError:
    return ParameterError(
        f"The ClientApp has a LocalDpMod, whose noise would be useless: exact {what} of the data would leave the "
        "client along with the noisy model.",
        hint=f"{instead}, or add noise to them: torch_answers(..., private=Private(...))",
    )


def _adds_local_noise(app: ClientApp) -> bool:
    """Whether a ClientApp, or one of its functions, has a mod for local differential privacy."""
    functions: list[Any] = [*getattr(app, "_registered_funcs", {}).values(), *getattr(app, "_mods", [])]
    for function in functions:  # the list grows, because mods are closures around each other
        # By name: Flower has had two classes of this name, and moves its legacy one from release to release.
        if any(kind.__name__ == "LocalDpMod" for kind in type(function).__mro__):
            return True
        inside = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        functions += [f for part in inside for f in (part if isinstance(part, list) else [part]) if callable(f)]
    return False


class _CohortClient(ClientApp):
    """A ClientApp that answers fedcohort's questions itself and passes everything else on."""

    def __init__(self, app: ClientApp, answers: Answers, bare: bool) -> None:
        super().__init__()
        self._app = app
        self._answers = answers
        self._bare = bare  # whether exact answers would make the noise of a LocalDpMod useless

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
            # Sealed counts too, because the key holder learns exact products of them.
            raise _useless_noise("label counts", "leave the labels out of the Facts")
        description = self._answers.description(self._answers.name(context), facts)
        return Message(RecordDict({RECORD: ConfigRecord(description.to_record())}), reply_to=message)

    def _losses(self, message: Message, context: Context) -> Message:
        arrays = _only_arrays(message.content)
        if arrays is None:
            raise InputError("A question for losses must carry exactly one model.")
        signals = asked_signals(cast(ConfigRecord, message.content[RECORD]))
        values = self._answers.measure(signals, arrays, context, arrays)
        record = ConfigRecord(report(self._answers.name(context), values))
        return Message(RecordDict({RECORD: record}), reply_to=message)

    def _train(self, message: Message, context: Context) -> Message:
        question = cast(ConfigRecord, message.content[RECORD])
        signals = asked_signals(question)
        if COMMITMENT in question:  # logged, so that it can later be compared with the server's journal
            log.info("the server is committed to %s", question[COMMITMENT])
        if self._answers.confirm is not None:
            self._confirm(self._answers.confirm, question.get(CONFIRMATION), context)
        received = _only_arrays(message.content)
        # Removed, because some of Flower's mods refuse a message with a second ConfigRecord.
        message.content = RecordDict({k: v for k, v in message.content.items() if k != RECORD})
        asked = signals if received is not None else frozenset[Signal]()
        measurement = Measurement(self._answers, asked, received, context)
        reply = self._app(message, context)
        if reply.has_content():
            trained = _only_arrays(reply.content)
            report = measurement.report(self._answers.name(context), lambda: trained)
            reply.content[RECORD] = ConfigRecord(report)
        return reply

    def _confirm(self, confirm: Callable[[Context, bytes], str], confirmation: object, context: Context) -> None:
        if not isinstance(confirmation, bytes):
            log.warning("the server shows no confirmation from the key holder, so it is not known what was opened")
            return
        try:
            digest = confirm(context, confirmation)
        except FedcohortError as error:
            log.error("this client does not train: %s", error)
            raise
        log.info("the key holder opened this client's labels as sealed, in the set of clients %s", digest)


def _only_arrays(content: RecordDict) -> ArrayRecord | None:
    """Return the only ArrayRecord of a message, or None if there is not exactly one."""
    records = list(content.array_records.values())
    return records[0] if len(records) == 1 else None


class _LabelSealer(Protocol):
    """Protects label counts that leave a client, like :class:`~fedcohort.privacy.LabelSeal`."""

    def seal(self, client: str, counts: Any) -> bytes:
        """Return a client's label counts in a form that may be sent."""


def torch_answers(
    model: Callable[[Context], torch.nn.Module],
    data: Callable[[Context], tuple[Any, Any]],
    *,
    classes: int | None = None,
    validation: Callable[[Context], tuple[Any, Any]] | None = None,
    robust: LocalTraining | None = None,
    share_labels: bool = True,
    seal: _LabelSealer | None = None,
    private: Private | None = None,
    attributes: Callable[[Context], Mapping[str, Attribute]] | None = None,
    reports: Mapping[Any, Callable[..., Any]] | None = None,
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
        DataLoaders of which the first is for training, like the ``load_data`` of Flower's quickstart. Batches are
        pairs, or tables with a column of labels (``label``, ``labels``, ``target`` or ``y``).
    classes : int, optional
        Number of classes, for the label counts. Without it, no label counts are reported.
    validation : callable, optional
        ``validation(context)`` returns the client's held-out inputs and labels.
    robust : LocalTraining, optional
        Weights of FLASH's noise-robust loss, needed for robust and pseudo-label losses.
    share_labels : bool
        Whether label counts may leave the client in the clear.
    seal : LabelSeal or SecretRotation, optional
        Its ``seal(name, counts)`` returns label counts in a protected form, which is sent instead. With a
        ``LabelSeal``, the client also checks before it trains what the key holder opened.
    private : Private, optional
        Noise for label counts and losses, and the ledger that records it; gradients are then not reported.
    attributes : callable, optional
        ``attributes(context)`` returns anything else that an operator's rules use:
        ``{"battery": 80, "region": "north"}``.
    reports : mapping of Signal or str to callable, optional
        What only the client knows, as in :class:`Answers`. Not together with ``private``, whose ledger would not
        record it.
    batch_size : int
        How many samples are evaluated at once.
    name : callable
        ``name(context)`` returns the stable name.
    """
    if seal is not None and not hasattr(seal, "seal"):
        raise ParameterError(f"'seal' must be a LabelSeal or a SecretRotation of fedcohort.privacy. Got {seal!r}.")
    if private is not None and reports is not None:
        raise ParameterError(
            "'reports' would leave the client without noise, and 'private' would not record them.",
            hint="leave out 'reports' or 'private'",
        )

    def measures(context: Context) -> TorchMeasures:
        return TorchMeasures(
            partial(model, context),
            partial(data, context),
            validation=None if validation is None else partial(validation, context),
            robust=robust,
            batch_size=batch_size,
        )

    def facts(context: Context) -> Facts:
        labels = measures(context).labels()
        known = Facts(size=len(labels), attributes={} if attributes is None else attributes(context))
        if classes is None:
            return known
        counts = np.bincount(labels, minlength=classes)
        if private is not None:
            return replace(known, sealed_labels=private.seal(context, normal_form(name(context)), counts))
        if seal is not None:
            return replace(known, sealed_labels=seal.seal(normal_form(name(context)), counts))
        return replace(known, label_counts=counts if share_labels else None)

    if private is not None:
        noise = private  # for the function below, where it cannot be None

        def noisy_losses(arrays: ArrayRecord, context: Context, received: ArrayRecord) -> dict[str, float]:
            # Only one loss, so that an answer is a single release.
            by_label = measures(context).by_label(arrays.to_torch_state_dict())
            return {Signal.LOSS.name: noise.loss(context, by_label) if len(by_label) else float("nan")}

        # No gradient, because the ledger records only counts and losses.
        return Answers(
            facts=facts,
            losses=None if private.losses is None else noisy_losses,
            signals=frozenset({Signal.LOSS}),
            name=name,
            noised=True,
        )

    def losses(arrays: ArrayRecord, context: Context, received: ArrayRecord) -> dict[str, float]:
        state = arrays.to_torch_state_dict()
        return measures(context).losses(state, state if received is arrays else received.to_torch_state_dict())

    confirm = None
    if isinstance(seal, LabelSeal) and classes is not None:
        ours, width = seal, classes

        def confirm(context: Context, confirmation: bytes) -> str:
            # What the key holder opened, against the true counts.
            counts = np.bincount(measures(context).labels(), minlength=width)
            return ours.confirm(name(context), counts, confirmation)

    return Answers(
        facts=facts,
        losses=losses,
        signals=TorchMeasures.signals(validation is not None, robust is not None),
        gradient=lambda arrays, context: measures(context).gradient(arrays.to_torch_state_dict()),
        reports={} if reports is None else reports,
        name=name,
        confirm=confirm,
    )
