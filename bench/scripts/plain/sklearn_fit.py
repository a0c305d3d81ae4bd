"""scikit-learn learns batch by batch, and joblib keeps the classifier; features are made by joblib's processes."""

import os
import time

import joblib
import numpy as np
from points import READ_S, say_digest, spiral
from sklearn.linear_model import SGDClassifier


def features(step):
    points, sides = zip(*(spiral(step * 8 + each) for each in range(8)), strict=True)
    return np.sin(np.array(points) @ np.arange(32).reshape(2, 16)), np.array(sides)


if __name__ == "__main__":
    begin, learns = 0, SGDClassifier(random_state=0)
    if os.path.exists("learnt.joblib"):
        begin, learns = joblib.load("learnt.joblib")
        print(f"continues with step {begin}", flush=True)
    made = joblib.Parallel(n_jobs=2)(joblib.delayed(features)(step) for step in range(200))
    for step in range(begin, 200):
        time.sleep(8 * READ_S)
        learns.partial_fit(*made[step], classes=[0, 1])
        if step % 10 == 9:
            joblib.dump((step + 1, learns), "new.joblib")
            os.replace("new.joblib", "learnt.joblib")
    say_digest(learns.coef_)
