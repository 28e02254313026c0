"""Flower: its simulation on Ray."""

import time

import numpy as np
import ray
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import processor_time, read
from models_torch import arrays, build

client_app = ClientApp()
LOADED = {}  # what a worker process has already read


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    if not LOADED:
        job = read(config["folder"])
        torch.set_num_threads(1)
        x, y = torch.from_numpy(np.array(job.x)), torch.from_numpy(job.y)
        LOADED.update(job=job, x=x, y=y, model=build(job), rng=np.random.default_rng())
    job, model = LOADED["job"], LOADED["model"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, weight_decay=job.decay)
    for batch in job.batches(config["client"], LOADED["rng"]):
        optimizer.zero_grad()
        F.cross_entropy(model(LOADED["x"][batch]), LOADED["y"][batch]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(job.parts[config["client"]])})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class Given(FedAvg):
    """Federated averaging over prescribed cohorts; it does not matter which node plays which client."""

    def configure_train(self, server_round, arrays, config, grid):
        self.times.append((time.perf_counter(), processor_time()))
        messages = []
        for node, client in zip(grid.get_node_ids(), self.cohorts[server_round - 1], strict=False):
            record = RecordDict(
                {"arrays": arrays, "config": ConfigRecord({"client": client, "folder": str(self.folder)})}
            )
            messages.append(Message(record, dst_node_id=node, message_type="train"))
        return messages


class Peer:
    def __init__(self, job):
        self.job, self.model = job, build(job)

    def rounds(self, cohorts):
        strategy = Given(fraction_evaluate=0.0)
        strategy.cohorts, strategy.folder, strategy.times = [cohorts[0], *cohorts], self.job.folder, []
        parameters = {}
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            while len(list(grid.get_node_ids())) < self.job.cohort:
                time.sleep(0.1)
            start = ArrayRecord(self.model.state_dict())
            strategy.start(grid, start, num_rounds=1)  # until all workers run and have read the data
            strategy.cohorts, strategy.times = cohorts, []
            result = strategy.start(grid, start, num_rounds=len(cohorts))
            self.times = strategy.times[0], (time.perf_counter(), processor_time())
            parameters.update(result.arrays.to_torch_state_dict())

        run_simulation(
            app,
            client_app,
            num_supernodes=len(self.job.parts),
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
        ray.shutdown()
        self.model.load_state_dict(parameters)

    def parameters(self):
        return arrays(self.model)
