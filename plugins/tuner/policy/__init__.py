"""Decisions of the tuner: how long an epoch takes (`cost`), which hosts should work and which serve (`search`), which
host holds which whole blocks (`blocks`), and how to get there (`plan`)."""
