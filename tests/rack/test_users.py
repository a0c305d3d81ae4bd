"""Users of two real hosts with agents: each role by agentctl, and whom the agents do not let in."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos.rack.agents import AgentRack, wait
from chaos.rack.hosts import Host, Laboratory, signal_all, why_not

pytestmark = [
    pytest.mark.rack,
    pytest.mark.xdist_group("hosts"),
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be made here: {why_not()}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user"),
]
ROOT = Path(__file__).parents[2]
INSTALL = (ROOT / "docs/guides/install.md").read_text()
DOMAIN = "example.org"
PORT = 8470
TOML = f'[http]\nbind = "0.0.0.0:{PORT}"\n[access]\noperators = ["carol", "@wheels"]\n'
COVEY, WHEELS = 64_010, 64_011
PEOPLE = {"ann": 64_001, "bob": 64_002, "eve": 64_003, "carol": 64_004, "dora": 64_005, "mallory": 64_006}
"""Users of both hosts. Mallory is not in group covey, dora is in wheels."""
NAMELESS = 64_099
# A process on each host has loaded agentctl, and is forked for each command: another user may not be able to read this
# interpreter, and loading takes most of a command's time. A line of JSON for each command, and one for what came.
AGENTCTL = """
import encodings.idna, gettext, importlib, json, locale, os, shutil, sys, tempfile, traceback
import covey.core.carried, covey.core.units
from cli import main
for module in set(main.MODULES.values()):
    importlib.import_module(module)
