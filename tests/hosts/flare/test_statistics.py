"""Running statistics of normalisation layers on FLARE: no parameters, and never moved by an update."""

from __future__ import annotations

import numpy as np
import torch
from nvflare.app_common.abstract.fl_model import FLModel

from fedcohort.core.protocol import Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.answers import TorchMeasures
from fedcohort.hosts.flare.replies import CheckedResult, ResultChecker, arrays_of
from fedcohort.hosts.wire import RECORD, report


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def test_a_late_result_brings_its_own_statistics() -> None:
    def model(weight: float, variance: float, count: int) -> dict[str, np.ndarray]:
        return {"w": np.array([weight]), "norm.running_var": np.array([variance]),
                "norm.num_batches_tracked": np.array(count)}  # fmt: skip

    late = CheckedResult("site-1", Status.OK, params=model(3.0, 0.1, 7))
    moved = late.moved(model(1.0, 1.0, 2), onto=model(10.0, 0.5, 9)).params
    assert moved["w"].tolist() == [12.0]
    assert moved["norm.running_var"].tolist() == [0.1]  # 0.5 + (0.1 - 1) would be below zero
    assert moved["norm.num_batches_tracked"] == 7
    assert list(moved) == ["w", "norm.running_var", "norm.num_batches_tracked"]


def test_a_gradient_has_an_entry_for_each_parameter_of_a_model_with_batch_norm() -> None:
    generator = torch.Generator().manual_seed(1)
    measures = TorchMeasures(module, lambda: (torch.randn(9, 3, generator=generator), torch.arange(9) % 2))
    state = module().state_dict()
    gradient = measures.gradient(state)
    result = FLModel(params=arrays_of(state), meta={RECORD: report("", {}, 1.0, gradient)})
    checked = ResultChecker(arrays_of(state), {Signal.GRADIENT_NORM}).check("site-1", result, 1.0)
    assert checked.status == Status.OK, checked.reason
    assert checked.gradient is not None and len(checked.gradient) == sum(p.numel() for p in module().parameters())
