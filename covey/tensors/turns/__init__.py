"""Turns of jobs that share a host on purpose (Harmony §4.3.1; `agentctl submit --share-host`): `rules` decides whose
turn it is, `page` keeps that in memory which all processes of the host see, `holder` takes and gives the turns of one
process."""
