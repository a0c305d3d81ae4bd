"""The plugins of one agent, and the facts that they tell one another."""
