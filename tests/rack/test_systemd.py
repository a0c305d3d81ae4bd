"""The units on hosts whose first process is systemd, installed by what docs/guides/install.md tells people to type."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from chaos.rack.agents import wait
from chaos.rack.booted import BootedHost, why_not_booted
from chaos.rack.hosts import Laboratory
from tests.rack.installed import DEVICES, KEY, PAGE, alive, installation, memory, typed, written

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("booted")]
PROBE = """\
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *words):
    return "ok" if libc.syscall(number, *words) >= 0 else os.strerror(ctypes.get_errno())
print("ptrace", call(101, 0, 0, 0, 0))
print("pidfd_getfd", call(438, -1, 0, 0))
print("mount", call(165, 0, 0, 0, 0, 0))
print("userfaultfd", call(323, 1))
print("namespace", call(272, 0x10000000))
print("nice", os.nice(0), "oom", open("/proc/self/oom_score_adj").read().strip())
open("/tmp/made-by-a-job", "w")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[BootedHost, BootedHost]]:
    """Two hosts. The first is installed by the page alone; then both are one rack, by what the page says and nothing
    else."""
    if trouble := why_not_booted():
        pytest.skip(f"no host can be booted here: {trouble}")
    with Laboratory(2, kind=BootedHost) as lab:
        first, second = (host for host in lab.hosts.values() if isinstance(host, BootedHost))
        line = join_line(typed(first, "set -e; " + "\n".join(installation())))
        said = typed(first, "systemctl status covey --no-pager; agentctl hosts")
        assert "Active: active (running)" in said
        assert "1 of 1 host alive; gpu1 leads" in said
        assert "good     covey.service: as installed with this version" in typed(first, "agentctl doctor")
        typed(second, "set -e; " + "\n".join(installation()[:-1]))
        for host in (first, second):  # settings of a person
            typed(host, f"printf %s {shlex.quote(DEVICES)} >> /etc/covey/agent.toml")
        assert "gpu2 is a member: gpu1 leads, 2 hosts are alive" in typed(second, line)
        typed(first, "systemctl restart covey")
        for host in (first, second):
            up(host)
            assert "wrong" not in typed(host, "agentctl hosts")
            assert typed(host, f"stat -c '%a %U' {KEY}").strip() == "600 covey"
        typed(second, "agentctl voters add gpu2")
        assert "gpu2  votes" in typed(first, "agentctl voters")
        typed(second, "agentctl voters remove gpu2")
        yield first, second


def join_line(said: str) -> str:
    """The line for a further host, in what `agentctl rack` said."""
    (line,) = re.findall(r"(?m)^agentctl rack join [0-9.]+:7946 --token covey-[a-z2-7]{48}$", said)
    return str(line)


@pytest.mark.long
def test_a_token_is_good_once_and_a_refusal_writes_nothing(hosts: tuple[BootedHost, BootedHost]) -> None:
    first, second = hosts
    line = join_line(typed(first, "agentctl rack token"))
    files = "sha256sum /etc/covey/* /var/lib/covey/gossip.key 2>&1; ls /etc/covey"
    before = typed(second, f"{files}; true")
    refused = second.shell(line)
    assert refused.returncode == 4 and "this host has a rack of its own, or belongs to one" in refused.stderr
    elsewhere = "--config /tmp/elsewhere/agent.toml"
    toml = 'state_dir = "/tmp/elsewhere/state"\nrun_dir = "/tmp/elsewhere/run"\n'
    anew = f"rm -rf /tmp/elsewhere; mkdir /tmp/elsewhere; printf %s {shlex.quote(toml)} > /tmp/elsewhere/agent.toml"
    typed(second, anew)
    wrong = second.shell(f"{line[:-8]}aaaaaaaa {elsewhere}")
    assert wrong.returncode == 4 and "its secret is not the one that was made there" in wrong.stderr
    assert typed(second, "ls /tmp/elsewhere").split() == ["agent.toml"]
    token = line.split()[-1]
    joined = f"{line.replace(token, '').replace('--token', '--token-file -')} {elsewhere}"
    said = typed(second, f"echo {token} | {joined}")
    assert "will join when its agent starts; next: agentd --config /tmp/elsewhere/agent.toml" in said
    typed(second, anew)
    used = second.shell(f"{line} {elsewhere}")
    assert used.returncode == 4 and "it was used" in used.stderr
    assert typed(second, "ls /tmp/elsewhere").split() == ["agent.toml"]
    typed(first, "systemctl restart covey")
    up(first)
    forgotten = second.shell(f"{line} {elsewhere}")
    assert forgotten.returncode == 4 and "or has restarted since" in forgotten.stderr
    assert typed(second, f"{files}; true") == before
    journal = first.journal(lines=400) + second.journal(lines=400)
    key = typed(first, f"tail -1 {KEY}").strip()
    assert len(key) == 64 and key not in journal and token not in journal
    assert token not in typed(first, "agentctl why host/gpu1")


