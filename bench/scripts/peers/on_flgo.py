"""FLGo: its server and client for federated averaging, on a task made from our data."""

import os
import sys
import tempfile
import types
from pathlib import Path

import flgo
import numpy as np
import torch
import torch.nn.functional as F
from flgo.algorithm import fedavg
from job import GIVEN
from models_torch import arrays, build

CONFIG = """
import job, on_flgo
train_data = job.GIVEN["parts"]
test_data = val_data = None
data_to_device = lambda batch, device: batch
eval = lambda model, loader, device: {}
compute_loss = on_flgo.compute_loss
get_model = on_flgo.get_model
"""


def compute_loss(model, batch, device):
    return {"loss": F.cross_entropy(model(GIVEN["x"][batch]), GIVEN["y"][batch])}


def get_model():
    return build(GIVEN["job"])


class Server(fedavg.Server):
    def sample(self):
        return GIVEN["cohorts"][self.current_round - 1]


class Client(fedavg.Client):
    def train(self, model):
        self.plan = GIVEN["job"].batches(self.client_id, GIVEN["rng"])
        super().train(model)

    def get_batch_data(self):
        return next(self.plan)


class Peer:
    def __init__(self, job):
        GIVEN.update(job=job, parts=job.parts, rng=np.random.default_rng(0))
        GIVEN.update(x=torch.from_numpy(np.array(job.x)), y=torch.from_numpy(job.y))
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        sys.path.insert(0, folder)
        Path("peers_config.py").write_text(CONFIG)
        flgo.gen_direct_task_from_file("task", "peers_config.py")
        option = {"num_steps": job.steps, "batch_size": job.batch, "learning_rate": job.lr, "weight_decay": job.decay}
        option |= {"proportion": (job.cohort + 0.5) / len(job.parts), "train_holdout": 0.0, "eval_interval": -1}
        option |= {"no_log_console": True, "no_tqdm": True, "gpu": []}
        algorithm = types.SimpleNamespace(Server=Server, Client=Client, __name__="given")
        self.server = flgo.init("task", algorithm, option)

    def rounds(self, cohorts):
        GIVEN["cohorts"], self.server.current_round, self.server.num_rounds = cohorts, 1, len(cohorts)
        self.server.run()

    def parameters(self):
        trained = arrays(self.server.model)
        return {name: trained[next(key for key in trained if key.endswith(name))] for name in GIVEN["job"].start}
