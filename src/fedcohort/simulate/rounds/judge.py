"""How well a global model serves each group and each client.

A group with its own view of the samples is tested on the test set as it sees it. Clients that are parts of one dataset
need no test samples of their own: a client's accuracy is its group's accuracy on each class, weighted by the client's
mix of classes. If the data name their owners, each owner is tested on its own held-out samples.

The engine reads samples by position in one array. The samples of a view are transformed once and appended to that
array, and the clients' positions point there. So views do not slow training down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fedcohort.core.arrays import AnyArray, FloatArray, IntArray
from fedcohort.scenario import Federation, Groups
from fedcohort.scenario.shift import PLAIN, RELABEL, meant, seen
from fedcohort.simulate.data import Dataset
from fedcohort.simulate.engine import ClientData, Engine, HeldOut
from fedcohort.simulate.metrics import worst_tenth

MAX_GROUPS = 50  # with more clients than this, single clients are not shown as groups


class Fairness(NamedTuple):
    """What an average hides: the accuracy of groups and clients."""

    groups: FloatArray  # (G,) accuracy of each group
    worst_tenth: float  # mean accuracy of the worst tenth of clients
    spread: float  # standard deviation of accuracy over clients
    macro_f1: float  # mean F1 score of the classes
    worst_recall: float  # lowest accuracy of any class


_UNKNOWN = Fairness(np.zeros(0), *[float("nan")] * 4)


class ModelScore(NamedTuple):
    """The result of a global model on the test set; NaN is unknown."""

    loss: float = float("nan")
    metric: float = float("nan")  # of the task; accuracy for a classifier
    fairness: Fairness = _UNKNOWN  # of a classifier's groups and clients


@dataclass(frozen=True, eq=False)
class Judge:
    """Judges models for one federation.

    Attributes
    ----------
    tests : tuple of HeldOut
        The test sets, in the order in which :meth:`score` takes their results.
    """

    tests: tuple[HeldOut, ...]
    groups: Groups
    _counts: tuple[IntArray, ...]  # (cells,) samples of each test
    _shares: FloatArray  # (tests,) of the clients
    _clients: FloatArray | IntArray  # (N, tests * cells) weights of the cells, or (N,) each client's only cell
    _rows: FloatArray  # (G, tests * cells) weights for groups of more than one client
    _untested: AnyArray  # (N,) bool: clients without test samples

    def score(self, losses: Sequence[float], right: Sequence[FloatArray], answers: Sequence[FloatArray]) -> ModelScore:
        """Judge a model by its loss, right answers (cells,), and answers by class (2, C) on each test set."""
        # A cell is a class, or an owner; a test without samples of a cell says nothing about it.
        cells = np.concatenate([r / np.maximum(n, 1) for r, n in zip(right, self._counts, strict=True)])
        whole = np.array([r.sum() / n.sum() for r, n in zip(right, self._counts, strict=True)])
        clients = cells[self._clients] if self._clients.ndim == 1 else self._clients @ cells
        clients = np.where(self._untested, np.nan, clients)
        groups = self._rows @ cells
        if self.groups.kind == "client":
            groups = clients if len(clients) <= MAX_GROUPS else clients[:0]
        known = clients[~self._untested]
        macro_f1, worst_recall = self._by_class(answers)
        spread = float(known.std()) if len(known) else float("nan")
        fairness = Fairness(groups, worst_tenth(known), spread, macro_f1, worst_recall)
        return ModelScore(float(self._shares @ np.asarray(losses)), float(self._shares @ whole), fairness)

    def _by_class(self, answers: Sequence[FloatArray]) -> tuple[float, float]:
        """Return macro-F1 and the worst recall of any class that the tests have."""
        right, given = sum(s * a / len(t.y) for s, a, t in zip(self._shares, answers, self.tests, strict=True))
        true = sum(
            s * np.bincount(t.y, minlength=len(right)) / len(t.y) for s, t in zip(self._shares, self.tests, strict=True)
        )
        # A class without test samples has no recall.
        has = true > 0
        return float(np.mean(2 * right[has] / (true + given)[has])), float(np.min(right[has] / true[has]))


def score_models(engine: Engine, models: torch.Tensor, judges: Sequence[Judge | None]) -> list[ModelScore]:
    """Test ``models`` (m, P), each as its judge says; those with the same test sets are one batch."""
    alike: dict[tuple[HeldOut, ...], list[int]] = {}
    for i, judge in enumerate(judges):
        alike.setdefault(() if judge is None else judge.tests, []).append(i)
    scores = [ModelScore()] * len(judges)
    for tests, places in alike.items():
        rows = models[torch.as_tensor(places, device=models.device)]
        if not tests:
            losses, metrics = engine.evaluate(rows)
            for i, loss, metric in zip(places, np.asarray(losses).tolist(), np.asarray(metrics).tolist(), strict=True):
                scores[i] = ModelScore(loss, metric)
            continue
        results = [engine.evaluate_cells(rows, test) for test in tests]
        for at, i in enumerate(places):
            judge = judges[i]
            assert judge is not None
            found = [(float(loss[at]), right[at], answers[at]) for loss, right, answers in results]
            scores[i] = judge.score(*zip(*found, strict=True))
    return scores


class Views:
    """The samples of a lock-step group as its clients see them, and a judge for each federation.

    Attributes
    ----------
    copies : list of array
        Samples to append to the training and test samples.
    """

    def __init__(self, dataset: Dataset, federations: Sequence[Federation]) -> None:
        self._dataset = dataset
        self._tests: dict[tuple[str, str], HeldOut] = {}
        # Clients that only relabel see the same images, so they need no copies.
        self._first_test = {PLAIN: len(dataset.y_train), RELABEL: len(dataset.y_train)}
        self._train: dict[str, IntArray] = {}  # by view: position of each training sample's copy, -1 without one
        self.copies: list[AnyArray] = []
        self._next = len(dataset.y_train) + len(dataset.y_test)
        views = {view for f in federations if f.groups is not None for view in f.groups.views} - {PLAIN, RELABEL}
        for view in sorted(views):
            needed = np.unique(np.concatenate([_positions(f, view) for f in federations]))
            place = np.full(len(dataset.y_train), -1, np.int64)
            place[needed] = self._append(seen(view, dataset.x_train[needed])) + np.arange(len(needed))
            self._train[view] = place
            self._first_test[view] = self._append(seen(view, dataset.x_test))

    def _append(self, samples: AnyArray) -> int:
        first = self._next
        self.copies.append(samples)
        self._next += len(samples)
        return first

    def client_data(self, federation: Federation) -> ClientData:
        """Return a federation in the form that the engine takes."""
        indices = federation.indices.astype(np.int64)
        groups = federation.groups
        for group, view in enumerate(() if groups is None else groups.views):
            if view in self._train and groups is not None:
                in_group = (groups.of == group)[federation.owner]
                indices[in_group] = self._train[view][indices[in_group]]
        return ClientData(
            indices=indices,
            offsets=federation.offsets,
            labels=federation.labels.astype(np.int64),
            validation=federation.validation,
        )

    def judge(self, federation: Federation) -> Judge | None:
        """Return the judge of a federation; None if it has no groups."""
        groups = federation.groups
        if groups is None:
            return None
        if groups.kind == "client" and self._dataset.writers_test is not None:
            return self._judge_owners(federation, groups)
        views = list(dict.fromkeys(groups.views))
        tests = tuple(self._test(view, "class") for view in views)
        classes = self._dataset.classes
        mix = federation.label_counts(part="all", true=True).astype(np.float64)
        view_of = np.array([views.index(view) for view in groups.views])
        clients = np.zeros((len(federation), len(views), classes))
        clients[np.arange(len(federation)), view_of[groups.of]] = mix / np.maximum(mix.sum(1, keepdims=True), 1)
        rows = np.zeros((0 if groups.kind == "client" else len(groups), len(views), classes))
        for group in range(len(rows)):
            held = mix[groups.of == group].sum(0) if groups.kind == "class" else tests[view_of[group]].counts
            rows[group, view_of[group]] = held / max(held.sum(), 1)
        shares = np.bincount(view_of[groups.of], minlength=len(views)) / len(federation)
        return Judge(
            tests,
            groups,
            tuple(test.counts for test in tests),
            shares,
            clients.reshape(len(federation), -1),
            rows.reshape(len(rows), len(views) * classes),  # with no rows, -1 could not be inferred
            mix.sum(1) == 0,
        )

    def _judge_owners(self, federation: Federation, groups: Groups) -> Judge:
        test = self._test(PLAIN, "owner")
        writer = np.asarray(federation.traits["writer"], np.int64)
        none = np.zeros((0, test.cells))
        return Judge((test,), groups, (test.counts,), np.ones(1), writer, none, test.counts[writer] == 0)

    def _test(self, view: str, by: str) -> HeldOut:
        if (view, by) not in self._tests:
            data = self._dataset
            y = meant(view, np.asarray(data.y_test, np.int64), data.classes)
            cell, cells = y, data.classes
            if by == "owner" and data.writers_test is not None and data.writers is not None:
                cell = np.asarray(data.writers_test, np.int64)
                cells = 1 + max(int(cell.max()), int(data.writers.max()))
            self._tests[view, by] = HeldOut(self._first_test[view], y, cell, cells)
        return self._tests[view, by]


def _positions(federation: Federation, view: str) -> IntArray:
    """Return the training samples of a federation that are seen through a view."""
    groups = federation.groups
    if groups is None or view not in groups.views:
        return np.zeros(0, np.int64)
    has_view = (groups.of == groups.views.index(view))[federation.owner]
    return np.asarray(federation.indices[has_view], np.int64)