@pytest.mark.long
def test_a_host_with_a_rack_of_its_own_joins_by_the_command_that_doctor_says(
    hosts: tuple[BootedHost, BootedHost],
) -> None:
    first, second = hosts
    typed(second, "systemctl stop covey; cp /etc/covey/agent.toml /tmp; rm -r /var/lib/covey/{consensus,acknowledged}")
    written(second, "/etc/covey/agent.toml", f'{DEVICES}[gossip]\nseeds = ["gpu1:7946"]\n')
    typed(second, "chmod 644 /etc/covey/agent.toml; systemctl start covey")

    def advised() -> str:
        """The command in what doctor says is wrong."""
        said = first.shell("agentctl doctor").stdout
        found = re.search(r"wrong +host gpu2: it belongs to another rack.*\n +next: .*type there: (.*?)    \(", said)
        return found[1] if found else ""

    command = wait(advised, lambda: typed(first, "agentctl doctor; true"), 60.0, 1.0)
    assert re.fullmatch(r"agentctl rack join [0-9.]+:7946 --leave-own", command)
    for shown in ("agentctl hosts", "agentctl status; true"):
        assert command in typed(first, shown)
    assert "gpu2 is a member: gpu1 leads, 2 hosts are alive" in typed(second, command)
    for host in (first, second):
        up(host)
        wait(lambda: "wrong" not in first.shell("agentctl hosts").stdout, first.journal, 30.0, 0.5)
    assert "consensus.given-up" in typed(second, "ls /var/lib/covey")


def test_a_new_key_reaches_every_host_and_none_is_restarted(hosts: tuple[BootedHost, BootedHost]) -> None:
    first, second = hosts
    pids = [typed(host, "systemctl show covey -p MainPID --value") for host in hosts]
    before = set(re.findall(r"gpu\d +([0-9a-f]{8})", typed(first, "agentctl keys")))
    said = typed(second, "agentctl keys rotate")
    assert re.findall(r"(?m)^(\w+) +[0-9a-f]{8}: acknowledged by gpu1, gpu2$", said) == ["install", "use", "remove"]
    after = set(re.findall(r"gpu\d +([0-9a-f]{8})", typed(first, "agentctl keys")))
    assert len(before) == len(after) == 1 and before != after
    assert pids == [typed(host, "systemctl show covey -p MainPID --value") for host in hosts]
    typed(second, "systemctl restart covey")
    for host in hosts:
        up(host)
    assert typed(second, "stat -c '%a %U' /var/lib/covey/gossip.ring").strip() == "600 covey"


def up(host: BootedHost) -> None:
    alive(host, 2)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls are called by their numbers")
def test_a_job_may_what_any_user_may_and_the_rest_fails_without_killing_it(
    hosts: tuple[BootedHost, BootedHost],
) -> None:
    first, _ = hosts
    written(first, "/tmp/probe.py", PROBE)
    said = typed(first, "chmod 644 /tmp/probe.py; cd /; umask 027; agentctl submit --follow -- python3 /tmp/probe.py")
    assert re.findall(r"(?m)^(?:\[0\] )?(\w+) (.*)$", said[said.index("ptrace") :])[:6] == [
        ("ptrace", "ok"),
        ("pidfd_getfd", "Bad file descriptor"),
        ("mount", "Operation not permitted"),
        ("userfaultfd", "ok"),
        ("namespace", "Operation not permitted"),
        ("nice", "0 oom 0"),
    ]
    assert typed(first, "stat -c '%a %U' /tmp/made-by-a-job").strip() == "640 covey", "as the umask of who submitted it"


