"""What is expected of jobs, from those that ended: how long they hold their GPUs, and which come next."""
