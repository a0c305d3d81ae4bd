"""`agentctl top`: the rack in a terminal, as it changes."""