def test_the_journal_knows_the_agent_by_name_and_has_priorities_and_fields(
    hosts: tuple[BootedHost, BootedHost],
) -> None:
    first, _ = hosts
    typed(first, "cd /; agentctl submit --wait -- true")
    job = typed(
        first, 'agentctl jobs -a --json | python3 -c \'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])\''
    )
    line = f"journalctl -t covey-agent COVEY_JOB={job.strip()} -o cat --no-pager"
    said = "".join(typed(host, line) for host in hosts)
    assert "ranks start" in said and "ranks ended" in said
    assert "gpu1" in typed(first, "journalctl -F COVEY_HOST").split()
    assert {"agent started", "ranks start"} <= set(typed(first, "journalctl -F COVEY_EVENT").splitlines())
    entries = typed(first, "journalctl -u covey -o json --no-pager")
    assert {"covey-agent"} <= set(re.findall(r'"SYSLOG_IDENTIFIER":"([^"]*)"', entries)) <= {"covey-agent", "systemd"}
    typed(
        first,
        "printf 'nonsense' > /tmp/bad.toml; systemd-run -q --wait -p SyslogIdentifier=tried "
        "/opt/covey/bin/agentd --config /tmp/bad.toml --check; true",
    )
    assert "is not TOML" in typed(first, "journalctl -t tried -p err -o cat --no-pager")


def test_a_reload_applies_what_it_can_and_a_file_that_is_not_valid_changes_nothing(
    hosts: tuple[BootedHost, BootedHost],
) -> None:
    first, _ = hosts
    toml = "/etc/covey/agent.toml"
    typed(first, f"cp {toml} /tmp/before.toml")
    more = '[log]\nlevel = "debug"\n[jobs]\nkeep_ended = 7\n[tuner]\nreport_s = 3.0\n'
    typed(first, f"printf '{more}' >> {toml}; systemctl reload covey")
    told = "applied live: jobs.keep_ended, log.level; needs a restart: tuner.report_s"
    wait(lambda: told in first.journal(), first.journal, 10.0)
    wait(lambda: "needs a restart: tuner.report_s" in typed(first, "systemctl status covey"), first.journal, 15.0)
    shown = typed(first, f"agentd --config {toml} --show-config")
    assert re.search(rf"(?m)^keep_ended = 7 +# {toml}, live$", shown)
    assert re.search(r"(?m)^keep_ended_for = .* # default, live$", shown)
    typed(first, f"echo nonsense >> {toml}")
    assert first.shell("systemctl reload covey").returncode, "the reload has failed"
    assert "is not TOML" in typed(first, "journalctl -u covey -p err -n 6 -o cat --no-pager")
    typed(first, "systemctl kill --kill-who=main --signal=HUP covey")
    wait(lambda: "what was in force stays" in typed(first, "systemctl status covey"), first.journal, 15.0)
    assert "agent.toml is not applied" in typed(first, "journalctl -t covey-agent -p err -n 1 -o cat --no-pager")
    typed(first, f"cp /tmp/before.toml {toml}; systemctl reload covey")
    wait(lambda: "applied live: jobs.keep_ended, log.level" in first.journal(lines=3), first.journal, 10.0)
    up(first)


