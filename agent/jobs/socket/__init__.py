"""`jobs.sock`: the ranks of this host that have joined, and what they share with the agent."""
