"""The version of Covey, here and nowhere else: the three wheels are built with it, and programs show it."""

VERSION = "0.1.0"
