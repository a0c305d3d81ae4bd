"""`covey-sim jobs`: a trace of jobs under a scheduling policy."""
