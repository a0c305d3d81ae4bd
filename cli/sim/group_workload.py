"""Jobs in the manner of Harmony's 80 (§4.4.2): four applications, two data sets each, ten settings of each.

The paper prints the distribution of its jobs without numbers (figure 4.9), so ours is drawn from what it does print:
the mean iteration of each application on 16 hosts (table 2.1) and the sizes of data sets and models (table 4.1). The
shares of computing are such that isolated jobs, each on as many hosts as keep processors busiest, keep them 58 % busy
in the mean of 20 seeds, as the paper's did (93.2 % / 1.60); what groups achieve with them had no say. How many
iterations jobs need is not told at all: `SPREAD` is ours, and is swept in `bench/interleave.py`.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from covey.core import JobId
from plugins.interleave.policy.model import Profile

PROFILED_ON = 16
"""Hosts on which the paper measured its jobs (§4.4.2)."""
ITERATIONS = 150
"""Of a job, in the mean."""
SPREAD = 0.35
"""Standard deviation of the logarithm of the number of iterations: in most of 20 jobs the longest runs four times as
often as the shortest."""
SETTINGS = 0.7
"""A setting (rank, topics, classes) makes iterations longer or shorter by up to 2 to this."""
DATA = 0.3
"""The larger data set makes iterations longer by this, the smaller shorter."""
BALANCES = 0.2
"""A setting shifts the share of computing by up to this."""


@dataclass(frozen=True)
class App:
    iteration_s: float
    """On 16 hosts (table 2.1)."""
    computing: float
    """Share of it."""
    inputs_gb: tuple[float, float]
    models_gb: tuple[float, float]


APPS = {
    "NMF": App(48.3, 0.61, (45.6, 91.2), (1.0, 5.0)),
    "LDA": App(94.5, 0.57, (4.3, 0.6), (2.1, 1.1)),
    "MLR": App(32.4, 0.67, (78.4, 155.0), (12.0, 24.0)),
    "Lasso": App(28.9, 0.53, (78.4, 155.0), (12.0, 24.0)),
}
"""Computing: the applications in the order of figure 4.3 (NMF and MLR compute more, Lasso less); see above."""


@dataclass
class Job:
    """One job as it is; nobody but the cluster sees it so."""

    profile: Profile
    iterations: int
    app: str = ""
    submit_s: float = 0.0
    input_gb: float = 0.0
    model_gb: float = 0.0

    @property
    def lean(self) -> float:
        """Computing to communicating on 16 hosts (figure 4.9b)."""
        return self.profile.work_s / PROFILED_ON / self.profile.net_s


def workload(count: int, rng: random.Random, spread: float = SPREAD, iterations: int = ITERATIONS) -> list[Job]:
    """`count` jobs in an order of chance, all there at 0."""
    found: list[Job] = []
    names = list(APPS)
    for n in range(count):
        app = APPS[names[n % 4]]
        which = (n // 4) % 2
        larger = 1 if app.inputs_gb[which] == max(app.inputs_gb) else -1
        took_s = app.iteration_s * (1 + DATA * larger) * 2 ** rng.uniform(-SETTINGS, SETTINGS)
        computing = min(0.9, max(0.1, app.computing + rng.uniform(-BALANCES, BALANCES)))
        profile = Profile(JobId(f"j{n + 1}"), took_s * computing * PROFILED_ON, took_s * (1 - computing))
        turns = max(5, round(iterations * rng.lognormvariate(-(spread**2) / 2, spread)))
        found.append(Job(profile, turns, names[n % 4], 0.0, app.inputs_gb[which], app.models_gb[which]))
    rng.shuffle(found)
    return found


def leaning(jobs: Sequence[Job], count: int, computing: bool) -> list[Job]:
    """The `count` jobs that compute most, or that communicate most (figure 4.13), in the order they had."""
    chosen = sorted(jobs, key=lambda job: job.lean, reverse=computing)[:count]
    names = {job.profile.job for job in chosen}
    return [job for job in jobs if job.profile.job in names]


def arriving(jobs: Sequence[Job], rng: random.Random, every_s: float) -> list[Job]:
    """The same jobs, `every_s` apart in the mean, as it happens (Poisson)."""
    at_s = 0.0
    found: list[Job] = []
    for job in jobs:
        found.append(replace(job, submit_s=at_s))
        at_s += rng.expovariate(1 / every_s) if every_s > 0 else 0.0
    return found


def bursting(jobs: Sequence[Job], rng: random.Random, every_s: float, burst: float = 8.0) -> list[Job]:
    """The same jobs in bursts of `burst` in the mean, each at one moment, `every_s` a job in the mean over all: the
    spikes of a cluster's log."""
    at_s, left = 0.0, 0
    found: list[Job] = []
    for job in jobs:
        if left == 0:
            at_s += rng.expovariate(1 / (every_s * burst)) if found and every_s > 0 else 0.0
            left = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / burst)) if burst > 1 else 1
        found.append(replace(job, submit_s=at_s))
        left -= 1
    return found
