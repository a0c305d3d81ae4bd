"""What interleaving remembers: `groups`, which jobs share which hosts (at the home); `turns`, which subtask runs now
(on each host)."""
