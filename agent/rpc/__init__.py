"""Messages between agents, and the answers to their questions."""
