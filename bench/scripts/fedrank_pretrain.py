"""Pre-train FedRank's network: watch other selectors in simulated federations, and learn to rank like them.

    python bench/scripts/fedrank_pretrain.py

writes ``src/fedcohort/selectors/baselines/fedrank/weights.json``, and prints how often the network orders a pair of
clients like the expert, on federations that it was trained on and on others. On the same machine it always writes the
same file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
from fedrank_imitation import Demonstration, agreement, imitate

from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.core.signals import Signal
from fedcohort.selectors.baselines.fedrank.network import FEATURES
from fedcohort.selectors.baselines.fedrank.selector import RankState
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.prepare import prepare

WEIGHTS = Path(__file__).parents[2] / "src/fedcohort/selectors/baselines/fedrank/weights.json"
EXPERTS = ("oort", "active-fl", "power-of-choice")
SETTINGS = [
    {"partition": {"name": "dirichlet", "clients": 40, "alpha": 0.1}},
    {"partition": {"name": "dirichlet-qp", "clients": 40, "alpha": 0.3}},
    {"partition": {"name": "iid", "clients": 40}},
]


class WatchedExpert:
    """An expert whose decisions are recorded."""

    def __init__(self, expert: Selector) -> None:
        self.expert = expert
        self.shown: list[Demonstration] = []
        self.known: RankState | None = None

    def wrapped(self) -> Selector:
        """Return a selector that acts like the expert and records its decisions."""
        watched = self

        class Recorder(type(self.expert)):  # type: ignore[misc]
            @property
            def requires(self):
                return super().requires | {Signal.SIZES, Signal.LOSS, Signal.DURATION}

            def select(self, state, slate, answer, rng):
                if watched.known is None:
                    watched.known = RankState.fresh(slate.clients.n)
                seen = watched.known.features(slate)
                cohort, state = super().select(state, slate, answer, rng)
                chosen = np.isin(slate.candidates, cohort.clients)
                if not chosen.all():
                    watched.shown.append(Demonstration(seen, chosen))
                watched.known = watched.known.after_choice(cohort)
                return cohort, state

            def update(self, state, outcome):
                watched.known = watched.known.after_report(outcome)
                return super().update(state, outcome)

        values = {field.name: getattr(self.expert, field.name) for field in dataclasses.fields(self.expert)}
        return Recorder(**values)


def demonstrations(seed: int, rounds: int) -> list[Demonstration]:
    """Return the decisions of all experts in all settings."""
    demonstrated: list[Demonstration] = []
    for scenario in SETTINGS:
        latency = {"name": "shifted-exponential"}
        table = {
            "seeds": [seed],
            "data": {"name": "synthetic", "samples": 2000, "test_samples": 100, "classes": 10, "shape": [20]},
            "scenario": {**scenario, "latency": latency},
            "model": {"name": "logistic"},
            "local": {"batch_size": 16, "steps": 5, "lr": 0.1},
            "run": {"rounds": rounds, "cohort": 6, "eval_every": rounds},
            "selectors": {name: {} for name in EXPERTS},
        }
        prepared = prepare(Experiment.from_dict(table), "cpu")
        watched = [WatchedExpert(SELECTORS.create(plan.selector.name)) for plan in prepared.experiment.plans]
        plans = tuple(
            dataclasses.replace(plan, selector=one.wrapped())
            for plan, one in zip(prepared.experiment.plans, watched, strict=True)
        )
        prepared = dataclasses.replace(prepared, experiment=dataclasses.replace(prepared.experiment, plans=plans))
        for number in range(len(prepared.groups)):
            group = prepared.group(number, journals=None, device="cpu", workers=1)
            group.start()
            while not group.done:
                group.step()
            group.close()
        demonstrated += [one for expert in watched for one in expert.shown]
    return demonstrated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3, help="federations of each setting to learn from")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    shown = [one for seed in range(args.seeds) for one in demonstrations(seed, args.rounds)]
    others = demonstrations(1000, args.rounds)
    network = imitate(shown, np.random.default_rng(0))
    parts = {name: np.round(getattr(network, name), 6).tolist() for name in ("weight", "bias", "output")}
    facts = {
        "made by": "bench/scripts/fedrank_pretrain.py",
        "experts": list(EXPERTS),
        "features": list(FEATURES),
        "decisions": len(shown),
        "pairs in the expert's order": round(agreement(network, shown), 3),
        "the same, other federations": round(agreement(network, others), 3),
    }
    args.out.write_text(json.dumps({**facts, "network": parts}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
