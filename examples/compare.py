"""Compare selectors from Python, and read the results.

python examples/compare.py
"""

import fedcohort as fc

if __name__ == "__main__":  # processes that share the runs import this file again
    results = fc.compare(
        {"uniform": {}, "fedcbs": {}, "fedcor": {"warmup": 8}},
        data="digits",
        clients=30,
        cohort=5,
        rounds=30,
        seeds=2,
        targets=[0.7],
        overrides={"run.terminal": 5, "run.eval_every": 1},
    )
    print(results)  # the leaderboard; in a notebook, write just results
    for row in results.leaderboards()[0].rows:
        print(f"{row.label:10} terminal accuracy {row.terminal.mean:.3f}, mean QCID {row.qcid.mean:.3f}")
