"""Tune a selector with Optuna, and stop trials early that are behind after a third or two thirds of the rounds.

    pip install optuna
    python examples/tuning/tune_selector.py

The seeds of tuning are not those of the final comparison: the best of many trials looks too good on its own seeds.
"""

import optuna

import fedcohort as fc

ROUNDS = (20, 40, 60)
TUNING, REPORT = [100, 101, 102], [0, 1, 2, 3, 4]


def objective(trial):
    """Return the terminal accuracy of one choice of parameters."""
    exploration = trial.suggest_float("exploration", 0.1, 0.95)
    penalty = trial.suggest_float("penalty", 0.0, 3.0)
    oort = {"name": "oort", "exploration": exploration, "penalty": penalty}
    results = None
    for rounds in ROUNDS:
        if results is None:
            results = fc.compare({"tuned": oort}, partition="shards", rounds=rounds, seeds=TUNING, quiet=True)
        else:
            results = fc.extend(results, rounds=rounds, quiet=True)  # only the new rounds are computed
        (board,) = results.leaderboards()
        trial.report(board.rows[0].terminal.mean, rounds)
        if trial.should_prune():
            raise optuna.TrialPruned
    return board.rows[0].terminal.mean


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=3))
    study.optimize(objective, n_trials=12)
    tuned = {"name": "oort", **study.best_params}
    print(fc.compare({"oort": {}, "tuned": tuned}, baseline="oort", partition="shards", seeds=REPORT, quiet=True))
