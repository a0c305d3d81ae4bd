"""`make operator-test`: the documents' own lines make a rack of eight hosts from the package, three people work on it,
and an operator does to it what operators do, up to its purge; then the Ansible role makes another (`by_ansible.py`;
`--ansible`: that alone). Prints what each step took.

Not a part of `make check`: it takes some ten minutes, and root. Hosts are booted with systemd (`chaos/rack/booted.py`)
and have the folder of the packages, and nothing else of this tree. Two simulated GPUs stand for those of each host.
Every second host never has a default route, and the others lose theirs while jobs run. The version after this one, to
which the rack is upgraded, is this one's package with another number.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos.rack.agents import wait
from chaos.rack.booted import BootedHost, why_not_booted
from chaos.rack.hosts import IPV4, Laboratory
from covey.core.version import VERSION
from tests.rack import by_ansible
from tests.rack.installed import PAGE, typed
from tests.rack.next_release import NEXT_VERSION
from tests.rack.test_deb import DebHost, by_the_page, names
from tools import deb

START = PAGE.parents[1] / "start" / "operator.md"
UPGRADES = PAGE.parent / "upgrades.md"
HOSTS = 8
COMMANDS_MAX = 12
"""The most commands until a rack of three hosts stands; each further host takes four, which are the same lines."""
PEOPLE = {"ann": "ml", "bob": "ml", "cal": "ops"}
"""User -> tenant."""
QUOTAS = {"ml": 4, "ops": 2}
HARDWARE = '[gpus]\nsimulated = 2\n[log]\nlevel = "info"\n'
LONG_S = 240.0
RUN = "echo begin {n} $(date +%s.%N) $(hostname) >> ~/ran; sleep {s}; echo end {n} $(date +%s.%N) $(hostname) >> ~/ran"
"""What each job does: it writes down when and where it ran, in its user's home."""


def said_by(page: Path, line: str) -> str:
    """The line, which must stand on that page, so that nobody types what no document says."""
    assert line in page.read_text(), f"{page.name} does not say: {line}"
    return line


