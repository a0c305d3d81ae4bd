"""The newest facts of every host, told on."""
