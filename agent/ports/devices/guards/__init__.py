"""Guards: processes that let ranks run again when the agent that stopped them is gone."""
