"""The Debian package, from building it to its purge, on a host whose first process is systemd."""

import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from chaos.rack.agents import wait
from chaos.rack.booted import BootedHost, InstalledHost, why_not_booted
from chaos.rack.hosts import Laboratory
from covey.core.version import VERSION
from tests.rack.installed import DEVICES, PAGE, typed
from tools import deb

pytestmark = [pytest.mark.rack, pytest.mark.slow, pytest.mark.xdist_group("booted"), pytest.mark.cpu_seconds(400)]
READY_S = 15.0
"""The most seconds of processors from `apt install` to an agent that is ready; by the clock of an idle machine it took
7 s."""
NO_INDEX = ("error sending request", "No matching distribution", "Temporary failure", "dns error", "Network is")
"""What installers say where there is no package index to get the libraries from."""


class DebHost(InstalledHost):
    """A host that has the folder of the package, and nothing else of this tree."""

    folder_of_package: ClassVar[Path]

    def made_with(self) -> dict[str, str]:
        return {**super().made_with(), "OURS": str(self.folder_of_package)}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := deb.lacking():
        pytest.skip(f"no package can be built here: {why}")
    try:
        return deb.package(tmp_path_factory.mktemp("deb"), compiles=False)
    except deb.NotBuilt as why:
        if any(word in str(why) for word in NO_INDEX):
            pytest.skip(f"no libraries for the package can be had here: {str(why).splitlines()[-1]}")
        raise


@pytest.fixture(scope="module")
def host(package: Path) -> Iterator[BootedHost]:
    if trouble := why_not_booted():
        pytest.skip(f"no host can be booted here: {trouble}")
    DebHost.folder_of_package = package.parent
    with Laboratory(1, kind=DebHost) as lab:
        (one,) = lab.hosts.values()
        assert isinstance(one, BootedHost)
        # images of containers forbid packages to start services
        typed(one, "rm -f /usr/sbin/policy-rc.d; mkdir -p /opt")
        yield one


def by_the_page() -> list[str]:
    """The lines that the page tells people to type."""
    block = PAGE.read_text().partition("## On Debian: one package\n")[2].partition("```sh\n")[2].partition("\n```")[0]
    lines = [re.sub(r"\s+# .*", "", line.strip()) for line in block.splitlines()]
    assert lines == ["make deb", "apt install ./dist/covey_*.deb"]
    return lines


def cpu_s(host: BootedHost) -> float:
    """Seconds of processors that everything on this host has used."""
    found = re.search(r"(?m)^usage_usec (\d+)$", typed(host, "cat /sys/fs/cgroup/cpu.stat"))
    assert found
    return int(found[1]) / 1e6


def up(host: BootedHost) -> None:
    wait(lambda: "1 of 1 host alive; gpu1 leads" in host.shell("agentctl hosts").stdout, host.journal, 60.0)


def names(host: BootedHost) -> set[str]:
    """Everything that this host alone has, and whose name has Covey's in it: on its own disk, whatever happens on that
    of this machine meanwhile, and in what it has in memory."""
    disk = host.lab.state(host)
    found = {path for part in ("upper", "units") for path in (disk / part).rglob("*covey*")}
    kept = {f"/{path.relative_to(disk)}" for path in found if not _is_gone(path)}
    return kept | set(typed(host, "find /tmp /run /dev/shm -xdev -name '*covey*'").splitlines())


def _is_gone(path: Path) -> bool:
    """Whether it says that a file of the machine is not there for the host (a whiteout of overlayfs)."""
    found = path.lstat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


