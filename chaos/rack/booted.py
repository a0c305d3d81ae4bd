"""Hosts of a laboratory whose first process is systemd, so that units run as on bare metal: users, sandbox, watchdog.

The root of such a host is this machine's, read-only under a layer that stays when its power fails; the machine's own
services are hidden. Covey's programs are in /opt/covey/bin, and what the wheel brings in /opt/covey/share/covey.
/run/machine-net is the network of this machine, for what the kernel has in that one alone (NBD's netlink).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from chaos.rack.hosts import Host, NoLaboratory, why_not

SYSTEMD = Path("/lib/systemd/systemd")
ROOT = Path(__file__).parents[2]
"""The tree whose code runs on such hosts, whatever is installed in this environment."""
SHARE = "/opt/covey/share/covey"
BOOTED_S = 60.0
BOOTED = ("running", "degraded")
"""States of a booted systemd. `degraded`: some unit of the machine itself failed, none of Covey's."""
TRIAL = """
set -e
mount -t tmpfs tmpfs "$FOLDER"
mkdir "$FOLDER/upper" "$FOLDER/work" "$FOLDER/root" "$FOLDER/groups"
mount -t overlay overlay -o "lowerdir=/,upperdir=$FOLDER/upper,workdir=$FOLDER/work" "$FOLDER/root"
mount -t cgroup2 cgroup2 "$FOLDER/groups"
"""
"""Script of operations that the kernel must permit."""
CLEAR_UP = """
mount -t cgroup2 cgroup2 "$FOLDER/run" || exit 0
for _ in $(seq 50); do
    find "$FOLDER/run$CGROUP" -depth -type d -exec rmdir {} ';' 2> /dev/null
    if [ ! -e "$FOLDER/run$CGROUP" ]; then break; fi
    sleep 0.1
done
umount "$FOLDER/run"
"""
HIDDEN = (
    *("getty.target", "systemd-udevd.service", "systemd-udev-trigger.service", "systemd-udev-settle.service"),
    *("systemd-udevd-control.socket", "systemd-udevd-kernel.socket", "systemd-logind.service", "dev-hugepages.mount"),
)
"""Units of the machine that would use its devices and terminals."""

SET_UP = """
set -e
mount -t cgroup2 cgroup2 "$FOLDER/run"
mkdir "$FOLDER/run$CGROUP"
echo $$ > "$FOLDER/run$CGROUP/cgroup.procs"
umount "$FOLDER/run"
exec unshare --cgroup --mount --propagation unchanged bash -c "$ROOT_UP"
"""
"""Script that gives each host a control group of its own."""
DISK_UP = """
mountpoint -q "$FOLDER/state" || mount -t tmpfs tmpfs "$FOLDER/state"
chmod 755 "$FOLDER/state"
"""
"""Script that runs in the laboratory itself, whose mounts outlive a host's power."""

ROOT_UP = """
set -e
layer="$FOLDER/state" root="$FOLDER/root"
first=$(if [ -e "$layer/upper" ]; then echo no; else echo yes; fi)
mkdir -p "$layer/upper" "$layer/work" "$layer/units"
mount -t overlay overlay -o "lowerdir=/,upperdir=$layer/upper,workdir=$layer/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
touch "$root/run/machine-net"
mount --bind /proc/1/ns/net "$root/run/machine-net" 2> /dev/null || rm "$root/run/machine-net"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount --bind "$layer/units" "$root/etc/systemd/system"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for device in /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/nbd*; do
    if [ -e "$device" ]; then cp -a "$device" "$root/dev"; fi
done
while read -r path; do
    [ -n "$path" ] || continue
    mkdir -p "$root$path"
    mount --rbind "$path" "$root$path"
    while [ "$path" != / ]; do
        path=$(dirname "$path")
        chmod o+x "$root$path"
    done
done <<< "$OURS"
if [ $first = yes ]; then
    mkdir -p "$root/old" "$root/etc/systemd/system.conf.d"
    if [ -n "$PROGRAMS" ]; then
        mkdir -p "$root$SHARE"
        ln -s "$PROGRAMS" "$root/opt/covey/bin"
        cp "$UNITS"/* "$root$SHARE"
        cd "$root/etc/systemd/system.conf.d"
        printf '[Manager]\nDefaultEnvironment="PYTHONPATH=%s"\n' "$MODULES" > ours.conf
    fi
    for unit in $HIDDEN; do ln -s /dev/null "$root/etc/systemd/system/$unit"; done
    rm -f "$root/etc/machine-id"
    touch "$root/etc/machine-id"
fi
cat "$FOLDER/hosts" > "$root/etc/hosts"
echo "$NAME" > "$root/etc/hostname"
hostname "$NAME"
ip link set lo up
cd "$root"
pivot_root . old
umount -l /old
mount --make-rshared /
echo up
exec env -i container=covey PATH=/usr/sbin:/usr/bin:/sbin:/bin "$SYSTEMD" --unit=multi-user.target > /dev/null 2>&1
"""


