"""This project's own `agent` package: a reinforcement-learning agent, for example. It has nothing to do with Covey."""

WHOSE = "the training script's own agent"


def act(state: float) -> float:
    return -0.5 * state
