"""Reports on a script's steps: when a step ends, what is reported of it, and when."""
