"""Decisions of interleaving: what a group achieves (`model`); which job goes first (`order`); which jobs, in which
groups, on how many hosts (`assign`, `schedule`, `polish`); what to change when a job comes or goes (`regroup`); who
shares hosts, by the log, and who proposes (`groups`), what it proposes (`decide`), on which hosts (`hosts`); in which
order jobs take turns (`turn_order`)."""
