"""FedLab: its standalone pipeline, synchronous server and serial trainer."""

import numpy as np
import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Aggregators, SerializationTool
from models_torch import arrays, build


class Trainer(SGDSerialClientTrainer):
    def local_process(self, payload, id_list):
        for client in id_list:
            self.set_model(payload[0])
            for batch in self.job.batches(client, self.rng):
                self.optimizer.zero_grad()
                self.criterion(self.model(self.x[batch]), self.y[batch]).backward()
                self.optimizer.step()
            self.cache.append([self.model_parameters, torch.tensor(float(len(self.job.parts[client])))])


class Server(SyncServerHandler):
    def sample_clients(self):
        return self.cohorts[self.round]

    def global_update(self, buffer):
        mean = Aggregators.fedavg_aggregate([pack[0] for pack in buffer], [pack[1] for pack in buffer])
        SerializationTool.deserialize_model(self._model, mean)


class Pipeline(StandalonePipeline):
    def evaluate(self):
        pass


class Peer:
    def __init__(self, job):
        self.trainer = Trainer(build(job), len(job.parts))
        self.trainer.setup_optim(1, job.batch, job.lr)
        self.trainer.optimizer = torch.optim.SGD(self.trainer.model.parameters(), job.lr, weight_decay=job.decay)
        self.trainer.job, self.trainer.rng = job, np.random.default_rng(0)
        self.trainer.x, self.trainer.y = torch.from_numpy(np.array(job.x)), torch.from_numpy(job.y)
        self.server = Server(build(job), 0, (job.cohort + 0.5) / len(job.parts))
        self.pipeline = Pipeline(self.server, self.trainer)

    def rounds(self, cohorts):
        self.server.cohorts, self.server.round, self.server.global_round = cohorts, 0, len(cohorts)
        self.pipeline.main()

    def parameters(self):
        return arrays(self.server.model)
