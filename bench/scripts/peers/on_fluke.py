"""fluke: its centralised algorithm with our client and our server."""

import numpy as np
import torch
from fluke import FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from models_torch import arrays, build


class Steps(Client):
    def fit(self, override_local_epochs=0):
        optimizer, _ = self._optimizer_cfg(self.model)
        self.model.train()
        for batch in self.job.batches(self.index, self.rng):
            optimizer.zero_grad()
            self.hyper_params.loss_fn(self.model(self.x[batch]), self.y[batch]).backward()
            optimizer.step()
        return 0.0


class Given(Server):
    def get_eligible_clients(self, eligible_perc):
        return [self.clients[client] for client in next(self.cohorts)]


class Averaging(CentralizedFL):
    def finalize(self):
        pass


class Peer:
    def __init__(self, job):
        environment = FlukeENV()
        environment.set_device("cpu")
        environment.set_inmemory(True)
        environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
        Steps.job, Steps.rng = job, np.random.default_rng(0)
        Steps.x, Steps.y = torch.from_numpy(np.array(job.x)), torch.from_numpy(job.y)
        optimizer = OptimizerConfigurator({"name": "SGD", "lr": job.lr, "weight_decay": job.decay})
        clients = []
        for number, part in enumerate(job.parts):
            owned = FastDataLoader(torch.from_numpy(part), Steps.y[part], num_labels=job.classes, batch_size=job.batch)
            clients.append(Steps(number, owned, None, optimizer, torch.nn.CrossEntropyLoss(), persistency=False))
        self.server = Given(build(job), None, clients, weighted=True)
        self.share = (job.cohort + 0.5) / len(clients)
        self.algorithm = Averaging(len(clients), None, {}, clients=clients, server=self.server)

    def rounds(self, cohorts):
        self.server.cohorts = iter(cohorts)
        self.algorithm.run(len(cohorts), self.share)

    def parameters(self):
        return arrays(self.server.model)
