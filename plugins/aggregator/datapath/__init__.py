"""The byte path of the aggregator: `aggd`, one process per aggregating host, which outlives its agent and decides
nothing.

`sums` is one tensor's rounds without sockets; `links` is one worker's connection; `aggd` is the process around them.
"""
