"""Jobs for the aggregators: the four models of the AutoPS thesis and a workload of them by seed.

Tensors and sizes are from its table 4.2. Of CPU use its text says 16 % for VGG19 on one server and less than half for
the others; the figure that shows them is not printed in the text. So use per server is drawn from 15 to 50 %, and
iterations are assumed (`MODELS`). In the workload a job with several servers keeps each of them as busy as its
only one would be, which is unfavourable to sharing: in the thesis the same work is split among them.
"""

import random
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from covey.core.ids import JobId
from plugins.aggregator.policy.assign import AggregationProfile, Tensor, largest_first
from plugins.aggregator.policy.cycle import LOSS_LIMIT
from sim.jobs.trace import Trace

PUSHING = 0.65
"""Part of an iteration from the first push to the last: the backward pass is about two thirds of the compute time."""
PARTS_OF_ITERATION = 8
"""A tensor whose sum takes more than this part of an iteration is sent in parts, and each part is placed."""


@dataclass(frozen=True)
class Model:
    name: str
    tensors: int
    bytes: int
    """Bytes of all tensors (table 4.2)."""
    period_us: int
    """Microseconds of one iteration alone; assumed: AlexNet's is very short, VGG19's far longer (§4.5.2.3)."""
    use: float
    """Share of one parameter server's CPU; VGG19's is given (figure 4.2's text), the others assumed."""


MODELS = (
    Model("AlexNet", 17, 236_000_000, 100_000, 0.45),
    Model("VGG19", 39, 548_000_000, 450_000, 0.16),
    Model("AWD-LM", 14, 396_000_000, 300_000, 0.30),
    Model("BERT", 393, 1_278_000_000, 600_000, 0.35),
)


def profile(
    name: str, model: Model, servers: int, use: float, period_us: int, rng: random.Random
) -> AggregationProfile:
    """A job of this model. Work is proportional to size, and sizes are spread as in such models: few large tensors
    hold most of it."""
    sizes = [rng.lognormvariate(0, 1.5) for _ in range(model.tensors)]
    work_us = servers * use * period_us
    tensors: list[Tensor] = []
    for at, size in enumerate(sizes):
        sum_us = work_us * size / sum(sizes)
        parts = int(sum_us * PARTS_OF_ITERATION // period_us) + 1
        tensors += [Tensor(f"t{at}" if parts == 1 else f"t{at}.{n}", round(sum_us / parts)) for n in range(parts)]
    return AggregationProfile(JobId(name), period_us, tuple(largest_first(tensors)), servers)


@dataclass(frozen=True)
class TracedJob:
    submit_s: float
    duration_s: float
    """Seconds that the job runs on servers of its own."""
    profile: AggregationProfile


@dataclass(frozen=True)
class Workload:
    """How jobs are drawn."""

    jobs: int = 150
    interval_s: float = 120.0
    """Mean time between arrivals in seconds (Poisson)."""
    duration_s: float = 3600.0
    """Median run time in seconds; lognormal with sigma 1."""
    servers: tuple[int, ...] = (1, 2, 4)
    use: tuple[float, float] = (0.15, 0.5)
    """Range of the CPU use of a server, uniform."""
    limit: Fraction = LOSS_LIMIT
    window: bool = False
    """Whether the time from first to last push is in a job's profile."""

    recorded: tuple[tuple[float, float, int], ...] = ()
    """(submitted s, duration s, servers) of each job, from a trace; empty: jobs are drawn."""

    def drawn(self, rng: random.Random) -> list[TracedJob]:
        found, now_s = [], 0.0
        for at in range(len(self.recorded) or self.jobs):
            if self.recorded:
                now_s, duration_s, servers = self.recorded[at]
            else:
                now_s += rng.expovariate(1 / self.interval_s)
                duration_s, servers = self.duration_s * rng.lognormvariate(0, 1), rng.choice(self.servers)
            found.append(TracedJob(now_s, duration_s, self._profile(f"j{at}", servers, rng)))
        return found

    def _profile(self, name: str, servers: int, rng: random.Random) -> AggregationProfile:
        model = rng.choice(MODELS)
        period_us = round(model.period_us * rng.uniform(0.7, 1.4))
        one = profile(name, model, servers, rng.uniform(*self.use), period_us, rng)
        return msgspec.structs.replace(one, limit=self.limit, window_us=round(PUSHING * period_us * self.window))


def recorded(trace: Trace, most: int) -> tuple[tuple[float, float, int], ...]:
    """The first jobs of a trace that would have parameter servers: those of more than one GPU, with a server for each
    four GPUs (a worker of the thesis has four), one to four of them."""
    found = sorted((job for job in trace.jobs if job.gpus > 1 and job.duration_s > 0), key=lambda job: job.submit_s)
    return tuple((float(job.submit_s), float(job.duration_s), min(4, -(-job.gpus // 4))) for job in found[:most])
