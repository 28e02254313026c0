"""pfl-research: its simulated backend with federated averaging."""

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from models_torch import arrays, build
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel


class Steps(Dataset):
    """A user's data, for the steps of one local training."""

    def __init__(self, job, client, x, y, rng):
        mine = job.parts[client]
        super().__init__((x[mine], y[mine]), user_id=str(client))
        self.plan = job, client, x, y, rng

    def iter(self, batch_size):
        job, client, x, y, rng = self.plan
        for batch in job.batches(client, rng):
            yield x[batch], y[batch]


class Peer:
    def __init__(self, job):
        self.job = job
        x, y = torch.from_numpy(np.array(job.x)), torch.from_numpy(job.y)
        rng = np.random.default_rng(0)
        module = build(job)
        module.loss = lambda x, y, **_: F.cross_entropy(module(x), y)
        module.metrics = lambda x, y, **_: {}
        self.model = PyTorchModel(
            module,
            lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, weight_decay=job.decay),
            torch.optim.SGD(module.parameters(), lr=1.0),
        )
        self.users = iter(())
        data = FederatedDataset(lambda user: Steps(job, user, x, y, rng), lambda: next(self.users))
        self.backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
        self.local = NNTrainHyperParams(
            local_num_epochs=None, local_learning_rate=job.lr, local_batch_size=job.batch, local_num_steps=job.steps
        )

    def rounds(self, cohorts):
        self.users = itertools.chain.from_iterable(cohorts)
        plan = NNAlgorithmParams(
            central_num_iterations=len(cohorts),
            evaluation_frequency=len(cohorts) + 1,
            train_cohort_size=len(cohorts[0]),
            val_cohort_size=0,
        )
        FederatedAveraging().run(plan, self.backend, self.model, self.local)

    def parameters(self):
        return arrays(self.model.pytorch_model)
