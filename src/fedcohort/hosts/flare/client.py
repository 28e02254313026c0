"""The site's side: answers to the questions of selectors, and reports about training.

In a training script with FLARE's Client API, ``CohortClient`` replaces ``flare.receive`` and ``flare.send``::

    flare.init()
    client = CohortClient(torch_answers(make_model, load_data, classes=10))
    for model in client:
        steps = train(model)
        client.send(flare.FLModel(params=..., meta={"NUM_STEPS_CURRENT_ROUND": steps}))

An Executor is wrapped instead: ``CohortExecutor(MyExecutor())``. Its method ``answers(fl_ctx)`` returns the
:class:`Answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from nvflare import client as flare
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal as AbortSignal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedcohort.hosts.answers import Answers, Facts, Measurement, TorchMeasures
from fedcohort.hosts.flare.wire import DESCRIBE, LOSSES
from fedcohort.hosts.wire import (
    RECORD,
    SEED,
    WORK,
    Attribute,
    asked_signals,
    plain,
    report,
)

if TYPE_CHECKING:
    import torch

    from fedcohort.training.local import LocalTraining

Params = Mapping[str, Any]


def torch_answers(
    model: Callable[[], torch.nn.Module],
    data: Callable[[], Any],
    *,
    classes: int | None = None,
    validation: Callable[[], Any] | None = None,
    robust: LocalTraining | None = None,
    share_labels: bool = True,
    attributes: Callable[[], Mapping[str, Attribute]] | None = None,
    reports: Mapping[Any, Callable[..., Any]] | None = None,
    batch_size: int = 1024,
) -> Answers:
    """Return answers for a torch classifier: size, label counts, cross-entropy losses and the full-batch gradient.

    Parameters
    ----------
    model : callable
        Returns a module whose ``state_dict`` fits the model of the federation.
    data : callable
        Returns the site's training inputs and integer labels, or a DataLoader of them.
    classes : int, optional
        Number of classes, for the label counts. Without it, no label counts are reported.
    validation : callable, optional
        Returns the site's held-out inputs and labels.
    robust : LocalTraining, optional
        Weights of FLASH's noise-robust loss, needed for robust and pseudo-label losses.
    share_labels : bool
        Whether label counts may leave the site.
    attributes : callable, optional
        Returns anything else that an operator's rules use: ``{"region": "north"}``.
    reports : mapping of Signal or str to callable, optional
        What only the site knows, as in :class:`Answers`.
    batch_size : int
        How many samples are evaluated at once.
    """
    measures = TorchMeasures(model, data, validation=validation, robust=robust, batch_size=batch_size)

    def facts() -> Facts:
        labels = measures.labels()
        counts = np.bincount(labels, minlength=classes) if classes is not None and share_labels else None
        return Facts(len(labels), counts, attributes={} if attributes is None else attributes())

    return Answers(
        facts=facts,
        losses=lambda params, received: measures.losses(_tensors(params), _tensors(received)),
        signals=TorchMeasures.signals(validation is not None, robust is not None),
        gradient=lambda params: measures.gradient(_tensors(params)),
        reports={} if reports is None else reports,
    )


def _tensors(params: Params) -> dict[str, Any]:
    import torch

    return {key: torch.as_tensor(value) for key, value in params.items()}


class _Respondent:
    """One site's answers, and what is measured during training."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._received: Params = {}
        self._measurement: Measurement

    def answer(self, task: str, model: FLModel) -> FLModel | None:
        """Return the answer to a question of fedcohort, or None for any other task."""
        if task == DESCRIBE:
            facts = Facts() if self._answers.facts is None else self._answers.facts()
            record = self._answers.description("", facts).to_record()  # the name comes from FLARE
        elif task == LOSSES:
            asked = asked_signals(_ours(model))
            record = report("", self._answers.measure(asked, model.params, model.params))
        else:
            return None
        return FLModel(metrics={"answered": 1.0}, meta={RECORD: record})

    def begin(self, model: FLModel) -> None:
        """Measure the received model and start the clock."""
        asked = asked_signals(_ours(model))
        # A copy, because scripts train in place, and FLARE drops the model that it passed on.
        received = {key: np.array(plain(value)) for key, value in model.params.items()} if asked else {}
        self._received = received
        self._measurement = Measurement(self._answers, asked, received)

    def end(self, model: FLModel) -> None:
        """Measure the trained model, and write everything into the reply."""

        def trained() -> Params | None:
            params = {key: np.asarray(plain(value)) for key, value in (model.params or {}).items()}
            if model.params_type == "DIFF":
                params = {key: self._received[key] + value for key, value in params.items()}
            return params or None

        model.meta = {**(model.meta or {}), RECORD: self._measurement.report("", trained)}


def _ours(model: FLModel) -> Mapping[str, Any]:
    record = (model.meta or {}).get(RECORD)
    return record if isinstance(record, Mapping) else {}


def seed_of(model: FLModel) -> int:
    """Return the seed of local training: the run's seed, or another one in a trial."""
    return int(_ours(model).get(SEED, 0))


def work_of(model: FLModel, site: str) -> float | None:
    """Return a site's amount of local training as a multiple of its default, or None if the cohort does not set it."""
    work = _ours(model).get(WORK)
    return float(work[site]) if isinstance(work, Mapping) and site in work else None


class CohortClient:
    """FLARE's Client API for a training script, with answers to the questions of selectors.

    Parameters
    ----------
    answers : Answers, optional
        What the site can tell. Default: nothing.
    """

    def __init__(self, answers: Answers | None = None) -> None:
        self._respondent = _Respondent(Answers() if answers is None else answers)

    def receive(self, timeout: float | None = None) -> FLModel | None:
        """Return the next model to train, like ``flare.receive``, and answer questions that come before it."""
        while (model := flare.receive(timeout)) is not None:
            answer = self._respondent.answer(flare.get_task_name(), model)
            if answer is None:
                self._respondent.begin(model)
                return model
            flare.send(answer)
        return None

    def send(self, model: FLModel) -> None:
        """Send a trained model, like ``flare.send``, with what the selector asked about it."""
        self._respondent.end(model)
        flare.send(model)

    def __iter__(self) -> Iterator[FLModel]:
        """Yield the models to train until the run is over."""
        while flare.is_running() and (model := self.receive()) is not None:
            yield model


class CohortExecutor(Executor):  # type: ignore[misc]  # nvflare has no types
    """An Executor with answers to the questions of selectors.

    Parameters
    ----------
    executor : Executor
        Trains. If it has a method ``answers(fl_ctx)``, this returns the site's :class:`Answers`.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self.executor = executor
        self._respondent: _Respondent | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Pass events on to the executor."""
        self.executor.handle_event(event_type, fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: AbortSignal) -> Shareable:
        """Answer a question, or let the executor train and add a report to its model."""
        if self._respondent is None:
            answers = getattr(self.executor, "answers", None)
            self._respondent = _Respondent(Answers() if answers is None else answers(fl_ctx))
        model = FLModelUtils.from_shareable(shareable)
        answer = self._respondent.answer(task_name, model)
        if answer is not None:
            return FLModelUtils.to_shareable(answer)
        self._respondent.begin(model)
        result = self.executor.execute(task_name, shareable, fl_ctx, abort_signal)
        if result.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return result
        trained = FLModelUtils.from_shareable(result)
        self._respondent.end(trained)
        return FLModelUtils.to_shareable(trained)
