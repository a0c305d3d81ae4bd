"""The page of a real rack: a job that is started and a host that is killed are seen on it, as they happen."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cli.rack import processes
from tests.rack.living_rack import EXAMPLES, LivingRack, living_rack, wait

pytestmark = [pytest.mark.page, pytest.mark.rack, pytest.mark.cpu_seconds(0), pytest.mark.xdist_group("rack")]


@pytest.fixture(scope="module")
def rack(browser: Any) -> Iterator[LivingRack]:
    """Three hosts; whoever connects to gpu2's page on loopback reads everything."""
    with living_rack(3) as made:
        config = made.host("gpu2").config
        config.write_text(config.read_text().replace("[http]", "[http]\nread_open = true", 1))
        os.kill(made.agentd("gpu2"), signal.SIGTERM)
        wait("it has ended", lambda: not processes.lock_holder(made.host("gpu2").state_dir))
        made.start()
        yield made


def _address(rack: LivingRack, name: str) -> str:
    return f"http://{rack.host(name).http}"


def test_a_job_that_starts_and_a_host_that_dies_are_seen_as_they_happen(
    rack: LivingRack, visit: Callable[..., Any]
) -> None:
    tab = visit(_address(rack, "gpu2"))
    tab.go("")
    tab.wait("document.querySelectorAll('.card').length === 3")
    tab.wait("document.querySelector('.needs').textContent.startsWith('Nothing')")
    job = rack.submit(EXAMPLES / "digits.py", "--steps", "100000", "--step-seconds", "0.02")
    tab.wait("document.querySelectorAll('.tile.held, .tile.busy').length >= 4")
    tab.go("jobs")
    tab.wait(f"document.querySelector('[data-key={job}] .chip')?.textContent === 'running'")
    tab.go(f"job/{job}")
    tab.wait("document.querySelector('.chart canvas')", 60)
    tab.wait("document.querySelector('.timeline svg')?.getAttribute('aria-label').includes('running')")
    tab.go("tensors")
    tab.wait(f"document.querySelector('.virtual')?.textContent.includes('{job}')", 60)
    tab.go("memory")
    tab.wait("document.querySelector('.facts')?.textContent.includes('Spare')")
    tab.go("")
    tab.wait("document.querySelector('.card')")
    rack.lose("gpu3")
    tab.wait("document.querySelector('[data-key=gpu3]').classList.contains('off')", 60)
    tab.wait("document.querySelector('.needs').textContent.includes('gpu3 is')")
    tab.go("gossip")
    tab.wait("document.querySelector('main').textContent.includes('gpu3')")
    tab.go("events?q=gpu3")
    tab.wait("document.querySelector('.virtual').textContent.includes('gpu3')")
    rack.start()
    tab.go("")
    tab.wait("document.querySelector('[data-key=gpu3]')?.classList.contains('off') === false", 60)
    for view in ("host/gpu3", f"job/{job}"):
        tab.go(view)
        tab.wait("document.querySelectorAll('.acts code').length >= 2")
        for shown in tab.page.locator(".command code").all_text_contents():
            words = [word for word in shown.split()[1:] if word != "-f"]
            code, said = rack.agentctl(*words)
            assert code != 2, f"{shown}: {said}"
    wait("the job has ended", lambda: rack.job(job)["over"])
    assert tab.said == [], "no rule of the policy was broken, and nothing failed"


def test_whoever_may_not_read_a_job_is_told_so_with_what_to_type(rack: LivingRack, visit: Callable[..., Any]) -> None:
    job = rack.submit(EXAMPLES / "digits.py", "--steps", "3")
    wait("it has ended", lambda: rack.job(job)["over"])
    tab = visit(_address(rack, "gpu1"))
    tab.go(f"job/{job}")
    tab.wait("document.querySelectorAll('.refused').length >= 2")
    text = tab.page.text_content("main")
    assert "over TCP it cannot be told who asks" in text and "digits" not in text, "not even the name"
    assert f"agentctl logs -f {job}" in text


def test_agents_serve_every_file_of_the_page_with_the_policy(rack: LivingRack, visit: Callable[..., Any]) -> None:
    tab = visit(_address(rack, "gpu1"))
    policies = []
    tab.page.on("response", lambda answer: policies.append(answer.headers.get("content-security-policy", "")))
    tab.go("")
    assert len(policies) > 8 and all("script-src 'self'" in each for each in policies)
