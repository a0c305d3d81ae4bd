"""Decisions of the tuner: which host of a live job has how many ranks and tables (`division`), and when a change is
worth it (`gain`). As the paper has them: how long an epoch takes (`cost`), which hosts should work and which serve
(`search`), which host holds which whole blocks (`blocks`), and how to get there (`plan`, `steps`)."""
