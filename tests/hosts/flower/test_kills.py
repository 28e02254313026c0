"""A server that is killed again and again, at random moments, ends with the model of one that nobody disturbed.

Once with the server in a process of its own and the clients in it, where a round takes milliseconds and kills fall into
every part of one; once on a deployment of real processes, where most of them fall into the wait for clients.
"""

from __future__ import annotations

import inspect
import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg, Strategy
from safetensors.numpy import load_file

from fedcohort.hosts.flower import cohort_client, failures
from fedcohort.journal import is_blank, read_journal

NODES, COHORT = 3, 2
_FOREVER = 1_000_000
_CONFIG = {"rounds": 1, "journal": "", "strategy": ""}


def strategy_of(name: str) -> Strategy:
    # Noise is drawn anew after a kill; without it a private run can be compared as well.
    if name == "private":
        return DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.0, 0.5, COHORT)
    return FedAdam(fraction_evaluate=0.0)


def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def train(message: Message, context: Context) -> RecordDict:
    net = module()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number = int(context.node_config["partition-id"])
    draw = torch.Generator().manual_seed(100 * int(message.content["config"]["server-round"]) + number)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(16, 3, generator=draw)).square().mean().backward()
        optimizer.step()
    return RecordDict(
        {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": 10 * (1 + number)})}
    )


# The apps of the deployment are made of the same functions.
_SERVER = f"""
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg, Strategy
from fedcohort.hosts.flower import CohortStrategy
from small.client import module

app = ServerApp()
COHORT = {COHORT}

{inspect.getsource(strategy_of)}

@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    torch.manual_seed(0)
    strategy = CohortStrategy(
        "uniform", strategy_of(config["strategy"]), journal=config["journal"], seed=3, cohort_size=COHORT,
        wait_for={NODES}, deadline=900.0, patience=900.0, tries={_FOREVER},
    )
    strategy.start(grid, ArrayRecord(module().state_dict()), num_rounds=config["rounds"])
"""
_CLIENT = f"""
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from fedcohort.hosts.flower.client import cohort_client

app = ClientApp()

{inspect.getsource(module)}

{inspect.getsource(train)}

@app.train()
def reply(message: Message, context: Context) -> Message:
    return Message(train(message, context), reply_to=message)

app = cohort_client(app)
"""


def rounds_told(journal: Path) -> int:
    if is_blank(journal):
        return 0
    record = read_journal(journal)
    try:
        return sum(row.told_at is not None for row in record.cohorts())
    finally:
        record.close()


def record_of(journal: Path) -> Any:
    record = read_journal(journal)
    try:
        return [(row.round, row.clients.tolist()) for row in record.cohorts()], [
            (r.ticket, r.client, r.status, r.kept) for r in record.replies()
        ]
    finally:
        record.close()


def same_run(folder: Path, rounds: int, remembered: str) -> None:
    """Whether the run that was killed has the cohorts, replies, model and strategy's memory of the other."""
    killed, whole = folder / "killed", folder / "whole"
    assert not failures(killed)
    assert record_of(killed) == record_of(whole)
    assert Counter(round_ for round_, _ in record_of(killed)[0]) == Counter(range(rounds))
    last = f"after-{rounds:06d}.safetensors"
    models = [load_file(folder / f"{journal.name}.checkpoints" / last) for journal in (killed, whole)]
    assert models[0].keys() == models[1].keys() and any(remembered in key for key in models[0])
    for key, array in models[0].items():
        assert (array.dtype, array.shape) == (models[1][key].dtype, models[1][key].shape)
        np.testing.assert_array_equal(array, models[1][key], err_msg=key)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("strategy", "remembered"), [("adam", "m_t"), ("private", "num_batches_tracked")])
def test_killed_in_every_part_of_a_round(strategy: str, remembered: str, kit: Any, tmp_path: Path) -> None:
    """40 times SIGKILL; the process is forked, so that it begins at once."""
    processes = multiprocessing.get_context("fork")
    draw = np.random.default_rng(7)
    seen: list[int] = []

    def play(journal: Path, rounds: int, first: int) -> None:
        torch.manual_seed(0)
        fleet = kit.Fleet()
        for number in range(NODES):
            fleet.grid.add(
                fleet.node(number, cohort_client(kit.client_app(train), kit.ANSWERS)), node_id=first + number
            )
        made = fleet.strategy(
            "uniform", strategy_of(strategy), journal=journal, seed=3, cohort_size=COHORT, tries=_FOREVER
        )
        made.start(fleet.grid, ArrayRecord(module().state_dict()), rounds)

    def started(journal: Path, rounds: int) -> Any:
        process = processes.Process(target=play, args=(journal, rounds, 1000 * (len(seen) + 1)))
        process.start()
        return process

    play(tmp_path / "first", 2, 1)  # torch imports much when it first takes a step; a fork then need not
    begun = time.monotonic()
    started(tmp_path / "measure", 8).join()
    longest = time.monotonic() - begun  # of opening a journal and a few rounds, on this machine and today
    while len(seen) < 40:
        process = started(tmp_path / "killed", _FOREVER)
        time.sleep(float(draw.uniform(0, longest)))
        assert process.is_alive()
        process.kill()
        process.join()
        seen.append(rounds_told(tmp_path / "killed"))
        if seen[-1] == ([0, *seen])[-2]:
            longest *= 1.1  # no round was told: the machine has more to do than when it was measured
    rounds = seen[-1] + 2
    for journal in ("killed", "whole"):
        process = started(tmp_path / journal, rounds)
        process.join()
        assert process.exitcode == 0
    print(f"{strategy}: killed 40 times after so many rounds: {seen}; {rounds} rounds in all")
    assert len(set(seen)) > 5, seen
    same_run(tmp_path, rounds, remembered)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("strategy", ["adam", "private"])
def test_killed_on_a_deployment(strategy: str, kit: Any, tmp_path: Path) -> None:
    """Five times SIGKILL for the ServerApp's process."""
    app = kit.flower_app(tmp_path / "app", "small", _SERVER, _CLIENT, _CONFIG)
    draw = np.random.default_rng(7)
    seen: list[int] = []
    names = [f'client-name="client-{i}"' for i in range(NODES)]
    with kit.Loopback(tmp_path / "home", nodes=NODES, node_config=names) as federation:

        def start(journal: str, rounds: int) -> Any:
            config = {"rounds": rounds, "journal": str(tmp_path / journal), "strategy": strategy}
            return federation.start_run(app, config)

        while len(seen) < 5:
            run = start("killed", _FOREVER)
            # While it trains, averages and saves, or while it starts, opens and reads.
            word = "valid models" if draw.random() < 0.8 else "Starting"
            federation.watch(run, lambda run=run, word=word: word in run.log_file.read_text(), 900)
            time.sleep(float(draw.uniform(0, 6)))
            if federation.kill_serverapp():
                seen.append(rounds_told(tmp_path / "killed"))
        rounds = seen[-1] + 2
        for journal in ("killed", "whole"):
            done = federation.wait(start(journal, rounds), 900)
            assert done.status == 0 and "raised an exception" not in done.log, done.log
    print(f"{strategy}: killed 5 times after so many rounds: {seen}; {rounds} rounds in all")
    same_run(tmp_path, rounds, "m_t" if strategy == "adam" else "num_batches_tracked")
