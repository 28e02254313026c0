"""Your own federation: a session with a journal, losses on demand, failures, explanations, a restart.

python examples/own_loop.py
"""

import tempfile
from pathlib import Path

import numpy as np

import fedcohort as fc

NAMES = [f"hospital-{i}" for i in range(12)]
rng = np.random.default_rng(0)
loss_of = dict(zip(NAMES, rng.uniform(0.5, 2.0, 12), strict=True))  # what your clients would measure


def measure(names):
    """Return the losses of these clients, as your federation would answer."""
    return [loss_of[name] for name in names]


with tempfile.TemporaryDirectory() as folder:
    journal = Path(folder) / "federation.sqlite"
    table = fc.ClientTable(names=NAMES, sizes=rng.integers(50, 500, 12))
    session = fc.Session("power-of-choice", table, seed=1, journal=journal, shadows={"uniform": "uniform"})

    for _ in range(5):
        awake = [name for name in NAMES if rng.random() < 0.7]
        cohort = session.ask(fc.RoundRequest(size=3, available=awake), loss=measure)
        failed = {name: rng.random() < 0.1 for name in cohort.names}  # send the model, wait, and average here
        for name in cohort.names:
            loss_of[name] *= 1.0 if failed[name] else 0.9
        status = [fc.Status.FAILED if failed[name] else fc.Status.OK for name in cohort.names]
        session.tell(cohort, status=status, host={"model": f"round-{cohort.round}.pt"})
        print(f"round {cohort.round}: {', '.join(cohort.names)}")

    print(session.explain(4, cohort.names[0]))
    print("uniform selection would have picked:", ", ".join(session.explain(4).shadows["uniform"]))
    session.close()  # or kill -9

    with fc.Session.open(journal) as session:
        print(f"continues with round {session.round} from {session.host_state['model']}")
