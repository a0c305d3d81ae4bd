"""What metrics cost: a scrape of an agent in a rack of 1,000 hosts whose log has 2,000 jobs, one measurement of a
histogram, and what counting the duration of each page costs a volume.

    python bench/metrics.py [--hosts 1000] [--jobs 2000]

An agent of a simulated rack answers, whose views of hosts and whose copies of jobs are repeated until there are as
many. Counting a page is timed alone, interpreted. Medians of CPU time; run it where nothing else runs, or compare
within one run.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import msgspec

from agent.api.exposition import exposition
from chaos.rackworld import SimRack
from chaos.stories import train
from covey.core.ids import HostId, JobId
from covey.core.metrics import MetricGroup, Tally
from plugins.memory.datapath.volumes.latencies import RequestTimes

REQUESTS_PER_S = 20_000
"""Requests a second of the volume whose share is printed; `bench/memory/memory_path.py` says how many a machine's
volumes answer."""
TIMES = 200_000


def cpu_s(what: Callable[[], object], times: int, repeats: int = 7) -> float:
    """The median of CPU seconds that one call takes."""
    found = []
    for _ in range(repeats):
        began_s = time.process_time()
        for _ in range(times):
            what()
        found.append((time.process_time() - began_s) / times)
    return statistics.median(found)


def scrape(hosts: int, jobs: int) -> None:
    with SimRack(1, hosts=2, watched=False).start() as rack:
        rack.settle()
        rack.pager("h1", "vol1", 1 << 18, 3.0)
        train(rack, rounds=10**6, workers=1)
        rack.run(10.0)
        agent, queue = rack.agents["h1"], rack.plugin("h1", "scheduler").queue
        views = agent.hosts()
        many = [msgspec.structs.replace(views[n % len(views)], host=HostId(f"h{n}")) for n in range(hosts)]
        job = next(iter(queue.jobs.values()))
        for number in range(len(queue.jobs), jobs):
            queue.jobs[JobId(f"j{number}")] = msgspec.structs.replace(job, id=JobId(f"j{number}"))
        small = cpu_s(lambda: exposition(agent.metrics()), 3)
        agent.hosts = lambda: many  # type: ignore[method-assign]
        measured_s, body = cpu_s(agent.metrics, 3), exposition(agent.metrics())
        written_s = cpu_s(lambda: exposition(agent.metrics()), 3)
        series = sum(not line.startswith("#") for line in body.decode().splitlines())
        print(f"{hosts} hosts, {jobs} jobs: {series} series, {len(body)} bytes; measured in {measured_s * 1e3:.1f} ms,")
        print(f"    measured and written in {written_s * 1e3:.1f} ms (2 hosts: {small * 1e3:.1f} ms)")


def measurement() -> None:
    bounds = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
    tally = Tally(MetricGroup().histogram("covey_bench_seconds", "A bench.", "route", bounds=bounds))
    print(f"one measurement of a histogram: {cpu_s(lambda: tally.see(0.02, '/v1/jobs/{id}'), TIMES) * 1e9:.0f} ns")


def page() -> None:
    times, clock = RequestTimes(), time.perf_counter

    def counted() -> None:
        began_s = clock()
        times.add(clock() - began_s)

    none_s = cpu_s(lambda: None, TIMES)
    took_s = max(0.0, cpu_s(counted, TIMES) - none_s)
    times.counts()
    print(
        f"the duration of one page: {took_s * 1e9:.0f} ns interpreted, {took_s * REQUESTS_PER_S:.2%} of a volume's time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2000)
    asked = parser.parse_args()
    scrape(asked.hosts, asked.jobs)
    measurement()
    page()


if __name__ == "__main__":
    main()
