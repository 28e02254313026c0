"""FedJAX: its federated averaging over in-memory client datasets."""

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fedjax.algorithms import fed_avg
from models_jax import arrays, logits, start


class Peer:
    def __init__(self, job):
        x = np.array(job.x)
        self.clients = [fedjax.ClientDataset({"x": x[part], "y": job.y[part]}) for part in job.parts]

        def loss(parameters, batch, rng):
            scores = jax.nn.log_softmax(logits(job, parameters, batch["x"]))
            return -jnp.mean(jnp.take_along_axis(scores, batch["y"][:, None], axis=1))

        local = optax.chain(optax.add_decayed_weights(job.decay), optax.sgd(job.lr))
        self.algorithm = fed_avg.federated_averaging(
            jax.grad(loss),
            fedjax.optimizers.create_optimizer_from_optax(local),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch, num_epochs=None, num_steps=job.steps),
        )
        self.state, self.round = self.algorithm.init(start(job)), 0

    def rounds(self, cohorts):
        for cohort in cohorts:
            keys = jax.random.split(jax.random.PRNGKey(self.round), len(cohort))
            drawn = [(client, self.clients[client], key) for client, key in zip(cohort, keys, strict=True)]
            self.state, _ = self.algorithm.apply(self.state, drawn)
            self.round += 1
        jax.block_until_ready(self.state.params)

    def parameters(self):
        return arrays(self.state.params)