class Operator:
    """Whoever installs and runs the rack."""

    def __init__(self, hosts: list[BootedHost], package: Path, newer: Path) -> None:
        self.hosts, self.package, self.newer = hosts, package, newer
        self.steps: list[tuple[str, float]] = []
        self.typed = 0
        """Commands typed until now."""
        self.jobs: dict[int, str] = {}
        """Number of a job -> who submitted it."""
        self.ids: dict[int, str] = {}
        self.there = list(hosts[:3])
        """Hosts of the rack that have power."""

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        began_s = time.monotonic()
        print(f"{what} ...", flush=True)
        yield
        self.steps.append((what, time.monotonic() - began_s))
        print(f"    {self.steps[-1][1]:.1f} s", flush=True)

    def type(self, host: BootedHost, line: str, timeout_s: float = LONG_S) -> str:
        self.typed += 1
        return typed(host, line, timeout_s)

    # ---- the rack ----

    def apt_install(self, host: BootedHost, package: Path) -> None:
        _, install = by_the_page()
        self.type(host, install.replace("./dist/covey_*.deb", str(package)))

    def install(self, host: BootedHost, package: Path) -> None:
        if host.number % 2 == 0:
            host.ip("route", "del", "default")
        typed(host, "rm -f /usr/sbin/policy-rc.d; mkdir -p /opt")  # images of containers forbid services to start
        self.apt_install(host, package)
        typed(host, f"printf '%s' '{HARDWARE}' > /etc/covey/agent.toml; systemctl restart covey")  # the machine's GPUs
        self.type(host, said_by(PAGE.parent / "security.md", "systemctl enable --now covey-starter"))

    def join(self, host: BootedHost, line: str) -> None:
        said_by(PAGE, "type that line on each further host with `--leave-own` behind it")
        said = self.type(host, f"{line} --leave-own", 120.0)
        assert f"{host.name} is a member" in said, said

    def token(self) -> str:
        return join_line(self.type(self.there[0], said_by(PAGE, "agentctl rack token")))

    def alive(self, count: int) -> None:
        def seen() -> bool:
            return all(self.hosts_of(host).count("alive") == count for host in self.there)

        wait(seen, self.journals, 120.0, 0.5)

    def hosts_of(self, host: BootedHost) -> list[str]:
        return [row["state"] for row in self.answered(host, "hosts") or ()]

    def asked(self, host: BootedHost, words: str) -> Any:
        """What the agent says. AssertionError where it does not answer: what is not known is not none."""
        return json.loads(typed(host, f"agentctl {words} --json"))["data"]

    def answered(self, host: BootedHost, words: str) -> Any:
        """What the agent says, for whoever waits for it; None: it does not answer now."""
        done = host.shell(f"agentctl {words} --json")
        return json.loads(done.stdout)["data"] if done.returncode == 0 else None

    def journals(self) -> str:
        shown = [f"{each.name}\n{each.shell('agentctl hosts; agentctl jobs -a').stdout}" for each in self.there]
        return "\n".join([*shown, *(each.journal(lines=12) for each in self.there)])

    def voters(self, *hosts: str) -> None:
        def vote() -> object:
            found = self.answered(self.there[0], "voters")
            return bool(found) and sorted(map(str, found["voters"])) == sorted(hosts) and found["under_way"] == ""

        wait(vote, self.journals, 180.0, 1.0)

    # ---- people ----

    def people(self, host: BootedHost) -> None:
        for user in PEOPLE:
            typed(host, f"useradd -m {user} && chmod 700 /home/{user}")
            typed(host, said_by(PAGE, "usermod -aG covey ann").replace("ann", user))

    def submit(self, user: str, seconds: float, host: BootedHost | None = None) -> int:
        n = len(self.jobs) + 1
        host = host or self.there[n % len(self.there)]
        script = RUN.format(n=n, s=seconds)
        done = as_user(host, user, f"agentctl submit --gpus 1 --name of-{user} -- sh -c '{script}'")
        assert done.returncode == 0, done.stderr + host.journal()
        self.jobs[n], self.ids[n] = user, done.stdout.split()[0]
        return n

    def over_quota(self) -> None:
        used: dict[str, int] = {}
        for job in self.asked(self.there[0], "jobs"):
            if job["state"] in ("placing", "running", "stopping"):
                used[job["tenant"]] = used.get(job["tenant"], 0) + 1
        assert all(count <= QUOTAS[tenant] for tenant, count in used.items()), f"{used} of {QUOTAS}"

    def running(self, count: int) -> None:
        def enough() -> object:
            self.over_quota()
            return [job["state"] for job in self.asked(self.there[0], "jobs")].count("running") >= count

        wait(enough, self.journals, 120.0, 0.5)

    def all_done(self) -> None:
        def over() -> bool:
            self.over_quota()
            states = {job["id"]: job["state"] for job in self.asked(self.there[0], "jobs -a")}
            return {states.get(id) for id in self.ids.values()} == {"done"}

        wait(over, self.journals, 300.0, 1.0)

    def each_ran_once(self, undisturbed: Sequence[int] = ()) -> None:
        """By what the jobs wrote themselves, on all disks. `undisturbed`: jobs that also began only once."""
        lines = [line.split() for host in self.there for user in PEOPLE for line in ran(host, user)]
        for n, user in self.jobs.items():
            for what in ("begin", "end") if n in undisturbed else ("end",):
                count = len([line for line in lines if line[:2] == [what, str(n)]])
                assert count == 1, f"job {n} of {user}: {count} times {what}: {lines}"


def join_line(said: str) -> str:
    (line,) = re.findall(r"(?m)^agentctl rack join [0-9.]+:7946 --token covey-[a-z2-7]{48}$", said)
    return str(line)


def as_user(host: BootedHost, user: str, line: str) -> "subprocess.CompletedProcess[str]":
    return host.run(["runuser", "-l", user, "-c", line], 120.0)


def ran(host: BootedHost, user: str) -> list[str]:
    return host.shell(f"cat /home/{user}/ran 2> /dev/null").stdout.splitlines()


def stands(it: Operator) -> None:
    """From nothing to a rack of three hosts, each of which may vote."""
    first, second, third, *_ = it.hosts
    for host in (first, second, third):
        with it.step(f"{host.name}: apt install, starter"):
            it.install(host, it.package)
    with it.step("rack init"):
        said_by(PAGE, "On the first host `agentctl rack init` prints the line")
        line = join_line(it.type(first, "agentctl rack init", 120.0))
    for host in (second, third):
        with it.step(f"{host.name}: rack join"):
            it.join(host, line)
        line = it.token() if host is second else ""
    with it.step("doctor on every host"):
        it.alive(3)
        for host in it.there:
            done = host.shell("agentctl doctor")
            assert done.returncode == 0, done.stdout
    it.typed += 1
    print(f"the rack stands after {it.typed} commands", flush=True)
    assert it.typed <= COMMANDS_MAX, f"{it.typed} commands until the rack stands"


