"""The state of every host: alive, suspect, gone, left."""
