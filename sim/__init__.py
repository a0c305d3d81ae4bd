"""covey-sim: what the six systems would decide for a workload, in virtual time, on the policies that agents call."""
