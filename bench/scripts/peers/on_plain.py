"""The obvious loop in plain PyTorch."""

import numpy as np
import torch
import torch.nn.functional as F
from models_torch import arrays, build


class Peer:
    def __init__(self, job):
        self.job, self.model = job, build(job)
        self.x, self.y = torch.from_numpy(np.array(job.x)), torch.from_numpy(job.y)
        self.rng = np.random.default_rng(0)

    def rounds(self, cohorts):
        for cohort in cohorts:
            start = {name: value.clone() for name, value in self.model.state_dict().items()}
            total = {name: torch.zeros_like(value) for name, value in start.items()}
            samples = sum(len(self.job.parts[client]) for client in cohort)
            for client in cohort:
                self.model.load_state_dict(start)
                self.train(client)
                for name, value in self.model.state_dict().items():
                    total[name] += value * (len(self.job.parts[client]) / samples)
            self.model.load_state_dict(total)

    def train(self, client):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.job.lr, weight_decay=self.job.decay)
        for batch in self.job.batches(client, self.rng):
            optimizer.zero_grad()
            F.cross_entropy(self.model(self.x[batch]), self.y[batch]).backward()
            optimizer.step()

    def parameters(self):
        return arrays(self.model)
