"""What is said of a script's steps: when one ends, what is reported of it, and when."""
