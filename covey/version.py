"""The version of Covey, in this place alone: the three wheels are built with it, and programs say it."""

VERSION = "0.1.0"