def people_come(it: Operator) -> None:
    with it.step("users, tenants, quotas"):
        for host in it.there:
            it.people(host)
        line = said_by(PAGE, "agentctl tenant add ml --users ann --quota 16")
        for tenant, quota in QUOTAS.items():
            users = ",".join(user for user, of in PEOPLE.items() if of == tenant)
            typed(it.there[0], line.replace("ml", tenant).replace("ann", users).replace("16", str(quota)))


def each_sees_their_own(it: Operator) -> None:
    n = next(n for n, user in it.jobs.items() if user == "ann")
    host, id = it.there[0], it.ids[n]
    assert as_user(host, "ann", f"agentctl logs {id}").returncode == 0
    for user in ("bob", "cal"):
        for words in (f"logs {id}", f"cancel {id}", "hosts drain gpu2", "keys rotate", "hosts forget gpu2"):
            assert as_user(host, user, f"agentctl {words}").returncode == 4, f"{user}: {words}"
        seen = as_user(host, user, f"agentctl job {id} --json")
        assert "sleep" not in seen.stdout and "of-ann" not in seen.stdout, seen.stdout
        for path in ("/home/ann/ran", "/etc/covey/gossip.key", "/var/lib/covey/identity"):
            assert as_user(host, user, f"cat {path}").returncode != 0, f"{user} reads {path}"


def grows(it: Operator) -> None:
    """The other hosts come, while jobs run."""
    with it.step("three hosts vote, by themselves"):
        it.voters("gpu1", "gpu2", "gpu3")
    with it.step("jobs of three users"):
        for user in (*PEOPLE, *PEOPLE):
            it.submit(user, 25)
        it.running(4)
        each_sees_their_own(it)
    for host in it.hosts[3:]:
        with it.step(f"{host.name}: apt install, rack join"):
            it.install(host, it.package)
            it.people(host)
            it.join(host, it.token())
            it.there.append(host)
            it.alive(len(it.there))


def works(it: Operator) -> None:
    """People submit, and meanwhile the operator changes the rack under their jobs."""
    first, second, third, *_ = it.hosts
    with it.step("keys rotate"):
        assert "done: every host seals with" in typed(second, said_by(START, "agentctl keys rotate"))
    with it.step("cordon, uncordon"):
        typed(first, said_by(UPGRADES, "agentctl hosts cordon gpu4").replace("gpu4", "gpu2"))
        wait(lambda: "cordoned by" in first.shell("agentctl hosts").stdout, it.journals, 10.0)
        typed(first, said_by(UPGRADES, "agentctl hosts uncordon gpu4").replace("gpu4", "gpu2"))
    with it.step("drain, resume"):
        drain = said_by(UPGRADES, "agentctl hosts drain gpu4").replace("gpu4", "gpu3")
        said_by(UPGRADES, "with `--stop-jobs` they stop")
        typed(first, f"{drain} --stop-jobs --wait", 180.0)
        assert not [job for job in it.asked(first, "jobs") if job["state"] == "running" and on(job, "gpu3")]
        typed(first, said_by(UPGRADES, "agentctl hosts resume gpu4").replace("gpu4", "gpu3"))
    with it.step("no host has a default route"):
        for host in it.there[::2]:
            host.ip("route", "del", "default")
        assert not [host.name for host in it.there if host.shell("ip route show default").stdout]
    upgraded(it)
    with it.step("power of a voter pulled while jobs run; another votes instead"):
        for user in (*PEOPLE, *PEOPLE):
            it.submit(user, 20)
        it.running(4)
        third.power_off()
        it.there.remove(third)
        typed(first, said_by(UPGRADES, "agentctl voters replace gpu3 gpu4"), 120.0)
        it.voters("gpu1", "gpu2", "gpu4")
    with it.step("its power is back"):
        third.power_on()
        it.there.append(third)
        it.alive(HOSTS)
    with it.step("all jobs end"):
        it.all_done()
        it.each_ran_once()
        each_sees_their_own(it)
    with it.step("a bundle has no key"):
        typed(first, "cd /tmp; agentctl bundle b.tar.gz && mkdir -p b && tar -xzf b.tar.gz -C b")
        key = typed(
            first, "cat /etc/covey/gossip.key /var/lib/covey/gossip.key 2>&1 | grep -xE '[0-9a-f]{64}'"
        ).split()[0]
        assert first.shell(f"grep -rE '{key}|covey-[a-z2-7]{{48}}' /tmp/b").stdout == ""
        assert first.shell("ls /tmp/b/*/journal.txt").returncode == 0, "the bundle holds what it should"
        typed(first, "rm -r /tmp/b /tmp/b.tar.gz")


