"""Other users of this host, as the agent reaches them: through the starter, and in the folders of their jobs."""
