"""What holds for every test: this machine may be noisy, and a failure must be repeatable."""

import ctypes
import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from agent.compiled.files import install, look
from tests.families import examples
from tests.limits import CPU_S, within_cpu
from tools import again

if os.environ.get("COVEY_COMPILED") and (used := install(look())).why:
    raise SystemExit(f"the byte path is interpreted: {used.why}; next: make compiled")

LIBC = ctypes.CDLL(None)
PR_GET_CHILD_SUBREAPER = 37

settings.register_profile(
    "noisy",
    deadline=None,  # speed is measured in benchmarks, never by a timed test
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,  # the gate tries the same examples each time; people look for new ones
    max_examples=examples(100),
    print_blob=True,
)
settings.load_profile("noisy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let groups of tests that mostly wait for real processes begin early, so that the others work meanwhile and none
    of them is alone at the end: one at the start, one after a third."""
    if not os.environ.get("COVEY_LONG"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: make check LONG=1"))
    racks, hosts = ([item for item in items if _group(item) == name] for name in ("rack", "hosts"))
    others = [item for item in items if _group(item) not in ("rack", "hosts")]
    third = len(others) // 3
    items[:] = [*racks, *others[:third], *hosts, *others[third:]]


def pytest_collection_finish() -> None:
    """Leave the 400,000 objects of all tests out of garbage collections: each looked at all of them, a quarter of a
    second long, and that was a fifth of the processor time of simulated racks. Let there be fewer of them, too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker is not None and marker.args else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Store what failed, and why, for `tools.again`."""
    config = terminalreporter.config
    if getattr(config, "cache", None) is not None:  # `-p no:cacheprovider` leaves it out
        stats = terminalreporter.stats
        failed = [report for kind in ("failed", "error") for report in stats.get(kind, ())]
        config.cache.set(again.KEY, {report.nodeid: _why(report) for report in failed})


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The line that says why it failed, as a person reads it first."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = str(crash.message if crash is not None else report.longrepr).strip().splitlines() or ["it says nothing"]
    return said[0][:200]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Limit a test in processor seconds: none fails because others use the machine too."""
    marker = item.get_closest_marker("cpu_seconds")
    with within_cpu(float(marker.args[0]) if marker else CPU_S):
        yield
    assert not _adopts(), "this process adopts: what ends its strays would end what other tests have started"


def _adopts() -> bool:
    """Whether descendants of this process, which runs other tests too, become its children once their parents end."""
    found = ctypes.c_int()
    LIBC.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)
