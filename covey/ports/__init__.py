"""Ports: the interfaces for everything a service may use outside itself.

Production ports are in `agent/`, simulated ones in `chaos/`; services cannot tell which they hold. asyncio itself
(tasks, `asyncio.sleep`, `loop.call_later`, queues) is allowed in services: under the simulator the running loop is a
virtual one. Everything else - clocks, chance, datagrams, links, bytes, disk, processes, probes - comes through `Env`.
"""
