"""Gossip: which hosts are alive, and which facts they publish: sealed datagrams (`packet`), SWIM membership,
Scuttlebutt facts.

Start at `service.py` (the socket and the timers), then `machine.py` (both planes as one machine), then
`membership/machine/membership.py`. `types.py` holds the types that all of them use and the bounds of the wire.
"""
