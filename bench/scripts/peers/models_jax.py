"""The models as functions of JAX, with torch's layout of images (NCHW) and parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from job import Job


def start(job: Job) -> dict[str, jax.Array]:
    """Return the first parameters; dense weights as (inputs, outputs), kernels as (rows, columns, inputs, outputs)."""
    return {name: jnp.asarray(_turned(value)) for name, value in job.start.items()}


def arrays(parameters: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return the parameters in torch's layout."""
    back = {2: (1, 0), 4: (3, 2, 0, 1)}
    return {name: np.asarray(value).transpose(back.get(value.ndim, (0,))) for name, value in parameters.items()}


def _turned(value: np.ndarray) -> np.ndarray:
    return value.transpose({2: (1, 0), 4: (2, 3, 1, 0)}.get(value.ndim, (0,)))


def logits(job: Job, parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Apply the model."""
    layers = sorted({name.split(".")[0] for name in parameters}, key=int)
    x = x.transpose(0, 2, 3, 1) if job.model == "lenet" else x.reshape(len(x), -1)
    for number, layer in enumerate(layers):
        weight, bias = parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]
        if weight.ndim == 4:
            x = jax.lax.conv_general_dilated(x, weight, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x + bias)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            continue
        if x.ndim == 4:
            x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)  # torch's order of features
        x = x @ weight + bias
        if number < len(layers) - 1:
            x = jax.nn.relu(x)
    return x
