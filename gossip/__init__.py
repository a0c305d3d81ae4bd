"""Who is there, and what can they spare: sealed datagrams (`packet`), SWIM membership, Scuttlebutt spreading.

Start at `service.py` (the socket and the timers), then `machine.py` (both planes as one machine), then
`membership/machine/membership.py`. `types.py` holds what all of them say, the settings, and the bounds of the wire.
"""
