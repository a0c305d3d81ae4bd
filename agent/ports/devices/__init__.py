"""Devices that jobs of this host share, behind one interface (`covey.ports.devices.Devices`), from one of three
backends.

    nvml        NVIDIA GPUs and MIG instances, by the driver          nvml.py   (nvml_reads.py, xid_events.py)
    cpu         a device is a set of cores and a memory size          cpu.py    (rank_trees.py, suspensions.py)
    simulated   devices that do what a story says, or nothing         sim.py

`[gpus]` of agent.toml names the backend (settings.py), `choice.py` makes it. The scheduler counts what `gpus()` lists,
plugins ask `Probes.devices`: both come from one backend, so they are the same devices. One suite of tests holds for all
backends (tests/agent/ports/devices/test_conformance.py).

A driver may hang and may say nonsense. Every call runs in a thread with a deadline (`driver_calls.py`), and every
figure is bounded before others see it (`bounds.py`).
"""
