"""The scheduler's messages: what a person asks for (`spec`), what the replicated log holds (`commands`), and what hosts
tell one another (`wire`)."""
