"""Tenants without a quota: a thousand jobs of one beside a job now and then of others, in turns and in one order."""

import random
from collections.abc import Callable

from plugins.scheduler.policy.fair import HALF_LIFE_S
from sim.jobs.engine import Outcome, SimJob
from sim.jobs.jobs import plan_of
from sim.jobs.live import Asks, Live, settings_of
from sim.report import Cell, Progress, Report, Table, quantile

GPUS = 64
CROWD = 1000
OTHERS = 5
HOURS = 24
DRAWS = (1, 2, 3)
CROWD_WIDTHS, OTHERS_WIDTHS = (1, 1, 1, 2, 4), (1, 1, 2, 4)


def stream(draw: int) -> list[SimJob]:
    """A crowd's jobs within the first 500 s, and one an hour of each other tenant; lengths are log-normal, 22 minutes
    in the median, from one minute on."""
    dice = random.Random(draw)

    def length_s() -> int:
        return max(60, int(dice.lognormvariate(7.2, 1.2)))

    found = [(at // 2, dice.choice(CROWD_WIDTHS), length_s(), "crowd") for at in range(CROWD)]
    for other in range(OTHERS):
        for hour in range(HOURS):
            at_s = 300 + int(3600 * (hour + dice.random()))
            found.append((at_s, dice.choice(OTHERS_WIDTHS), length_s(), f"other{other}"))
    return [SimJob(at, *job[:3], tenant=job[3]) for at, job in enumerate(sorted(found))]


def turns(progress: Progress) -> Report:
    """What the crowd and the others wait, with turns and without."""
    rows: list[list[Cell]] = []
    data: dict[str, object] = {}
    for at, (name, in_turns) in enumerate((("one order", False), ("in turns", True))):
        sums: dict[str, list[float]] = {}
        for draw in DRAWS:
            progress((at * len(DRAWS) + draw - 1) / (2 * len(DRAWS)), f"{name}, draw {draw}")
            jobs = stream(draw)
            for key, value in _measured(jobs, _run(jobs, in_turns)).items():
                sums.setdefault(key, []).append(value)
        means = {key: sum(values) / len(values) for key, values in sums.items()}
        data[name] = means
        rows.append([name, *(round(value, 2) for value in means.values())])
    columns = ["order", "others: first start after, mean (h)", "95 % (h)", "others: JCT, mean (h)"]
    columns += ["crowd: JCT, mean (h)", "all: JCT, mean (h)"]
    notes = [
        f"{GPUS} GPUs; {CROWD} jobs of one tenant within 500 s, {OTHERS} other tenants with a job an hour for "
        f"{HOURS} h; {len(DRAWS)} draws; no quotas",
        f"by the agents' own queue and leader; of late: service counts half after {HALF_LIFE_S / 3600:.0f} h",
        "one order: the same jobs as those of one tenant",
    ]
    return Report("jobs-turns", data, [Table("tenants without a quota", columns, rows, notes)])


def _run(jobs: list[SimJob], in_turns: bool) -> Outcome:
    plan = plan_of("covey", {})
    asks = [Asks(job.tenant if in_turns else "all", "guaranteed") for job in jobs]
    return Live(jobs, 1, GPUS, plan.rules, settings_of(plan.rules, {}, None, None), asks).run()


def _measured(jobs: list[SimJob], out: Outcome) -> dict[str, float]:
    """Times in hours, as the table has them."""
    others = [at for at, job in enumerate(jobs) if job.tenant != "crowd"]
    crowd = [at for at, job in enumerate(jobs) if job.tenant == "crowd"]
    first = sorted(out.first_s[at] - jobs[at].submit_s for at in others)

    def spans_h(of: list[int]) -> float:
        return sum(out.end_s[at] - jobs[at].submit_s for at in of) / len(of) / 3600

    return {
        "first": sum(first) / len(first) / 3600,
        "first_p95": quantile(first, 0.95) / 3600,
        "others": spans_h(others),
        "crowd": spans_h(crowd),
        "all": spans_h([*others, *crowd]),
    }


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {"jobs-turns": turns}
