"""A training script in a crowd of names: beside it lie its own `agent.py` and `plugins/`, which it imports.

    agentctl submit --name crowded -- python examples/crowded/train.py

From Covey it imports `covey`, whose wheel holds no other package; so whatever a project calls its own modules, it
imports those, even where the whole of Covey is installed in the same environment.
"""

import agent
import covey
import plugins

STEPS = 20


def main() -> None:
    print(f"agent: {agent.WHOSE} ({agent.__file__})")
    print(f"plugins: {plugins.WHOSE} ({plugins.__file__})")
    with covey.join() as job:
        state = 8.0
        for _ in range(STEPS):
            state += agent.act(state)
            job.step(reward=plugins.reward(state))
        print(f"rank {job.rank} of {job.world_size} on {job.host}: reward {plugins.reward(state):.6f}")


if __name__ == "__main__":
    main()
