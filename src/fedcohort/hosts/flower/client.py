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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client.mod import LocalDpMod as LegacyLocalDpMod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import FedcohortError, InputError, ParameterError
from fedcohort.core.signals import LOSS_SIGNALS, Signal, losses_of, same_of_received
from fedcohort.core.validate import instance, listing, refuse
from fedcohort.hosts.answers import Facts, TorchMeasures
from fedcohort.hosts.flower.wire import DESCRIBE, LOSSES, only_arrays, report_record
from fedcohort.hosts.wire import (
    COMMITMENT,
    CONFIRMATION,
    GRADIENT_SIGNALS,
    RECORD,
    Attribute,
    Description,
    asked_signals,
    normal_form,
    plain,
    supplied_signals,
)
from fedcohort.privacy.scheme import LabelSeal

log = logging.getLogger("flwr.fedcohort")

if TYPE_CHECKING:
    import torch

    from fedcohort.hosts.flower.private import Private
    from fedcohort.training.local import LocalTraining

LossFunction = Callable[[ArrayRecord, Context, ArrayRecord], Mapping[str, float]]
GradientFunction = Callable[[ArrayRecord, Context], FloatArray]


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
class Answers:
    """What a client can tell a selector.

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

    facts: Callable[[Context], Facts] | None = None
    losses: LossFunction | None = None
    signals: frozenset[Signal] = field(default_factory=lambda: frozenset({Signal.LOSS}))
    gradient: GradientFunction | None = None
    name: Callable[[Context], str] = client_name
    noised: bool = False
    confirm: Callable[[Context, bytes], str] | None = None

    def __post_init__(self) -> None:
        found = listing(self.signals, "The signals of Answers", "losses")
        if not all(isinstance(signal, str) and signal in LOSS_SIGNALS for signal in found):
            raise refuse("The signals of Answers", f"among {', '.join(sorted(LOSS_SIGNALS))}", self.signals)
        object.__setattr__(self, "signals", frozenset(Signal.by_name(signal) for signal in found))

    @property
    def supplied(self) -> frozenset[Signal]:
        """Every signal a client with these answers can report or be asked for."""
        return supplied_signals(None if self.losses is None else self.signals, self.gradient is not None)


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
        description = Description(
            name=self._answers.name(context),
            size=None if facts.size is None else int(facts.size),
            label_counts=None if facts.label_counts is None else tuple(int(c) for c in facts.label_counts),
            sealed_labels=facts.sealed_labels,
            signals=self._answers.supplied,
            attributes=dict(facts.attributes),
        )
        return Message(RecordDict({RECORD: ConfigRecord(description.to_record())}), reply_to=message)

    def _losses(self, message: Message, context: Context) -> Message:
        arrays = only_arrays(message.content)
        if arrays is None:
            raise InputError("A question for losses must carry exactly one model.")
        wanted = asked_signals(cast(ConfigRecord, message.content[RECORD]))
        values = self._measure(arrays, context, arrays, wanted & LOSS_SIGNALS)
        return Message(RecordDict({RECORD: report_record(self._answers.name(context), values)}), reply_to=message)

    def _measure(
        self, arrays: ArrayRecord, context: Context, received: ArrayRecord, wanted: frozenset[Signal]
    ) -> dict[Signal, float]:
        if not wanted:
            return {}
        if self._answers.losses is None or not wanted <= self._answers.signals:
            raise InputError(f"This client cannot measure {', '.join(sorted(wanted - self._answers.signals))}.")
        values = self._answers.losses(arrays, context, received)
        lacking = [s for s in sorted(wanted) if s.value not in values]
        if lacking:
            raise InputError(f"The loss function must return {', '.join(sorted(wanted))}. It lacks '{lacking[0]}'.")
        return {signal: float(values[signal.value]) for signal in wanted}

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
            values.update(self._measure(received, context, received, wanted & LOSS_SIGNALS))
            if wanted & GRADIENT_SIGNALS and self._answers.gradient is not None:
                gradient = plain(self._answers.gradient(received, context))
        begun = time.monotonic()
        reply = self._app(message, context)
        seconds = time.monotonic() - begun
        if reply.has_content():
            after = {same_of_received(s): s for s in losses_of(wanted, "own")}
            trained = only_arrays(reply.content)
            if after and trained is not None and received is not None:
                measured = self._measure(trained, context, received, frozenset(after))
                values.update({after[signal]: value for signal, value in measured.items()})
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
        plain_facts = Facts(size=len(labels), attributes={} if attributes is None else attributes(context))
        if classes is None:
            return plain_facts
        counts = np.bincount(labels, minlength=classes)
        if private is not None:
            return replace(plain_facts, sealed_labels=private.seal(context, normal_form(name(context)), counts))
        if seal is not None:
            return replace(plain_facts, sealed_labels=seal.seal(normal_form(name(context)), counts))
        return replace(plain_facts, label_counts=counts if share_labels else None)

    def confirm(context: Context, confirmation: bytes) -> str:
        assert isinstance(seal, LabelSeal)
        counts = np.bincount(measures(context).labels(), minlength=classes or 0)
        return seal.confirm(name(context), counts, confirmation)

    def losses(arrays: ArrayRecord, context: Context, received: ArrayRecord) -> dict[str, float]:
        found = measures(context)
        state = arrays.to_torch_state_dict()
        if private is not None:  # one number, so that one answer is one release
            by_label = found.by_label(state)
            return {Signal.LOSS.value: private.loss(context, by_label) if len(by_label) else float("nan")}
        return found.losses(state, state if received is arrays else received.to_torch_state_dict())

    def gradient(arrays: ArrayRecord, context: Context) -> FloatArray:
        return measures(context).gradient(arrays.to_torch_state_dict())

    signals = TorchMeasures.signals(validation is not None, robust is not None)
    if private is not None:
        tells = losses if private.losses is not None else None
        return Answers(facts=facts, losses=tells, signals=frozenset({Signal.LOSS}), name=name, noised=True)
    confirms = confirm if isinstance(seal, LabelSeal) and classes is not None else None
    return Answers(facts=facts, losses=losses, signals=signals, gradient=gradient, name=name, confirm=confirms)
