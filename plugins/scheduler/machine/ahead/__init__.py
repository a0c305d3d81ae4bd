"""The leader run ahead of time, on a copy of the log: when jobs that wait will start."""
