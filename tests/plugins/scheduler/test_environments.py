"""A submitter's environment holds secrets: where it is on a rack's disks, who gets it, and what survives whom.

Whole simulated agents; every file of every host is searched for a planted secret.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from chaos.rackworld import SimRack
from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from covey.ports.env import Env
from covey.ports.processes import Command
from plugins.scheduler.messages.wire import EnvAnswer, EnvOf, KeepEnv
from plugins.scheduler.plugin import PLUGIN as SCHEDULER

SECRET = "sk-live-7f3c-planted"
J1 = JobId("j1")


class Programs:
    """What the ranks found in their environment, and how they end."""

    def __init__(self, rack: SimRack) -> None:
        self.found: list[Mapping[str, str]] = []
        self.codes = [0]
        rack.world.user_programs["secretive"] = self.run

    async def run(self, env: Env, command: Command) -> int:
        self.found.append(command.env)
        await asyncio.sleep(float(command.argv[1]))
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]


def a_rack(seed: int, **scheduler: Any) -> SimRack:
    return SimRack(seed, hosts=5, plugins=(SCHEDULER,), settings={"scheduler": scheduler} if scheduler else None)


def submit(rack: SimRack, on: str, seconds: float = 20, workers: int = 2) -> JobId:
    env = {"API_KEY": SECRET, "PATH": "/bin"}
    spec = {"argv": ["secretive", str(seconds)], "workers": workers, "cwd": "/", "env": env}
    return rack.submit(spec, f"secret-{on}-{rack.world.now:.0f}", on)


def fill(rack: SimRack, seconds: float) -> None:
    rack.submit({"argv": ["sleeper", str(seconds)], "workers": 10, "cwd": "/"}, "filler-of-all")
    rack.until(lambda: state(rack, J1) == "running", 60, "the filler runs")


def job(rack: SimRack, id: JobId) -> Any:
    return rack.plugin(rack.alive()[0], "scheduler").queue.jobs.get(id)


def state(rack: SimRack, id: JobId) -> str:
    known = job(rack, id)
    return "" if known is None else known.state


def files_with(rack: SimRack, text: str) -> dict[str, list[str]]:
    """The files of each host that hold this text, in what is written or in what is synced."""
    found: dict[str, list[str]] = {}
    for name, host in rack.hosts.items():
        for file, content in host.disk.files.items():
            if text.encode() in bytes(content.data) or text.encode() in bytes(content.durable or b""):
                found.setdefault(name, []).append(file)
    return found


def sealed(rack: SimRack) -> list[str]:
    """The hosts that keep a sealed environment."""
    return [
        name for name, host in rack.hosts.items() if any(file.startswith("scheduler/env/") for file in host.disk.files)
    ]


def test_a_secret_is_in_clear_only_where_the_job_runs_and_nowhere_after_its_end() -> None:
    with a_rack(71) as rack:
        programs = Programs(rack)
        rack.start().settle()
        id = submit(rack, "h5", seconds=40)
        rack.until(lambda: len(programs.found) == 2, 60, "both ranks run")
        assert {found["API_KEY"] for found in programs.found} == {SECRET}
        rack.run(5.0)
        runs = sorted(place.host for place in job(rack, id).start.places)
        assert {host: sorted(files) for host, files in files_with(rack, SECRET).items()} == {
            host: [f"jobs/{id}/1.start"] for host in runs
        }
        assert {"h5", "h1", "h2"} <= set(sealed(rack)), "the submitting agent's and two voters keep it for its start"
        for name in rack.alive():
            queue = rack.plugin(name, "scheduler").queue
            assert SECRET.encode() not in queue.snapshot()
        for name in rack.alive():  # a host that has it not asks one that has
            shown = rack.ask(name, "scheduler.env", {"id": str(id)})
            assert shown.variables["API_KEY"] == "(hidden)" and shown.host in sealed(rack), name
        rack.until(lambda: state(rack, id) == "done", 90, "it ends")
        rack.run(10.0)
        assert files_with(rack, SECRET) == {} and sealed(rack) == []
        with pytest.raises(Refused, match=r"cannot be shown.*deleted"):
            rack.ask("h1", "scheduler.env", {"id": str(id)})
        assert job(rack, id).env.key == b"", "what a deleted file left on a disk cannot be read any more"


def test_a_job_that_waits_outlives_the_host_of_the_agent_it_was_submitted_to() -> None:
    with a_rack(72) as rack:
        programs = Programs(rack)
        rack.start().settle()
        fill(rack, 60)
        id = submit(rack, "h5")
        assert state(rack, id) == "queued"
        rack.hosts["h5"].power_off()
        rack.until(lambda: state(rack, id) == "done", 240, "it runs without the host it was submitted on")
        assert [found["API_KEY"] for found in programs.found] == [SECRET] * 2


def test_a_job_whose_environment_is_out_of_reach_waits_and_says_who_has_it() -> None:
    with a_rack(73, env_copies=0) as rack:
        programs = Programs(rack)
        rack.start().settle()
        fill(rack, 30)
        id = submit(rack, "h5")
        rack.hosts["h5"].power_off()
        rack.until(lambda: job(rack, id).tally.place_failures > 0, 240, "a coordinator looked for its environment")
        rack.until(lambda: state(rack, id) == "queued", 30, "it is in the queue again")
        view = rack.ask(rack.alive()[0], "scheduler.job", {"id": str(id)})
        assert "the environment it was submitted with is kept by h5 (gone)" in view.reason, view.reason
        assert programs.found == []
        rack.hosts["h5"].power_on()
        rack.until(lambda: state(rack, id) == "done", 240, "its submitter's host is back")
        assert [found["API_KEY"] for found in programs.found] == [SECRET] * 2


def test_hosts_that_ran_a_job_keep_its_environment_for_its_next_start() -> None:
    with a_rack(74, env_copies=0) as rack:
        programs = Programs(rack)
        programs.codes = [75, 0]
        rack.start().settle()
        id = submit(rack, "h5", workers=1)
        rack.until(lambda: len(programs.found) == 1, 60, "it runs")
        on = job(rack, id).start.places[0].host
        away = "h5" if on != "h5" else None
        if away is not None:
            rack.hosts[away].power_off()
        rack.until(lambda: state(rack, id) == "done", 240, "it is started again")
        assert [found["API_KEY"] for found in programs.found] == [SECRET] * 2


def asked(rack: SimRack, by: str, work: Any) -> Any:
    """What a coroutine in this host's agent returns, or how it was refused."""
    found: list[Any] = []

    async def call() -> None:
        try:
            found.append(await work)
        except Refused as no:
            found.append(no)

    process = rack.hosts[by].agent
    assert process is not None
    process.spawn("asked", call())
    rack.world.run(rack.world.now + 20, stop=lambda: bool(found))
    return found[0]


