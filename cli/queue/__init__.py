"""Commands for jobs that wait: hold, release, requeue, their place among others, their time limit."""
