"""Processes that let ranks go on when the agent that stopped them is gone."""
