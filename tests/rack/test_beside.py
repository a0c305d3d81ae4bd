"""What people do beside jobs that run on real agents: commands, shells, stacks, attached jobs, tunnels to servers."""

import hashlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.rack import processes
from tests.rack.living_rack import ENV, LivingRack, living_rack, wait

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack")]
SCRIPT = "import time\ndef deep():\n    print('here', flush=True)\n    time.sleep(300)\ndeep()\n"
SERVER = """#!/bin/sh
echo 'or: http://127.0.0.1:PORT/lab?token=abc'
exec PYTHON -m http.server PORT --bind 127.0.0.1
"""


@pytest.fixture(scope="module")
def rack() -> Iterator[LivingRack]:
    with living_rack(2, 2) as found:
        yield found


@pytest.fixture(scope="module")
def job(rack: LivingRack) -> str:
    """A job with ranks 0 and 1 on one host, 2 and 3 on the other."""
    script = rack.directory / "deep.py"
    script.write_text(SCRIPT)
    found = rack.submit(script)
    wait("all ranks run", lambda: all("here" in rack.output(found, rank) for rank in range(4)))
    return found


class Terminal:
    """agentctl in a terminal."""

    def __init__(self, rack: LivingRack, *words: str) -> None:
        argv = [str(Path(sys.executable).with_name("agentctl")), "--agent", rack.hosts[0].address, *words]
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(argv[0], argv, {**os.environ, "PS1": "$ "})
        self.said = b""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, words: str, timeout_s: float = 30.0) -> bytes:
        """What was said before these words; what follows them is kept."""
        end_s = time.monotonic() + timeout_s
        while words.encode() not in self.said:
            assert time.monotonic() < end_s, (words, self.said)
            if select.select([self._fd], [], [], 0.2)[0]:
                try:
                    self.said += os.read(self._fd, 1 << 16)
                except OSError:
                    raise AssertionError((words, self.said)) from None
        before, _, self.said = self.said.partition(words.encode())
        return before

    def lose(self) -> None:
        """Let the terminal go, as a connection that is cut."""
        os.close(self._fd)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def typed(rack: LivingRack, *words: str, given: bytes = b"") -> tuple[int, bytes, bytes]:
    argv = [str(Path(sys.executable).with_name("agentctl")), "--agent", rack.hosts[0].address, *words]
    done = subprocess.run(argv, input=given, capture_output=True, timeout=90, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_command_beside_a_rank_elsewhere_has_its_environment_and_its_code_is_told(rack: LivingRack, job: str) -> None:
    script = 'echo $COVEY_HOST $RANK $CUDA_VISIBLE_DEVICES; pwd; echo "t${COVEY_TOKEN}t" >&2; exit 7'
    code, out, err = typed(rack, "exec", f"{job}.3", "--", "sh", "-c", script)
    gpus = ",".join(f"GPU-sim-gpu2-{gpu}" for gpu in (0, 1))
    assert (code, out.decode(), err) == (7, f"gpu2 3 {gpus}\n{rack.directory}\n", b"tt\n")
    lines = b"a line of input\n" * 20_000
    assert typed(rack, "exec", f"{job}.2", "--", "cat", given=lines) == (0, lines, b"")
    assert typed(rack, "exec", job, "--", "/none/such")[0] == 127
    code, _, err = typed(rack, "exec", f"{job}.9", "--", "true")
    assert code == 3 and b"ranks 0 to 3" in err
    assert typed(rack, "exec", "j999", "--", "true")[0] == 3
    assert typed(rack, "exec", job)[0] == 2
    assert "agent.open_session, by" in rack.agentctl("why", job)[1]


def test_stacks_of_all_ranks_come_with_their_hosts_and_they_run_on(rack: LivingRack, job: str) -> None:
    code, said = rack.agentctl("stacks", job)
    assert code == 0 and said.count("line 4 in deep") == 4, said
    assert [f"rank {rank} on gpu{1 + rank // 2}" in said for rank in range(4)] == [True] * 4
    assert rack.job(job)["state"] == "running"


def test_a_shell_survives_its_terminal_and_agents_and_ends_with_its_job(rack: LivingRack, job: str) -> None:
    first = Terminal(rack, "shell", f"{job}.3")
    first.until("finds it again for 10 min")
    first.type("X=kept; echo at $RANK\n")
    first.until("at 3")
    first.lose()
    second = Terminal(rack, "shell", f"{job}.3")
    second.until("this is your shell of before")
    second.type("echo it was $X\n")
    second.until("it was kept")
    os.kill(rack.agentd("gpu2"), signal.SIGKILL)
    wait("its agent is gone", lambda: not processes.lock_holder(rack.host("gpu2").state_dir))
    rack.start()
    second.type("echo still $((40 + 2))\n")
    second.until("still 42")
    second.type("""sh -c 'trap "echo stop""ped; exit 4" INT; echo be""gun; sleep 100'\n""")
    second.until("begun")
    second.type("\x03")
    second.until("stopped")
    second.type("echo code $?\n")
    second.until("code 4")
    second.type("exit 5\n")
    assert second.code() == 5
    third = Terminal(rack, "shell", job)
    third.until("finds it again")
    rack.agentctl("cancel", job)
    third.until("the job has ended on this host")
    assert third.code() == 128 + signal.SIGHUP


def test_a_shell_of_its_own_job_waits_for_it_and_ends_it(rack: LivingRack) -> None:
    shell = Terminal(rack, "shell", "--gpus", "1")
    shell.until("running")
    shell.until("finds it again")
    shell.type("echo on $CUDA_VISIBLE_DEVICES\n")
    shell.until("on GPU-sim")
    shell.type("exit 3\n")
    own = re.search(r"(j\d+) $", shell.until("ends with its shell").decode())
    assert shell.code() == 3 and own is not None
    wait("the job is done", lambda: rack.job(own[1])["state"] == "done")


def test_a_job_that_is_run_attached_says_why_it_waits_and_returns_its_code(rack: LivingRack) -> None:
    hog = str(rack.agent().post("jobs", body={
        "name": "hog", "workers": 4, "gpus_per_worker": 1, "argv": ["sleep", "4"], "cwd": "/", "env": ENV,
    }).data["id"])  # fmt: skip
    wait("it runs", lambda: rack.job(hog)["state"] == "running")
    code, out, err = typed(rack, "run", "--gpus", "1", "--", "sh", "-c", "echo it runs; exit 9")
    assert code == 9 and b"it runs" in out and b"needs 1 GPU" in err, (out, err)
    content = os.urandom(3_000_000)
    digest = hashlib.sha256(content).hexdigest().encode()
    count = ("sh", "-c", "[ $RANK = 0 ] || exec cat; sleep 1; sha256sum; exit 7")
    code, out, err = typed(rack, "run", "--stdin", "--workers", "2", "--gpus", "0", "--", *count, given=content)
    assert code == 7 and digest in out, (code, out, err)
    stays = Terminal(rack, "run", "--gpus", "0", "--", "sh", "-c", "echo begun; sleep 300")
    stays.until("begun")
    stays.type("\x03")
    stays.until("or Enter to stay?")
    stays.type("l\n")
    job = re.search(r"(j\d+) $", stays.until("runs on").decode())
    assert stays.code() == 130 and job is not None
    assert rack.job(job[1])["state"] == "running"
    rack.agentctl("cancel", job[1])


def test_a_notebooks_address_is_printed_and_leads_to_it(rack: LivingRack, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = tmp_path / "jupyter"
    server.write_text(SERVER.replace("PORT", str(port)).replace("PYTHON", sys.executable))
    server.chmod(0o755)
    content = os.urandom(1 << 20)
    (tmp_path / "big").write_bytes(content)
    runs = Terminal(rack, "run", "--gpus", "1", "--cwd", str(tmp_path), "--", str(server), "lab")
    runs.until(f"port {port} of this machine is taken")
    runs.until("open http://127.0.0.1:")
    local = int(runs.until("/lab?token=abc"))
    assert local != port
    with urllib.request.urlopen(f"http://127.0.0.1:{local}/big", timeout=30) as answer:
        assert answer.read() == content
    runs.type("\x03")
    runs.until("or Enter to stay?")
    runs.type("c\n")
    runs.until("is cancelled")
    assert runs.code() == 128 + signal.SIGTERM
