"""The version of Covey, defined here only: the three wheels are built with it, and programs show it."""

VERSION = "0.1.0"
