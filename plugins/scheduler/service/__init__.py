"""The coroutine side of the scheduler: the log, this host's ranks, reservations, and what people ask."""
