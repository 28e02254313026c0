"""Only fedcohort's engine, which trains the clients: no selector, session, journal or results."""

import numpy as np
import torch
from models_torch import build

from fedcohort.simulate.engine import ClientData, Engine, Jobs
from fedcohort.training.local import LocalTraining


class Peer:
    def __init__(self, job):
        x_test, y_test = job.test()
        order = np.concatenate(job.parts)
        sizes = np.array([len(part) for part in job.parts])
        clients = ClientData(
            order, np.concatenate([[0], np.cumsum(sizes)]), job.y[order], np.zeros(len(sizes), np.int64)
        )
        self.engine = Engine(
            np.moveaxis(job.x, 1, -1),  # channels last
            job.y,
            np.moveaxis(x_test, 1, -1),
            y_test,
            classes=job.classes,
            federations=[clients],
            model=job.model,
            local=LocalTraining(steps=job.steps, batch_size=job.batch, lr=job.lr, weight_decay=job.decay),
            device="cpu",
        )
        self.sizes, self.round = sizes, 0
        self.module = build(job)
        self.model = torch.nn.utils.parameters_to_vector(self.module.parameters()).detach()[None]

    def rounds(self, cohorts):
        for cohort in cohorts:
            zeros = np.zeros(len(cohort), np.int64)
            trained = self.engine.train(self.model, Jobs(zeros, zeros, np.array(cohort), zeros + self.round, zeros))
            weights = torch.from_numpy(self.sizes[cohort] / self.sizes[cohort].sum()).float()
            self.model = (weights[:, None] * trained.params).sum(0, keepdim=True)
            self.round += 1

    def parameters(self):
        torch.nn.utils.vector_to_parameters(self.model[0], self.module.parameters())
        return {name: value.detach().numpy() for name, value in self.module.state_dict().items()}
