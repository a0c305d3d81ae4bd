"""This project's own `agent`: a reinforcement-learning agent, say. Nothing of Covey's."""

WHOSE = "the training script's own agent"


def act(state: float) -> float:
    return -0.5 * state