def upgraded(it: Operator) -> None:
    """Every host gets the next version while jobs run, none of which notices."""
    said_by(UPGRADES, "install the new package or wheels and restart the agents one after another, each once")
    version = said_by(UPGRADES, "agentctl version")
    running = [it.submit(user, 90) for user in PEOPLE]
    it.running(len(running))
    for host in it.there:
        with it.step(f"{host.name}: upgrade to {NEXT_VERSION}"):
            running.append(it.submit("ann", 5))
            it.apt_install(host, it.newer)
            it.alive(HOSTS)
            it.over_quota()
    with it.step("all run the new version, and no job noticed"):
        for host in it.there:
            assert VERSION not in typed(host, version).split(), typed(host, version)
        it.all_done()
        it.each_ran_once(running)


def on(job: dict[str, Any], host: str) -> bool:
    return any(place["host"] == host for place in job["places"])


def changes(it: Operator) -> None:
    """Hosts with another address, another disk, another name: what the page says of each."""
    first, (sixth, seventh, eighth) = it.hosts[0], it.hosts[-3:]
    with it.step(f"{seventh.name}: another address"):
        assert "start its agent there" in UPGRADES.read_text()
        for verb, number in (("del", seventh.number), ("add", 107)):
            seventh.ip("addr", verb, f"{IPV4.address(number)}/{IPV4.bits}", "dev", "eth0")
        typed(seventh, said_by(UPGRADES, "systemctl restart covey"))
        said = IPV4.address(107) + ":"
        wait(lambda: said in str(it.answered(first, "hosts")), it.journals, 60.0)
        it.alive(len(it.hosts))
    with it.step(f"{sixth.name}: another disk under its name"):
        assert "what the installation says: `agentctl rack join` with a token" in UPGRADES.read_text()
        it.there.remove(sixth)
        sixth.power_off()
        for part in sixth.lab.state(sixth).iterdir():
            shutil.rmtree(part)
        sixth.power_on()
        it.install(sixth, it.newer)
        it.people(sixth)
        it.join(sixth, it.token())
        it.there.append(sixth)
        it.alive(len(it.hosts))
    with it.step(f"{eighth.name}: another name, gpu9"):
        typed(first, f"{said_by(UPGRADES, 'agentctl hosts drain gpu4').replace('gpu4', eighth.name)} --wait", 120.0)
        typed(eighth, said_by(UPGRADES, "systemctl kill --signal=SIGINT covey"))
        wait(lambda: "left" in it.hosts_of(first), it.journals, 60.0)
        typed(eighth, said_by(UPGRADES, "mv /var/lib/covey /var/lib/covey.old"))
        typed(eighth, "hostname gpu9; echo gpu9 > /etc/hostname")
        said_by(UPGRADES, "join with `--leave-own` and a token, and forget the old name")
        said = it.type(eighth, f"{it.token()} --leave-own", 120.0)
        assert "gpu9 is a member" in said, said
        typed(first, said_by(UPGRADES, "agentctl hosts forget gpu4").replace("gpu4", eighth.name), 60.0)
        it.alive(len(it.hosts))
        assert eighth.name not in typed(first, "agentctl hosts")
        typed(eighth, "rm -r /var/lib/covey.old")
    with it.step("jobs on each of them"):
        for host in (sixth, seventh, eighth):
            it.submit("ann", 1, host)
        it.all_done()


