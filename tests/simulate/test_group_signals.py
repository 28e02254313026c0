"""Lock-step groups against plain loops: every signal of a round, and the answers to questions."""

import math

import numpy as np
import pytest
import torch

from fedcohort.core.errors import SignalError
from fedcohort.core.protocol import Losses, Trial
from fedcohort.core.rng import stream
from fedcohort.core.signals import SIGNALS, Signal
from fedcohort.core.vectors import vector_signal
from fedcohort.selectors.baselines.greedyfed import SHAPLEY_VALUE
from fedcohort.selectors.ours.bounded import SERVER_LOSS
from fedcohort.session import Session

from .lockstep import Probe, group, rows

REPORTED = frozenset(s for s in SIGNALS if s.reported) | {SERVER_LOSS, SHAPLEY_VALUE}


def server_loss(made, prepared, model):
    """Mean cross-entropy on the server's samples, from its definition."""
    (context,) = {run.context.index: run.context for run in made.runs}.values()
    (dataset,) = prepared.datasets.values()
    positions = context.federation.server_validation.astype(np.int64)
    (logits,) = made.engine.logits(model[None], positions)
    shares = torch.softmax(logits.double(), 1)[np.arange(len(positions)), np.asarray(dataset.y_train)[positions]]
    return float(-shares.log().mean())


def test_every_signal_equals_its_definition(plain_client):
    made, prepared = group(selector=Probe(wants=REPORTED))
    run = made.runs[0]
    told = []
    run.session.tell = lambda report, **_: told.append(report) or Session.tell(run.session, report)
    old = made.models[0].clone()
    made.step()
    report = told[0]
    clients = [plain_client(prepared, int(c)) for c in report.clients]
    local = run.plan.local
    after = [client.train(old, local, run.plan.seed, 0) for client in clients]
    gradients = torch.stack([client.gradient(old) for client in clients])
    updates = torch.stack(after) - old
    sizes = run.federation.train_sizes[report.clients]
    weights = torch.as_tensor(sizes / sizes.sum(), dtype=updates.dtype)
    expected = {
        Signal.LOSS: [c.loss(old) for c in clients],
        Signal.LOSS_AFTER: [c.loss(w) for c, w in zip(clients, after, strict=True)],
        Signal.LOSS_RMS: [c.loss_rms(old) for c in clients],
        Signal.VALIDATION_LOSS: [c.validation_loss(old) for c in clients],
        Signal.PSEUDO_LOSS: [c.pseudo_loss(old, old) for c in clients],
        Signal.PSEUDO_LOSS_AFTER: [c.pseudo_loss(w, old) for c, w in zip(clients, after, strict=True)],
        Signal.UPDATE_NORM: updates.norm(dim=1),
        Signal.UPDATE_DISTANCE: (updates - updates.mean(0)).norm(dim=1),
        Signal.WEIGHTED_UPDATE_DISTANCE: (updates - weights @ updates).norm(dim=1),
        Signal.OUTPUT_BIAS_UPDATE: torch.stack(
            [clients[0].output_bias(w) - clients[0].output_bias(old) for w in after]
        ),
        Signal.OUTPUT_UPDATE_NORM: updates[:, -(64 * 4 + 4) :].norm(dim=1),
        Signal.UPDATE_SKETCH: vector_signal(Signal.UPDATE_SKETCH.how, updates.numpy(), np.ones(3, bool), None),
        Signal.GRADIENT_NORM: gradients.norm(dim=1),
        Signal.GRADIENT_DISTANCE: (gradients - gradients.mean(0)).norm(dim=1),
        Signal.WEIGHTED_GRADIENT_DISTANCE: (gradients - weights @ gradients).norm(dim=1),
        Signal.DURATION: [0.0] * 3,
        SERVER_LOSS: [server_loss(made, prepared, old)] * 3,
    }
    for signal, values in expected.items():
        np.testing.assert_allclose(
            report.metrics[signal], np.asarray(values), rtol=2e-4, atol=1e-5, err_msg=str(signal)
        )
    assert set(report.metrics) == REPORTED - {Signal.KEPT, Signal.STALENESS}  # which the session adds
    assert report.metrics[Signal.OUTPUT_BIAS_UPDATE].shape == (3, 4)
    assert report.metrics[Signal.UPDATE_SKETCH].shape == (3, 64)
    # the robust loss lies above the cross-entropy it contains, before and after
    assert (report.metrics[Signal.ROBUST_LOSS] > report.metrics[Signal.LOSS]).all()
    assert (report.metrics[Signal.ROBUST_LOSS_AFTER] > report.metrics[Signal.LOSS_AFTER]).all()
    made.close()


@pytest.mark.parametrize("signal", [Signal.OUTPUT_BIAS_UPDATE, Signal.UPDATE_SKETCH])
def test_vectors_of_those_who_fail_are_nan_and_cost_nothing(signal):
    probe = Probe(wants=frozenset({signal}))
    seen = []
    object.__setattr__(probe, "update", lambda state, outcome: seen.append(outcome) or state)
    made, _ = group({"scenario": {"failure": 0.5}, "run": {"rounds": 4}}, selector=probe)
    while not made.done:
        made.step()
    assert any(not outcome.ok.all() for outcome in seen)
    for outcome in seen:
        assert outcome[signal].shape == (3, 4 if signal.width == "classes" else 64)
        np.testing.assert_array_equal(np.isnan(outcome[signal]).any(axis=1), ~outcome.ok)
    size = 4 * made.engine.n_params
    assert all(row["bytes_up"] % size == 0 for row in rows(made)[0])
    made.close()


