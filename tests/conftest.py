"""What holds for every test: this machine may be noisy, and a failure must be repeatable."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "noisy",
    deadline=None,  # speed is measured in benchmarks, never by a timed test
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,  # the gate tries the same examples each time; people look for new ones
    print_blob=True,
)
settings.load_profile("noisy")
