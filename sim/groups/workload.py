"""Jobs in the manner of Harmony's 80 (§4.4.2): four applications, two data sets each, ten settings of each.

The paper prints the distribution of its jobs without numbers (figure 4.9) and nothing of their lengths. Iterations on
16 hosts are those of table 2.1, sizes those of table 4.1. The rest is inferred from what it prints of its isolated
and naive runs and of its own system, which `PRINTED` of the plugin's machine represents; what our rules achieve was not
used.

- *Share of computing* (`APPS`). COMP and COMM were busy 93.2 : 83.1 % at 100 / 6.7 = 15 hosts a group, and a COMM
  does not fill the wire: so both take about as long there. Isolated jobs kept CPUs 56.5 % busy (93.2 / 1.65). With
  the shares here they are 58 and 59 % on tuning seeds 101 and 102; with shares 0.08 higher they were busier, and
  groups fewer.
- *Lengths* (`LONG`, `RATIO`). 27.2 jobs ran at once, so by Little's law the mean completion time was at least 0.34 of
  the makespan, and 2.11 / 1.60 times less than isolated jobs in order of submission, about half of theirs: 0.38. So a
  third of the jobs was there nearly all the time, and two thirds ended early; which ones, no job said. One wide
  distribution (log-uniform over 5, 10, 20 and 30) does not do: either completion stays above 0.4, or its few longest
  jobs leave isolated CPUs 34 to 53 % busy. Two classes do: naive 1.12x to 1.14x in completion time (1.11x there), the
  printed rules 1.70x with 0.34 and 0.40 of the makespan.
- *Order* of submission: by chance. In the order of table 4.1, or long ones first, naive sharing gains 1.3x to 2.5x.

The printed rules stay below the paper's completion time and CPU here (`docs/results/interleave.md`): the tail of this
workload is longer than that of figure 4.11, so it is not the paper's workload, only the nearest that was found.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from covey.core.ids import JobId
from plugins.interleave.policy.model import JobProfile

PROFILED_ON = 16
"""Hosts on which the paper measured its jobs (§4.4.2)."""
LONG = 0.375
"""Share of long jobs: three in eight, 30 of 80."""
RATIO = 20.0
"""How many times the work of a short job a long one does, in the mean."""
SPREAD = 0.2
"""Standard deviation of the logarithm of a length within its class. Ours."""
LENGTH_S = 7500.0
"""Seconds of a job alone on 16 hosts, in the mean of all. Ours: isolated jobs take 26 to 28 hours in all."""
SETTINGS = 0.7
"""Largest exponent of 2 by which a setting (rank, topics, classes) makes iterations longer or shorter."""
DATA = 0.3
"""Share by which the larger data set makes iterations longer, and the smaller one shorter."""
BALANCES = 0.2
"""Largest shift of the share of computing by a setting."""


@dataclass(frozen=True)
class App:
    iteration_s: float
    """Seconds of an iteration on 16 hosts (table 2.1)."""
    computing: float
    """Share of the iteration that is computing."""
    inputs_gb: tuple[float, float]
    models_gb: tuple[float, float]


APPS = {
    "NMF": App(48.3, 0.53, (45.6, 91.2), (1.0, 5.0)),
    "LDA": App(94.5, 0.49, (4.3, 0.6), (2.1, 1.1)),
    "MLR": App(32.4, 0.59, (78.4, 155.0), (12.0, 24.0)),
    "Lasso": App(28.9, 0.45, (78.4, 155.0), (12.0, 24.0)),
}
"""Applications. Their shares of computing are in the order of figure 4.3 (NMF and MLR compute more, Lasso less); see
the module's docstring."""


@dataclass
class Job:
    """One job as it really is; only the cluster reads these numbers, the machine measures them."""

    profile: JobProfile
    iterations: int
    app: str = ""
    submit_s: float = 0.0
    input_gb: float = 0.0
    model_gb: float = 0.0

    @property
    def lean(self) -> float:
        """Ratio of computing to communicating on 16 hosts (figure 4.9b)."""
        return self.profile.work_s / PROFILED_ON / self.profile.net_s


def workload(count: int, rng: random.Random, spread: float = SPREAD, ratio: float = RATIO) -> list[Job]:
    """`count` jobs in random order, all submitted at 0."""
    found: list[Job] = []
    names = list(APPS)
    is_long = [n < round(LONG * count) for n in range(count)]
    rng.shuffle(is_long)
    short_s = LENGTH_S / (LONG * ratio + 1 - LONG)
    for n in range(count):
        app = APPS[names[n % 4]]
        which = (n // 4) % 2
        larger = 1 if app.inputs_gb[which] == max(app.inputs_gb) else -1
        took_s = app.iteration_s * (1 + DATA * larger) * 2 ** rng.uniform(-SETTINGS, SETTINGS)
        computing = min(0.9, max(0.1, app.computing + rng.uniform(-BALANCES, BALANCES)))
        profile = JobProfile(JobId(f"j{n + 1}"), took_s * computing * PROFILED_ON, took_s * (1 - computing))
        length_s = short_s * (ratio if is_long[n] else 1) * rng.lognormvariate(-(spread**2) / 2, spread)
        turns = max(5, round(length_s / took_s))
        found.append(Job(profile, turns, names[n % 4], 0.0, app.inputs_gb[which], app.models_gb[which]))
    rng.shuffle(found)
    return found


def leaning(jobs: Sequence[Job], count: int, computing: bool) -> list[Job]:
    """The `count` jobs that compute most, or that communicate most (figure 4.13), in the order they had."""
    chosen = sorted(jobs, key=lambda job: job.lean, reverse=computing)[:count]
    names = {job.profile.job for job in chosen}
    return [job for job in jobs if job.profile.job in names]


def arriving(jobs: Sequence[Job], rng: random.Random, every_s: float) -> list[Job]:
    """These jobs, submitted at random moments (Poisson), `every_s` apart in the mean."""
    at_s = 0.0
    found: list[Job] = []
    for job in jobs:
        found.append(replace(job, submit_s=at_s))
        at_s += rng.expovariate(1 / every_s) if every_s > 0 else 0.0
    return found


def bursting(jobs: Sequence[Job], rng: random.Random, every_s: float, burst: float = 8.0) -> list[Job]:
    """These jobs in bursts of `burst` in the mean, each submitted at one moment, `every_s` a job in the mean over all:
    the spikes of a cluster's log."""
    at_s, left = 0.0, 0
    found: list[Job] = []
    for job in jobs:
        if left == 0:
            at_s += rng.expovariate(1 / (every_s * burst)) if found and every_s > 0 else 0.0
            left = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / burst)) if burst > 1 else 1
        found.append(replace(job, submit_s=at_s))
        left -= 1
    return found
