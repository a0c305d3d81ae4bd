"""A sweep by Optuna over a grid, whose trials lie in a database in the working directory."""

import time

import numpy as np
import optuna
from points import say_digest

optuna.logging.set_verbosity(optuna.logging.WARNING)
GRID = {"rate": [0.01 * each for each in range(1, 9)], "width": [4, 8, 16, 32]}


def objective(trial):
    rate, width = trial.suggest_float("rate", 0, 1), trial.suggest_int("width", 1, 64)
    time.sleep(0.15)
    return (rate - 0.05) ** 2 + (width - 16) ** 2 / 1e4


study = optuna.create_study(
    study_name="sweep", storage="sqlite:///sweep.db", sampler=optuna.samplers.GridSampler(GRID), load_if_exists=True
)
done = [trial for trial in study.trials if trial.state.is_finished()]
if done:
    print(f"continues with trial {len(done)}", flush=True)


def note(_, trial):
    with open("trials.txt", "a") as trials:
        print(trial.number, trial.value, file=trials)


study.optimize(objective, n_trials=32 - len(done), callbacks=[note])
say_digest(np.array([study.best_params["rate"], study.best_params["width"]]))
