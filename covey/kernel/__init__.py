"""Wrappers of Linux kernel services for a process: shared memory, futexes, page faults, forks."""