def why_not_booted() -> str:
    """Why no host can be booted on this machine; empty when it can."""
    if not SYSTEMD.exists():
        return "there is no systemd here; next: apt install systemd"
    if os.geteuid():
        return "systemd as a first process needs root"
    if trouble := why_not():
        return trouble
    with tempfile.TemporaryDirectory(prefix="covey-booted-") as folder:
        trial = ["unshare", "--mount", "--propagation", "private", "bash", "-c", TRIAL]
        tried = subprocess.run(trial, env={**os.environ, "FOLDER": folder}, capture_output=True, text=True, check=False)
    return f"{tried.stderr.strip()}; next: a machine with overlayfs and cgroup2" if tried.returncode else ""


def _outermost(paths: set[Path]) -> Iterator[Path]:
    """Paths that are in none of the others, and not where every host has them."""
    everywhere = Path("/usr")
    for path in sorted(paths - {everywhere}):
        if not any(other in path.parents for other in paths | {everywhere}):
            yield path


class BootedHost(Host):
    """A host whose first process is systemd. `run` and `shell` are what its root types."""

    set_up = SET_UP

    def made_with(self) -> dict[str, str]:
        programs = Path(sys.executable).parent
        ours = _outermost({ROOT, programs.parent, Path(sys.base_prefix)})
        return {
            **super().made_with(),
            "ROOT_UP": ROOT_UP,
            "CGROUP": self._cgroup(),
            "OURS": "\n".join(map(str, ours)),
            "PROGRAMS": str(programs),
            "UNITS": str(ROOT / "systemd"),
            "SHARE": SHARE,
            "SYSTEMD": str(SYSTEMD),
            "HIDDEN": " ".join(HIDDEN),
            "MODULES": str(ROOT),
        }

    def power_on(self) -> None:
        self._in_laboratory(DISK_UP)
        super().power_on()
        until_s = time.monotonic() + BOOTED_S
        while (said := self.run(["systemctl", "is-system-running", "--wait"], BOOTED_S)).stdout.strip() not in BOOTED:
            if time.monotonic() > until_s:
                raise NoLaboratory(f"{self.name} has not booted after {BOOTED_S:g} s: {said.stdout}{said.stderr}")
            time.sleep(0.1)

    def power_off(self) -> None:
        if self.init is None:
            return
        super().power_off()
        self._in_laboratory(CLEAR_UP)

    def _in_laboratory(self, script: str) -> None:
        variables = {"FOLDER": str(self.folder), "CGROUP": self._cgroup()}
        subprocess.run([*self.lab.inside(), "bash", "-c", script], env={**os.environ, **variables}, check=False)

    def _cgroup(self) -> str:
        """Name of the host's control group, below the group of this process."""
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        ours = next((line[3:] for line in lines if line.startswith("0::")), "/")
        return f"{ours.rstrip('/')}/{self.lab.folder.name}-{self.name}"

    def environment(self) -> dict[str, str]:
        """Environment variables of root on this host."""
        return {
            "PATH": "/opt/covey/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/run",
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            **self.environ,
        }

    def enter(self) -> list[str]:
        return [*super().enter(), "--cgroup"]

    def journal(self, unit: str = "covey", lines: int = 20) -> str:
        return self.run(["journalctl", "-u", unit, "-n", str(lines), "--no-pager", "-o", "cat"]).stdout


class InstalledHost(BootedHost):
    """A host that runs what is installed in /opt/covey of this machine, and nothing of this tree."""

    def made_with(self) -> dict[str, str]:
        return {**super().made_with(), "OURS": "", "PROGRAMS": ""}

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in super().environment().items() if name != "PYTHONPATH"}
