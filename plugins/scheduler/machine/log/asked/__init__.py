"""What people ask of jobs that wait or run, and the log does: hold, release, requeue, order, time limits, tasks."""