def test_only_hosts_of_the_job_are_given_its_environment() -> None:
    with a_rack(75) as rack:
        Programs(rack)
        rack.start().settle()
        id = submit(rack, "h5", seconds=60)
        rack.until(lambda: state(rack, id) == "running", 60, "it runs")
        rack.run(3.0)
        known = job(rack, id)
        runs = {place.host for place in known.start.places} | {known.grant.coordinator}
        stranger = next(name for name in rack.hosts if name not in runs and name != "h5")
        for name, epoch, given in (
            (stranger, 1, False),
            (known.start.places[0].host, 1, True),
            (known.start.places[0].host, 2, False),
        ):
            holder = next(host for host in known.env.holders if host != name)
            answer = asked(
                rack, name, rack.agents[name].ask("scheduler", holder, EnvOf(id, epoch, known.env.digest), 5.0)
            )
            assert isinstance(answer, EnvAnswer) and bool(answer.data) == given, (name, epoch)
        first = next(name for name in known.env.holders if name != stranger)
        rack.plugin(first, "scheduler").spares.machine.chosen[id] = stranger  # it is to keep spares
        question = EnvOf(id, 1, known.env.digest)
        answer = asked(rack, stranger, rack.agents[stranger].ask("scheduler", first, question, 5.0))
        assert isinstance(answer, EnvAnswer) and answer.data


def test_what_no_job_claims_is_deleted_in_time_and_what_is_damaged_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plugins.scheduler.service.ranks.envs.UNCLAIMED_S", 60.0)
    with a_rack(76) as rack:
        rack.start().settle()
        envs = rack.plugin("h1", "scheduler").envs
        sealed_env = asked(rack, "h5", rack.plugin("h5", "scheduler").envs.seal({"API_KEY": SECRET}))
        assert sealed_env.holders == ("h5", "h1", "h2") and sealed(rack) == ["h1", "h2", "h5"]
        answer = asked(rack, "h1", envs.keep(HostId("h9"), KeepEnv(sealed_env.digest, b"something else")))
        assert isinstance(answer, Refused) and "damaged" in answer.why
        rack.run(50.0)
        assert sealed(rack) == ["h1", "h2", "h5"], "its submission may still be on its way"
        rack.run(80.0)
        assert sealed(rack) == []


def test_a_job_is_refused_when_its_environment_cannot_be_written() -> None:
    with a_rack(77) as rack:
        rack.start().settle()
        rack.hosts["h5"].disk.sick = 1.0
        with pytest.raises(Refused, match="cannot be written on h5"):
            env = {"API_KEY": SECRET}
            rack.ask("h5", "scheduler.submit", {"argv": ["secretive", "1"], "cwd": "/", "env": env}, 15.0)