@pytest.mark.long
def test_it_is_one_file_with_the_byte_path_units_manuals_and_completions(package: Path) -> None:
    assert package.name == f"covey_{VERSION}_{deb.architecture()}.deb"
    listed = subprocess.run(["dpkg-deb", "--contents", package], capture_output=True, text=True, check=True).stdout
    files = {line.split()[5].removeprefix(".") for line in listed.splitlines()}
    assert files >= {
        "/usr/lib/systemd/system/covey.service",
        "/usr/lib/sysusers.d/covey.conf",
        "/usr/lib/tmpfiles.d/covey.conf",
        "/usr/lib/sysctl.d/10-covey.conf",
        "/etc/covey/agent.toml",
        "/usr/share/man/man1/agentctl.1.gz",
        "/usr/share/man/man5/agent.toml.5.gz",
        "/usr/share/man/man8/agentd.8.gz",
        "/usr/share/bash-completion/completions/agentctl",
        "/usr/share/zsh/vendor-completions/_agentctl",
        "/usr/share/fish/vendor_completions.d/agentctl.fish",
        "/opt/covey/bin/agentd",
        f"/opt/covey/share/covey/covey_job-{VERSION}-py3-none-any.whl",
    }
    owners = {line.split()[1] for line in listed.splitlines()}
    assert owners == {"root/root"}
    said = subprocess.run(["dpkg-deb", "--info", package, "conffiles"], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["/etc/covey/agent.toml"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("lintian") is None, reason="there is no lintian here; next: apt install lintian")
def test_lintian_finds_no_error(package: Path) -> None:
    command = ["lintian", "--allow-root", "--tag-display-limit", "0", str(package)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in found.stdout.splitlines() if line.startswith("E:")] == []


@pytest.mark.long
def test_from_apt_install_to_ready_to_a_job_to_purge(package: Path, host: BootedHost) -> None:
    """The whole life of an installation, in one test, since each part stands on the one before."""
    before = names(host)
    began_s = cpu_s(host)
    _, install = by_the_page()
    said = typed(host, install.replace("./dist/covey_*.deb", str(package)), 120.0)
    took_s = cpu_s(host) - began_s
    assert typed(host, "systemctl is-active covey").strip() == "active"
    assert took_s < READY_S
    assert "covey: the agent runs; next: agentctl hosts" in said
    a_host_that_was_installed(host)
    a_job_runs_on_while_it_is_upgraded(package, host)
    assert "`apt purge covey`" in PAGE.read_text()
    purged = typed(host, "apt purge -y covey", 120.0)
    assert re.search(r"warning: jobs run on this host.*\n\s+j\d+ sleep", purged)
    nothing_is_left(host, before)


def a_host_that_was_installed(host: BootedHost) -> None:
    up(host)
    assert "wrong" not in typed(host, "agentctl doctor").replace("0 wrong", "")
    assert typed(host, "readlink -f /usr/bin/agentctl /usr/sbin/agentd").split() == [
        "/opt/covey/bin/agentctl",
        "/opt/covey/bin/agentd",
    ]
    assert typed(host, "man -w agentctl agentd").split() == [
        "/usr/share/man/man1/agentctl.1.gz",
        "/usr/share/man/man8/agentd.8.gz",
    ]
    completes = ". /usr/share/bash-completion/completions/agentctl && COMP_WORDS=(agentctl vol) COMP_CWORD=1"
    assert typed(host, f"{completes} && _agentctl && echo ${{COMPREPLY[@]}}").strip() == "volume"
    assert typed(host, "stat -c '%a %U %G' /etc/covey").strip() == "750 root covey"
    typed(host, f"printf '%s' '{DEVICES}' > /etc/covey/agent.toml; systemctl restart covey")
    up(host)
    assert "hello" in typed(host, "cd /; agentctl submit --follow -- echo hello")
    typed(host, "systemctl enable --now covey-starter")


def a_job_runs_on_while_it_is_upgraded(package: Path, host: BootedHost) -> None:
    typed(host, "cd /; agentctl submit -- sleep 600")
    wait(lambda: " running " in typed(host, "agentctl jobs"), host.journal, 60.0)

    def sleeps() -> list[int]:
        return [pid for pid, command in host.processes().items() if command.split()[:2] == ["sleep", "600"]]

    (pid,) = wait(sleeps, host.journal, 30.0)
    typed(host, f"apt-get install -y --reinstall -o Dpkg::Options::=--force-confold {package}", 120.0)
    up(host)
    assert pid in host.processes(), "an upgrade ends no job"
    assert "simulated = 2" in typed(host, "cat /etc/covey/agent.toml"), "settings are a person's"
    wait(lambda: " running " in typed(host, "agentctl jobs"), host.journal, 60.0)


def nothing_is_left(host: BootedHost, before: set[str]) -> None:
    assert names(host) == before
    assert host.shell("getent passwd covey; getent group covey").stdout == ""
    assert host.shell("systemctl list-unit-files | grep covey; ls -d /run/covey* /opt/covey").stdout == ""
    assert [each for each in host.processes().values() if "covey" in each or each.startswith("sleep 600")] == []
