"""The time of whole tables compared with the engine's, on one CUDA device.

    python bench/scripts/tables_gpu.py [fmnist cifar] --folder DATA [--rounds 500] [--seeds 5] [--processes 1 4 8 12]

FedCor's Table 1: its three settings, six selectors and five seeds make 90 runs. "engine" trains random cohorts of the
same sizes and evaluates as often, all runs in one lock-step, without selector, journal or table. "whole" is the
experiment as ``fedcohort reproduce`` runs it, with this many processes. Prints one JSON line per measurement.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import merge_tables
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.simulate.runner import Simulation
from fedcohort_bench.papers.catalogue import EXHIBITS
from fedcohort_bench.papers.run import table_of

_NAMES = {"fmnist": "fedcor-table-1-fmnist", "cifar": "fedcor-table-1-cifar10"}


def experiments(kind: str, options: argparse.Namespace, processes: int) -> list[Experiment]:
    study = EXHIBITS[_NAMES[kind]].study
    built = []
    for part in study.parts:
        table = table_of(study, part, seeds=options.seeds, rounds=options.rounds, folder=options.folder)
        built.append(
            Experiment.from_dict(merge_tables(table, {"run": {"processes": processes, "device": options.device}}))
        )
    return built


def engine_seconds(experiment: Experiment, rounds: int) -> tuple[float, int]:
    """Return the seconds of some rounds of all runs without their hosts, and the number of these rounds."""
    prepared = prepare(experiment, experiment.options.device)
    generator = np.random.default_rng(0)
    spent, made = 0.0, 0
    for number in prepared.groups:
        group = prepared.group(number, journals=None, device=experiment.options.device, workers=None)
        runs, every = group.runs, group.runs[0].plan.options.eval_every
        cohorts = [generator.permutation(len(run.federation))[: run.policy.size] for run in runs]
        seeds = np.repeat([run.plan.seed for run in runs], [len(cohort) for cohort in cohorts])
        for turn in range(rounds + 5):
            if turn == 5:
                torch.cuda.synchronize()
                began = time.perf_counter()
            cohorts = [generator.permutation(len(run.federation))[: run.policy.size] for run in runs]
            for run in runs:
                run.round = turn
            group.batch.train(runs, cohorts, seeds, None)
            if turn % every == 0:
                group.engine.evaluate(group.models)
        torch.cuda.synchronize()
        spent += time.perf_counter() - began
        made += rounds * len(runs)
        group.close()
    return spent, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["fmnist"])
    parser.add_argument("--folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 4, 8, 12])
    parser.add_argument("--engine-rounds", type=int, default=100)
    options = parser.parse_args()
    for kind in options.kinds:
        if options.engine_rounds:
            parts = [engine_seconds(experiment, options.engine_rounds) for experiment in experiments(kind, options, 1)]
            own = 1e3 * sum(spent for spent, _ in parts) / sum(made for _, made in parts)
            print(json.dumps({"table": kind, "what": "engine", "ms_a_run_and_round": round(own, 3)}), flush=True)
        for processes in options.processes:
            began = time.perf_counter()
            made = 0
            with tempfile.TemporaryDirectory() as folder:
                for i, experiment in enumerate(experiments(kind, options, processes)):
                    Simulation(experiment, Path(folder) / str(i)).run()
                    made += sum(plan.options.rounds for plan in experiment.plans)
            took = time.perf_counter() - began
            result = {"table": kind, "what": "whole", "processes": processes, "seconds": round(took, 1)}
            print(json.dumps({**result, "ms_a_run_and_round": round(1e3 * took / made, 3)}), flush=True)


if __name__ == "__main__":
    main()