def test_a_model_without_an_output_bias_is_refused():
    with pytest.raises(SignalError, match=r"'output-bias-update'.*weight \(4, 6\).*\(4,\)"):
        group({"model": {"name": f"{__name__}:NoBias"}}, selector=Probe(wants=frozenset({Signal.OUTPUT_BIAS_UPDATE})))


class NoBias(torch.nn.Module):
    """A linear model without a bias."""

    def __init__(self, shape, classes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(classes, math.prod(shape)))

    def forward(self, x):
        return x.flatten(1) @ self.weight.T


def test_losses_are_answered_by_available_clients_only(plain_client):
    asked = np.array([5, 0, 3])
    query = Losses(asked, frozenset({Signal.LOSS, Signal.VALIDATION_LOSS}))
    awake = {"name": "bernoulli", "probabilities": [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]}
    made, prepared = group(
        {"scenario": {"availability": awake}},
        selector=Probe(asks=query, wants=frozenset({Signal.LOSS_QUERY})),
    )
    answers = []
    session = made.runs[0].session
    session.ask = lambda request, answer: answers.append(answer) or Session.ask(session, request, answer)
    old = made.models[0].clone()
    made.step()
    loss = answers[0][Signal.LOSS]
    assert math.isnan(loss[0])
    for place, client in ((1, 0), (2, 3)):
        plain = plain_client(prepared, client)
        assert loss[place] == pytest.approx(plain.loss(old), rel=1e-4)
        assert answers[0][Signal.VALIDATION_LOSS][place] == pytest.approx(plain.validation_loss(old), rel=1e-4)
    row = rows(made)[0][0]
    size = 4 * made.engine.n_params
    assert row["query_bytes_down"] == 2 * size
    assert row["query_bytes_up"] == 2 * 2 * 8
    assert row["cohort"] == [0, 3, 6]
    assert row["bytes_down"] == size  # 0 and 3 have the model from the question
    assert row["bytes_up"] == 3 * size
    assert row["available"] == 4
    made.close()


def test_a_trial_is_trained_averaged_and_forgotten(plain_client):
    cohorts = (np.array([1, 4]), np.array([2]))
    made, prepared = group(selector=Probe(asks=Trial(cohorts), wants=frozenset({Signal.TRIAL_QUERY})))
    run = made.runs[0]
    answers = []
    run.session.ask = lambda request, answer: answers.append(answer) or Session.ask(run.session, request, answer)
    old = made.models[0].clone()
    made.step()
    change = answers[0][Signal.LOSS_CHANGE]
    assert change.shape == (2, 8)
    everyone = [plain_client(prepared, client) for client in range(8)]
    for number, cohort in enumerate(cohorts):
        seed = int(stream(run.plan.seed, "trial", 0, number).integers(1 << 62))
        trained = torch.stack([everyone[c].train(old, run.plan.local, seed, 0) for c in cohort])
        share = run.context.share[cohort]
        average = torch.as_tensor(share / share.sum(), dtype=torch.float32) @ trained
        expected = [client.loss(average) - client.loss(old) for client in everyone]
        np.testing.assert_allclose(change[number], expected, rtol=1e-3, atol=1e-5)
    # the round itself starts from the old model, with batches of its own
    row = rows(made)[0][0]
    own = [everyone[c].train(old, run.plan.local, run.plan.seed, 0) for c in row["cohort"]]
    share = run.context.share[row["cohort"]]
    expected = torch.as_tensor(share / share.sum(), dtype=torch.float32) @ torch.stack(own)
    torch.testing.assert_close(made.models[0], expected, rtol=1e-4, atol=1e-5)
    size = 4 * made.engine.n_params
    assert row["query_bytes_down"] == (8 + 8 + 8) * size
    assert row["query_bytes_up"] == 3 * size + 3 * 8 * 8
    assert row["bytes_down"] == 0
    made.close()


def test_distances_leave_out_broken_models(monkeypatch, plain_client):
    made, prepared = group(selector=Probe(wants=frozenset({Signal.UPDATE_DISTANCE})))
    run = made.runs[0]
    told = []
    run.session.tell = lambda report, **_: told.append(report)
    real = made.engine.train

    def breaking(*args, **kwargs):
        trained = real(*args, **kwargs)
        trained.params[2, 0] = float("nan")
        return trained

    monkeypatch.setattr(made.engine, "train", breaking)
    old = made.models[0].clone()
    made.step()
    updates = torch.stack(
        [plain_client(prepared, c).train(old, run.plan.local, run.plan.seed, 0) - old for c in (0, 1)]
    )
    expected = (updates - updates.mean(0)).norm(dim=1)
    np.testing.assert_allclose(told[0].metrics[Signal.UPDATE_DISTANCE][:2], expected, rtol=1e-4)
    made.close()
