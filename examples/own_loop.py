"""A federation of your own: a session with a journal, losses on demand, failures, explanations, a restart.

python examples/own_loop.py
"""

import tempfile
from pathlib import Path

import numpy as np

from fedcohort import ClientTable, Session, Signal, Status, create
from fedcohort.core.protocol import Answer, RoundReport, RoundRequest

NAMES = [f"hospital-{i}" for i in range(12)]
rng = np.random.default_rng(0)
loss_of = dict(zip(NAMES, rng.uniform(0.5, 2.0, 12), strict=True))  # what your clients would measure

with tempfile.TemporaryDirectory() as folder:
    journal = Path(folder) / "federation.sqlite"
    table = ClientTable(names=NAMES, sizes=rng.integers(50, 500, 12))
    session = Session(create("power-of-choice"), table, seed=1, journal=journal, shadows={"uniform": create("uniform")})

    for _ in range(5):
        awake = [name for name in NAMES if rng.random() < 0.7]
        request = RoundRequest(size=3, available=awake)
        query = session.query(request)
        answer = Answer(query, {Signal.LOSS: [loss_of[table.name(int(c))] for c in query.clients]})
        cohort = session.ask(request, answer)

        statuses = []
        for name in cohort.names:  # here you would send the model, wait, and average
            failed = rng.random() < 0.1
            loss_of[name] *= 1.0 if failed else 0.9
            statuses.append(Status.FAILED if failed else Status.OK)
        session.tell(
            RoundReport(cohort.ticket, cohort.names, status=statuses), host={"model": f"round-{cohort.round}.pt"}
        )
        print(f"round {cohort.round}: {', '.join(cohort.names)}")

    print(session.explain(4, cohort.names[0]))
    print("uniform selection would have picked:", ", ".join(session.explain(4).shadows["uniform"]))
    session.close()  # or kill -9

    with Session.open(journal) as session:
        print(f"continues with round {session.round} from {session.host_state['model']}")
