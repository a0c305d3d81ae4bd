"""The state of interleaving: `groups`, which jobs share which hosts (at the coordinator); `turns`, which subtask runs
now (on each host)."""
