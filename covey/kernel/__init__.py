"""What the Linux kernel gives a process: shared memory, futexes, page faults, forks."""