def test_a_bundle_of_a_host_has_its_journal_and_no_key(hosts: tuple[BootedHost, BootedHost]) -> None:
    first, _ = hosts
    token = "tok-PlantedBySomebody0123456789"
    typed(first, f"cd /; HF_TOKEN={token} agentctl submit --wait -- sh -c 'exit 0' --token {token}")
    typed(first, f"echo '# {token}' >> /etc/covey/agent.toml")
    typed(first, f"cd /tmp; API_TOKEN={token} agentctl bundle b.tar.gz && mkdir -p b && tar -xzf b.tar.gz -C b")
    found = typed(first, "cd /tmp/b/covey-bundle-gpu1-*; find . -type f; cat journal.txt")
    assert {"./status.json", "./doctor.json", "./jobs.json", "./metrics.txt", "./agent.toml", "./config.toml"} <= set(
        found.split()
    )
    assert "agent started" in found
    key = typed(first, f"grep -v '^#' {KEY}").split()[0]
    assert first.shell(f"grep -rlE '{key}|{token}' /tmp/b").stdout == ""


def test_another_user_is_told_whose_agent_it_is(hosts: tuple[BootedHost, BootedHost]) -> None:
    first, _ = hosts
    refused = first.shell("useradd alice; setpriv --reuid alice --clear-groups agentctl hosts")
    assert refused.returncode == 5
    assert "Permission denied" in refused.stderr
    assert "usermod -aG covey" in refused.stderr
    typed(first, "setpriv --reuid covey --clear-groups agentctl hosts")


@pytest.mark.long
def test_jobs_in_containers_need_what_the_page_says(hosts: tuple[BootedHost, BootedHost]) -> None:
    drop_in = (
        (PAGE.parent / "users.md")
        .read_text()
        .partition("`systemctl edit covey` with\n\n```ini\n")[2]
        .partition("```")[0]
    )
    assert "[Service]" in drop_in, "the page has no such lines any more"
    contained = "unshare --user --map-root-user --mount --pid --fork mount -t tmpfs tmpfs /tmp"
    line = f"cd /; agentctl submit --wait -- {contained}"
    assert hosts[0].shell(line).returncode == 1, "it needs no drop-in"
    for host in hosts:
        typed(host, "mkdir -p /etc/systemd/system/covey.service.d")
        written(host, "/etc/systemd/system/covey.service.d/containers.conf", drop_in)
        typed(host, "systemctl daemon-reload && systemctl restart covey")
        up(host)
    typed(hosts[0], line)
    for host in hosts:
        typed(host, "rm -r /etc/systemd/system/covey.service.d; systemctl daemon-reload")


@pytest.mark.long
def test_what_lives_on_while_an_agent_is_stopped_is_found_when_it_starts(
    hosts: tuple[BootedHost, BootedHost],
) -> None:
    """It is found also over `stop` and `start`: the unit of an older version lets systemd remove the folder of sockets
    between."""
    borrower, lender = hosts
    typed(borrower, "mkdir -p /etc/systemd/system/covey.service.d")
    written(borrower, "/etc/systemd/system/covey.service.d/older.conf", "[Service]\nRuntimeDirectoryPreserve=restart\n")
    typed(borrower, "systemctl daemon-reload")
    typed(borrower, "cd /; agentctl submit -- sleep 600")
    typed(borrower, memory("memory.write(0, data)"))
    wait(lambda: "8/8" in borrower.shell("agentctl volume ls").stdout, lambda: typed(borrower, "agentctl slabs"), 30.0)
    lives = running(*hosts)
    assert {"sleep", "supervisor", "vold", "spill", "slabd"} <= set(lives)
    stopped = "systemctl stop covey; sleep 1; systemctl start covey"
    for host, lines in ((borrower, ("systemctl restart covey", stopped)), (lender, (stopped,))):
        for line in lines:
            typed(host, line)
            up(host)
            wait(lambda: "8/8" in borrower.shell("agentctl volume ls").stdout, borrower.journal, 30.0)
            now = running(*hosts)
            assert lives.pop("aggd", set()) <= now.pop("aggd", set()), "the other host may begin one"
            assert now == lives, f"{host.name}: {line}"
            lives = running(*hosts)
    typed(borrower, memory("assert memory.read(0, len(data)) == data"))
    assert " running " in typed(borrower, "agentctl jobs")
    wait(lambda: re.search("gpu2 .* 8 ", lender.shell("agentctl hosts").stdout), lender.journal, 30.0)


