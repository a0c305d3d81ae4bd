"""Callbacks of training loops that other libraries run (`covey.callbacks`)."""
