"""The models as torch modules, for the peers that are built on torch."""

from __future__ import annotations

import numpy as np
import torch
from job import Job
from torch import nn


def build(job: Job) -> nn.Sequential:
    """Return the module with the job's first parameters."""
    if job.model == "mlp":
        layers = [nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, job.classes)]
    else:
        layers = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
        layers += [nn.Linear(84, job.classes)]
    module = nn.Sequential(*layers)
    module.load_state_dict({name: torch.from_numpy(value) for name, value in job.start.items()})
    return module


def arrays(module: nn.Module) -> dict[str, np.ndarray]:
    """Return the parameters by name."""
    return {name: value.detach().cpu().numpy().copy() for name, value in module.state_dict().items()}
