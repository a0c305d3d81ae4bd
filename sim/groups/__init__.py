"""`covey-sim groups`: jobs on one set of hosts that take turns."""
