"""The state of interleaving: `pools`, the jobs that share hosts and what a host wants of them; `measured` and `timed`,
how long their parts take; `turns`, which subtask runs now on a host (in the simulator only)."""
