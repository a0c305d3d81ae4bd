"""Decisions of interleaving: what a group achieves (`model`); which job goes first (`order`); which jobs, in which
groups, on how many hosts (`assign`, `schedule`, `polish`); what to change when a job comes or goes (`regroup`); how
much input data to keep on disk (`spill`)."""
