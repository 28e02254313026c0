"""How well a server estimates label shares from what it sees anyway, by estimator and round.

Run: python bench/scripts/privacy_estimates.py [--folder DATA]; writes bench/results/privacy_estimates.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcohort.core.arrays import FloatArray
from fedcohort.core.vectors import output_layer
from fedcohort.privacy.noise import fit_rows
from fedcohort.selectors.numerics.label_shares import by_relative_softmax
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort_bench.privacy.attacks import shares_by_moments

ROOT = Path(__file__).parents[2]
LOOK = (0, 5, 20, 60)
SETTINGS: dict[str, dict[str, Any]] = {
    "digits, 50 clients": {
        "data": {"name": "digits"},
        "scenario": {
            "partition": {"name": "dirichlet", "clients": 50, "alpha": 0.1}, "server_validation": 8,
        },
        "local": {"batch_size": 16, "steps": 10, "lr": 0.05},
    },
    "Fashion-MNIST, 100 clients": {
        "data": {"name": "fashion-mnist"},
        "scenario": {
            "partition": {"name": "dirichlet", "clients": 100, "alpha": 0.1}, "server_validation": 20,
        },
        "local": {"batch_size": 32, "steps": 10, "lr": 0.05},
    },
}  # fmt: skip


def by_auxiliary_moments(updates: FloatArray, step: float, confusion: FloatArray) -> FloatArray:
    r"""Return (k, B) shares from :math:`\bar p = P' D`, where P is what the model predicts for each class.

    Parameters
    ----------
    updates : (k, B) array
    step : float
        :math:`\eta R`.
    confusion : (B, B) array
        Row c: mean prediction of the model on samples of class c, from a small balanced set at the server.
    """
    moved = np.atleast_2d(np.asarray(updates, np.float64))
    p = np.asarray(confusion, np.float64)
    b = p.shape[0]
    # (I - P') D = Delta b / eta R is singular, because both sides sum to 0; the shares sum to 1.
    system = np.vstack([np.eye(b) - p.T, np.ones(b)])
    right = np.vstack([(moved / step).T, np.ones(len(moved))])
    return fit_rows(np.linalg.lstsq(system, right, rcond=None)[0].T, np.ones(len(moved)))


def by_gradient_norms(norms: FloatArray, beta: float) -> FloatArray:
    r"""Return (k, B) shares :math:`\propto e^{\beta / g_i}`, as in Fed-cucb (arXiv:2011.11266, Eq. 6).

    Parameters
    ----------
    norms : (k, B) array
        :math:`g_i`, squared norm of the gradient of output i's weights on auxiliary samples of class i, at the client's
        model after training: small where the client has trained much.
    beta : float
    """
    exponent = beta / np.maximum(np.asarray(norms, np.float64), 1e-12)
    weights = np.exp(exponent - exponent.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def auxiliary_norms(logits: FloatArray, labels: FloatArray, classes: int) -> FloatArray:
    r"""Return (k, B) squared gradients of output i's bias, :math:`(\overline{1 - p_i})^2`, on samples of class i.

    Parameters
    ----------
    logits : (k, V, B) array
        Outputs of k clients' models on the auxiliary set.
    labels : (V,) array
    classes : int
    """
    outputs = np.asarray(logits, np.float64)
    p = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    of = np.asarray(labels)
    return np.stack([(1.0 - p[:, of == c, c]).mean(axis=1) ** 2 for c in range(classes)], axis=1)


def errors(setting: dict[str, Any], folder: str | None) -> dict[str, list[float]]:
    """Return the mean total variation distance of each estimator at some rounds of uniform selection."""
    data = {**setting["data"], **({"folder": folder} if folder and setting["data"]["name"] != "digits" else {})}
    table = {
        **setting,
        "data": data,
        "seeds": [0],
        "model": {"name": "mlp"},
        "run": {"rounds": max(LOOK) + 1, "cohort": 10, "eval_every": 10**6, "device": "cpu"},
        "selectors": {"uniform": {}},
    }
    prepared = prepare(Experiment.from_dict(table), "cpu")
    (plan,) = prepared.experiment.plans
    (dataset,) = prepared.datasets.values()
    group = prepared.group(0, journals=None, device="cpu", workers=None)
    group.start()
    run = group.runs[0]
    federation = run.federation
    counts = federation.label_counts(part="train")
    truth = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    bias = output_layer(group.engine.shapes, dataset.classes).bias
    step = plan.local.lr * float(run.steps.mean())
    places = federation.server_validation
    labels = np.asarray(dataset.y_train)[places]

    def outputs(models: torch.Tensor) -> Any:
        return group.engine.logits(models, places.astype(np.int64)).cpu().numpy()

    errors: dict[str, list[float]] = {}
    for round_ in range(max(LOOK) + 1):
        if round_ in LOOK:
            everyone = np.arange(len(federation))
            trained = group.batch.train([run], [everyone], np.zeros(len(everyone), np.int64), None).params
            updates = (trained[:, bias] - group.models[0, bias]).numpy().astype(np.float64)
            logits = outputs(group.models[:1])[0]
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            confusion = np.array([p[labels == c].mean(axis=0) for c in range(dataset.classes)])
            norms = auxiliary_norms(outputs(trained), labels, dataset.classes)
            shared = np.tile(counts.sum(axis=0) / counts.sum(), (len(counts), 1))
            estimates = {
                "the federation's label shares alone": shared,
                "softmax of the bias update (HiCS-FL, Eq. 6; relative T)": by_relative_softmax(updates, 0.5),
                "moments of the bias update": shares_by_moments(updates, step),
                "moments with an auxiliary set": by_auxiliary_moments(updates, step, confusion),
                "gradient norms on an auxiliary set (Fed-cucb), best beta": min(
                    (by_gradient_norms(norms, beta) for beta in np.logspace(-4, 0, 17)),
                    key=lambda shares: float(np.abs(shares - truth).sum()),
                ),
            }
            for name, shares in estimates.items():
                errors.setdefault(name, []).append(float(0.5 * np.abs(shares - truth).sum(axis=1).mean()))
        group.step()
    group.close()
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the datasets are")
    arguments = parser.parse_args()
    lines = [
        "# Estimating label shares from unencrypted updates",
        "",
        "`python bench/scripts/privacy_estimates.py`: Dirichlet(0.1) label skew, MLP, 10 local steps; total variation "
        "distance between estimated and true label shares, averaged over clients. Each estimate uses a single update "
        "from the given round of a run with uniform selection.",
    ]
    for title, setting in SETTINGS.items():
        lines += ["", f"## {title}", "", "| estimator | " + " | ".join(f"round {r}" for r in LOOK) + " |"]
        lines.append("|---|" + "---:|" * len(LOOK))
        for name, values in errors(setting, arguments.folder).items():
            lines.append(f"| {name} | " + " | ".join(f"{v:.3f}" for v in values) + " |")
    (ROOT / "bench/results/privacy_estimates.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
