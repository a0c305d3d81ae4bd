"""The newest facts of every host, passed on."""