import cryptography.hazmat.primitives.asymmetric.ec, cryptography.hazmat.primitives.serialization, cryptography.x509
for line in sys.stdin:
    uid, groups, config, argv = json.loads(line)
    files = [tempfile.TemporaryFile() for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, file in enumerate(files, 1):
                os.dup2(file.fileno(), number)
            os.environ["XDG_CONFIG_HOME"] = config
            os.setgroups(groups)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            code = main.main(argv)
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code or 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = [file.seek(0) or file.read().decode() for file in files]
    print(json.dumps([code, *said]), flush=True)
"""
typing: "dict[str, subprocess.Popen[str]]" = {}
"""Host -> its process in which agentctl is loaded."""


def with_people(host: Host) -> None:
    lines = "".join(f"{name}:x:{uid}:{uid}::/tmp:/bin/sh\\n" for name, uid in PEOPLE.items())
    members = ",".join(name for name in PEOPLE if name != "mallory")
    groups = f"covey:x:{COVEY}:{members}\\nwheels:x:{WHEELS}:dora\\n"
    for line in (
        "sed -i '/^covey:/d' /etc/group",
        f"printf '{lines}' >> /etc/passwd",
        f"printf '{groups}' >> /etc/group",
    ):
        done = host.shell(line)
        assert done.returncode == 0, done.stderr


def with_dns_name(host: Host) -> None:
    """Let all hosts know its DNS name, and `[http] names` have it, by the line of the page."""
    line = 'names = ["gpu1.example.org"]'
    assert f"`{line}`" in INSTALL
    toml = host.folder / "etc/agent.toml"
    toml.write_text(toml.read_text().replace("[http]", f"[http]\n{line.replace('gpu1', host.name)}"))
    for each in host.lab.hosts.values():
        with (each.folder / "hosts").open("a") as hosts:
            hosts.write(f"{host.address} {host.name}.{DOMAIN}\n")


@pytest.fixture(scope="module")
def rack() -> Iterator[AgentRack]:
    with Laboratory(2) as lab:
        rack = AgentRack(lab, voters=1, more_toml=TOML)
        for host in rack.hosts:
            with_people(host)
            with_dns_name(host)
            for folder in (host.folder, *list(host.folder.parents)[:2]):
                folder.chmod(folder.stat().st_mode | 0o011)
        for uid in (0, NAMELESS, *PEOPLE.values()):
            folder_of(rack, uid).mkdir()
            os.chown(folder_of(rack, uid), uid, uid)
        rack.start()
        rack.wait_up()
        done = typed(rack.hosts[0], "root", "tenant add ml --users ann,bob --quota 16")
        assert done.returncode == 0, done.stderr
        yield rack
        for process in typing.values():
            process.communicate()
        typing.clear()


def typed(host: Host, who: str | int, line: str) -> "subprocess.CompletedProcess[str]":
    """What a user gets who types this after `agentctl` on the host."""
    uid = who if isinstance(who, int) else PEOPLE.get(who, 0)
    groups = [] if who == "mallory" else [COVEY, WHEELS] if who == "dora" else [COVEY]
    config = host.folder.parent / f"config-{uid}"
    if host.name not in typing:
        typing[host.name] = host.conversation(["python", "-c", AGENTCTL])
    there = typing[host.name]
    assert there.stdin is not None and there.stdout is not None
    there.stdin.write(json.dumps([uid, groups, str(config), line.split()]) + "\n")
    there.stdin.flush()
    code, out, err = json.loads(there.stdout.readline())
    return subprocess.CompletedProcess(line, code, out, err)


def folder_of(rack: AgentRack, uid: int) -> Path:
    """The config folder of a user, which is the same on both hosts."""
    return rack.hosts[0].folder.parent / f"config-{uid}"


def refused(done: "subprocess.CompletedProcess[str]", code: int = 4) -> str:
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines), done.stdout) == (code, 3, ""), done
    assert lines[0].startswith("agentctl: ") and "why:" in lines[1] and "next:" in lines[2]
    return done.stderr


def test_a_users_job_is_the_users_on_every_host_and_others_see_its_outline(rack: AgentRack) -> None:
    gpu1, gpu2 = rack.hosts
    done = typed(gpu2, "ann", "submit --json --gpus 0 --cwd /tmp --no-env --name secret -- sleep 77711")
    assert done.returncode == 0, done.stderr
    id = json.loads(done.stdout)["data"]["id"]
    for host in rack.hosts:
        whole = json.loads(typed(host, "ann", f"job {id} --json").stdout)["data"]
        assert (whole["user"], whole["uid"], whole["tenant"]) == ("ann", PEOPLE["ann"], "ml")
        assert whole["argv"] == ["sleep", "77711"]
        for who in ("bob", "eve"):
            lists = ("jobs --everyone", "jobs --everyone --json", "status", "hosts --json")
            for line in (*lists, f"job {id}", f"job {id} --json", f"why {id}"):
                said = typed(host, who, line)
                assert said.returncode in (0, 8), said
                assert "77711" not in said.stdout and "secret" not in said.stdout, (who, line)
            assert "ann" in typed(host, who, "jobs --everyone").stdout
            for line in (f"logs {id}", f"cancel {id}", f"move {id} 0", f"scale {id} 2", f"tune {id} off"):
                assert "belongs to ann" in refused(typed(host, who, line)) or who == "eve", line
    assert typed(gpu1, "ann", f"logs {id}").returncode == 0
    assert typed(gpu1, "ann", f"cancel {id}").returncode == 0
    wait(lambda: "cancelled" in typed(gpu2, "bob", "jobs -a --everyone").stdout, lambda: rack.logs(rack.hosts), 60)
    assert "cancelled by ann" in typed(gpu2, "ann", f"why {id}").stdout


def test_tenants_are_the_operators_and_have_users_that_exist(rack: AgentRack) -> None:
    gpu1, gpu2 = rack.hosts
    for gpus, who in enumerate(("root", "carol", "dora"), 17):
        assert typed(gpu2, who, f"tenant set ml --quota {gpus}").returncode == 0, who
        told = "".join(typed(gpu1, "eve", "why tenant/ml").stdout.split())
        assert f"{gpus}GPUs,by{who}" in told, told
        assert "knows no user 'zoe'" in refused(typed(gpu1, who, "tenant add red --users zoe"))
    for who in ("ann", "eve"):
        assert "is for operators" in refused(typed(gpu1, who, "tenant add red --users ann"))
        assert "is for operators" in refused(typed(gpu1, who, "quota ml 99"))
        assert "is for operators" in refused(typed(gpu1, who, "hosts drain gpu2"))
    assert "ann bob" in typed(gpu2, "eve", "tenant").stdout


def test_who_may_submit_for_whom(rack: AgentRack) -> None:
    gpu1 = rack.hosts[0]
    submit = "submit --gpus 0 --cwd /tmp --no-env"
    assert "eve is in no tenant" in refused(typed(gpu1, "eve", f"{submit} -- true"))
    assert "not in tenant red" in refused(typed(gpu1, "ann", f"{submit} --tenant red -- true"))
    done = typed(gpu1, "root", f"{submit} --json --tenant red -- true")
    found = json.loads(done.stdout)["data"]
    assert (found["user"], found["uid"], found["tenant"]) == ("", None, "red")


def test_whoever_is_not_in_the_group_or_has_no_name_gets_nowhere(rack: AgentRack) -> None:
    gpu1 = rack.hosts[0]
    found = os.stat(gpu1.folder / "run" / "agent.sock")
    assert (found.st_mode & 0o777, found.st_gid) == (0o660, COVEY)
    assert "usermod -aG covey mallory" in refused(typed(gpu1, "mallory", "jobs"), 5)
    for line in ("jobs", "hosts", "submit --gpus 0 --cwd /tmp -- true"):
        assert f"knows no name of uid {NAMELESS}" in refused(typed(gpu1, NAMELESS, line))


def test_with_a_certificate_a_user_is_that_user_on_every_host_until_keys_are_rotated(rack: AgentRack) -> None:
    gpu1, gpu2 = rack.hosts
    there = f"--agent https://{gpu2.address}:{PORT}"
    assert "there is no" in refused(typed(gpu1, "ann", f"{there} jobs"))
    for who in ("root", "mallory"):
        refused(typed(gpu1, who, "login"), 4 if who == "root" else 5)
    for who in ("ann", "bob", "carol"):
        done = typed(gpu1, who, "login")
        assert done.returncode == 0 and f"{who} (uid {PEOPLE[who]}) until" in done.stdout, done
    files = {path.name: path.stat() for path in (folder_of(rack, PEOPLE["ann"]) / "covey").iterdir()}
    assert files.keys() == {"login.pem", "authority.pem"} and files["login.pem"].st_mode & 0o777 == 0o600
    done = typed(gpu1, "ann", f"{there} submit --json --gpus 0 --cwd /tmp --no-env -- sleep 88822")
    assert done.returncode == 0, done
    found = json.loads(done.stdout)["data"]
    assert (found["user"], found["uid"], found["tenant"]) == ("ann", PEOPLE["ann"], "ml")
    assert "88822" in typed(gpu1, "ann", f"{there} job {found['id']} --json").stdout
    for line in (f"logs {found['id']}", f"cancel {found['id']}"):
        assert "belongs to ann" in refused(typed(gpu1, "bob", f"{there} {line}"))
    assert "jobs cannot be read here" in refused(typed(gpu1, "ann", f"{there.replace('https', 'http')} jobs"))
    assert "is for operators" in refused(typed(gpu1, "ann", f"{there} quota ml 99"))
    assert typed(gpu1, "carol", f"{there} quota ml 21").returncode == 0
    assert typed(gpu1, "ann", f"{there} cancel {found['id']}").returncode == 0
    assert "login needs the unix socket of a host" in refused(typed(gpu1, "ann", f"{there} login"))
    assert typed(gpu1, "root", "keys rotate").returncode == 0
    assert "since your login" in refused(typed(gpu1, "ann", f"{there} jobs"), 1)
    assert typed(gpu1, "ann", "login").returncode == 0
    assert typed(gpu1, "ann", f"{there} jobs").returncode == 0
    told = "".join(typed(gpu1, "eve", "why host/gpu1").stdout.split())
    assert f"forann(uid{PEOPLE['ann']}),goodfor1days" in told, told


PROMETHEUS = shutil.which("prometheus")
TARGETS = [f"gpu{n}.{DOMAIN}:{PORT}" for n in (1, 2)]


def scrapes(folder: Path) -> list[str]:
    """Options of a Prometheus that reads what the page says, and the rules that are delivered."""
    (block,) = re.findall(r"(?ms)^```yaml\n(scrape_configs:\n.*?)^```", INSTALL)
    rules = ROOT / "deploy/prometheus/rules.yml"
    (folder / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s}}\nrule_files: [{rules}]\n{block}")
    return [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]


@pytest.mark.long
@pytest.mark.skipif(PROMETHEUS is None, reason="NO PROMETHEUS READ /metrics: it is not here (Debian: prometheus)")
def test_a_prometheus_scrapes_agents_by_their_names_with_tls_and_without(rack: AgentRack, tmp_path: Path) -> None:
    gpu1, gpu2 = rack.hosts

    def authority() -> None:
        assert typed(gpu1, "bob", "login").returncode == 0
        shutil.copy(folder_of(rack, PEOPLE["bob"]) / "covey/authority.pem", tmp_path)

    @contextmanager
    def runs() -> Iterator[None]:
        address = "--web.listen-address=127.0.0.1:9090"
        process = gpu2.popen([str(PROMETHEUS), *scrapes(tmp_path), address], tmp_path / "log")
        try:
            yield
        finally:
            signal_all(gpu2.find(address), signal.SIGKILL)
            process.wait()

    def asked(query: str) -> Any:
        reads = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:9090/api/v1/{query}').read().decode())"
        done = gpu2.run(["python", "-c", reads])
        return json.loads(done.stdout)["data"] if done.returncode == 0 else {}

    def answered(query: str) -> list[dict[str, Any]]:
        return list(asked(f"query?query={query}").get("result", ()))

    def up() -> dict[tuple[str, str], bool]:
        return {(one["metric"]["job"], one["metric"]["instance"]): one["value"][1] == "1" for one in answered("up")}

    def waited(job: str, is_up: bool) -> None:
        wait(lambda: [up().get((job, one)) for one in TARGETS] == [is_up] * 2, lambda: f"{asked('targets')}", 60.0, 0.5)

    authority()
    with runs():
        for job in ("covey", "covey-tls"):
            waited(job, True)
            count = f"count(count+by(__name__)({{__name__=~%22covey_.%2B%22,job=%22{job}%22}}))"
            assert int(answered(count)[0]["value"][1]) > 100
        for name in ("http_request", "event_loop_lag"):
            assert float(answered(f"sum(covey_{name}_seconds_count)")[0]["value"][1]) > 0
        wait(
            lambda: all(rule["health"] == "ok" for group in asked("rules")["groups"] for rule in group["rules"]),
            lambda: f"a rule cannot be evaluated: {asked('rules')}",
            60.0,
            1.0,
        )
    assert typed(gpu1, "root", "keys rotate").returncode == 0
    with runs():
        waited("covey-tls", False)
        assert "certificate signed by unknown authority" in json.dumps(asked("targets"))
        authority()
        waited("covey-tls", True)
