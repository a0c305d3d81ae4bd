"""What people ask of jobs, beside submitting and moving them: their place in the queue, and lists."""