def goes(it: Operator, before: dict[str, set[str]]) -> None:
    first, _, _, fourth, *_ = it.hosts
    with it.step("a voter that never comes back: forget; another takes its seat"):
        fourth.power_off()
        it.there.remove(fourth)
        refused = first.shell("agentctl hosts forget gpu4")
        assert refused.returncode == 4 and len(refused.stderr.splitlines()) == 3, refused
        wait(lambda: "gone" in it.hosts_of(first), it.journals, 120.0, 1.0)
        typed(first, said_by(UPGRADES, "agentctl hosts forget gpu4"), 60.0)
        it.alive(HOSTS - 1)
        wait(
            lambda: all("gpu4" not in each.shell("agentctl hosts").stdout for each in it.there), it.journals, 60.0, 0.5
        )
        it.voters("gpu1", "gpu2", "gpu3")
    said_by(PAGE, "`apt purge covey` ends the agent")
    for host in sorted(it.there, key=lambda host: -host.number):
        with it.step(f"{host.name}: apt purge"):
            typed(host, "apt purge -y covey", LONG_S)
            it.there.remove(host)
            left = names(host) - before[host.name]
            assert not left, f"{host.name} still has {sorted(left)}"
            assert not [each for each in host.processes().values() if "covey" in each or "sleep" in each.split()[:1]]
            assert host.shell(f"pgrep -u {','.join(PEOPLE)}").stdout == "", "a process of a user runs on"
            assert host.shell("getent passwd covey; getent group covey; ls -d /var/lib/covey*").stdout == ""


def next_package(package: Path, into: Path) -> Path:
    """A package that has the next version for Debian, for agents and for what is installed in it, and is the same."""
    root, arch = into / "root", deb.architecture()
    deb.run("dpkg-deb", "-R", str(package), str(root))
    (here,) = (root / deb.PREFIX).glob("lib/python*/site-packages")
    about = list(here.glob(f"covey_*-{VERSION}.dist-info"))
    for file in (*(each / "METADATA" for each in about), here / "covey/core/version.py", root / "DEBIAN/control"):
        text = file.read_text()
        assert VERSION in text, file
        file.write_text(text.replace(VERSION, NEXT_VERSION))
    for each in about:
        each.rename(each.with_name(each.name.replace(VERSION, NEXT_VERSION)))
    strip = ("-s", str(root), "-p", "/")
    deb.run(str(root / deb.PREFIX / "bin/python"), "-m", "compileall", "-q", *strip, str(here / "covey/core"))
    made = into / f"covey_{NEXT_VERSION}_{arch}.deb"
    deb.run("dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(root), str(made))
    shutil.rmtree(root)
    return made


def walk(package: Path, newer: Path) -> None:
    DebHost.folder_of_package = package.parent
    with Laboratory(HOSTS, default_route=True, kind=DebHost) as lab:
        hosts = [host for host in lab.hosts.values() if isinstance(host, BootedHost)]
        it = Operator(hosts, package, newer)
        before = {host.name: names(host) for host in hosts}
        try:
            stands(it)
            people_come(it)
            grows(it)
            works(it)
            changes(it)
            goes(it, before)
        finally:
            print("\n| step | s |\n|---|---|")
            for what, seconds in it.steps:
                print(f"| {what} | {seconds:.1f} |")
            print(f"| **all** | **{sum(seconds for _, seconds in it.steps):.0f}** |", flush=True)
    print(f"{len(it.jobs)} jobs of {len(PEOPLE)} users, each run to its end once; no file or process is left")


def main() -> int:
    if why := why_not_booted() or deb.lacking():
        print(f"make operator-test is skipped: {why}")
        return 0
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    given = [word for word in sys.argv[1:] if word not in options]
    with tempfile.TemporaryDirectory(prefix="covey-operator-") as folder:
        try:
            built = shutil.copy2(given[0], folder) if given else deb.package(Path(folder), compiles=False)
            newer = next_package(Path(built), Path(folder))
        except deb.NotBuilt as why_not:
            print(f"make operator-test is skipped: no package can be built: {str(why_not).splitlines()[-1]}")
            return 0
        if "--ansible" not in options:
            walk(Path(built), newer)
        if not by_ansible.playbook():
            print("the Ansible role is not played: there is no Ansible here; next: pip install ansible-core")
            return 0
        began_s = time.monotonic()
        by_ansible.walk(Path(built), newer, Path(folder))
        print(f"the Ansible role: a rack of three, nothing changed again, upgraded: {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