def running(*hosts: BootedHost) -> dict[str, set[int]]:
    """All processes but the agents and what ends with them: name -> their pids."""
    found: dict[str, set[int]] = {}
    for host in hosts:
        for pid, command in host.processes().items():
            words = command.split()
            if "agent.program" in words and words[-1] != "forker":
                found.setdefault(words[words.index("agent.program") + 1], set()).add(pid)
            elif words[:2] == ["sleep", "600"]:
                found.setdefault("sleep", set()).add(pid)
    return found


@pytest.mark.parametrize("number", ["KILL", pytest.param("STOP", marks=pytest.mark.long)])
def test_an_agent_that_dies_or_hangs_is_started_again(hosts: tuple[BootedHost, BootedHost], number: str) -> None:
    _, second = hosts

    def restarts() -> int:
        return int(typed(second, "systemctl show covey -p NRestarts --value"))

    def restarted(times: int) -> bool:
        return restarts() == times

    before = restarts()
    typed(second, f"systemctl kill --kill-who=main --signal={number} covey")
    wait(partial(restarted, before + 1), second.journal, 40.0, 0.5)
    up(second)


@pytest.mark.long
def test_state_that_cannot_be_trusted_keeps_it_down_and_says_why(hosts: tuple[BootedHost, BootedHost]) -> None:
    _, second = hosts
    typed(second, "systemctl stop covey; cp -a /var/lib/covey/identity /tmp; echo rot > /var/lib/covey/identity")
    assert second.shell("systemctl start covey").returncode
    state = typed(second, "sleep 2; systemctl show covey -p ActiveState -p ExecMainStatus --value").split()
    assert state == ["failed", "3"] or state == ["3", "failed"]
    assert "the identity of this host cannot be read" in second.journal()
    typed(second, "cp -a /tmp/identity /var/lib/covey/; mv /etc/covey/gossip.key /tmp")
    assert second.shell("systemctl start covey").returncode
    assert "there is no gossip key" in second.journal(), "not systemd's own word for it"
    typed(second, "mv /tmp/gossip.key /etc/covey; systemctl restart covey")
    up(second)


@pytest.mark.long
def test_a_host_that_lost_its_power_boots_into_the_rack(hosts: tuple[BootedHost, BootedHost]) -> None:
    """A lender loses its power, then the host whose volume it is: its log is on its disk, and nothing is typed."""
    borrower, lender = hosts
    typed(borrower, memory("memory.write(0, data)"))

    def mapped() -> bool:
        """Whether every byte is right, wherever it is: slabs that are asked for find a lender again."""
        typed(borrower, memory("assert memory.read(0, len(data)) == data"))
        lent = re.search("gpu2 .* 8 ", lender.shell("agentctl hosts").stdout)
        return lent is not None and "8/8" in borrower.shell("agentctl volume ls").stdout

    for host in (lender, borrower):
        host.power_off()
        host.power_on()
        for each in hosts:
            up(each)
        wait(mapped, borrower.journal, 60.0, 1.0)


@pytest.mark.long
def test_units_of_an_environment_elsewhere_are_installed_by_agentd(hosts: tuple[BootedHost, BootedHost]) -> None:
    _, second = hosts
    kept = typed(second, "cat /etc/covey/agent.toml")
    said = typed(second, "agentd --install-unit")
    assert "/etc/systemd/system/covey.service: written" in said and "/etc/covey/agent.toml: kept" in said
    typed(second, said.partition("agentd: next: ")[2])
    assert f"{sys.prefix}/bin:" in typed(second, "systemctl show covey -p ExecStart")
    typed(second, "systemctl restart covey")
    up(second)
    assert typed(second, "cat /etc/covey/agent.toml") == kept
    typed(second, "cp /opt/covey/share/covey/covey*.service /etc/systemd/system/; systemctl daemon-reload")
    typed(second, "systemctl restart covey")
    up(second)


def test_a_host_that_leaves_is_gone_at_once(hosts: tuple[BootedHost, BootedHost]) -> None:
    first, second = hosts
    typed(second, "systemctl kill --signal=SIGINT covey")
    wait(lambda: "left" in first.shell("agentctl hosts").stdout, first.journal, 10.0)
