"""A Debian package of Covey: an environment of its own in /opt/covey, units, settings, manual pages, completions.

python -m tools.deb DIR      writes DIR/covey_VERSION_ARCHITECTURE.deb; `make deb` runs it

The package is for the Python and the C library of this machine's distribution, so that it is built on the oldest one of
a rack. The byte path is compiled once for these sources (minutes), kept in this environment (`agent.compiled`) and
taken from there; where it cannot be compiled the package is built without it and says so.
"""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from agent.compiled.build import NotCompiled
from agent.compiled.build import build as compiled
from agent.compiled.files import abi, look
from agent.etc import units
from covey.core.version import VERSION
from tools import manuals
from tools.wheels import ROOT, build, plain

PYTHON = "/usr/bin/python3"
"""The distribution's Python, which every user may run; the environment in the package is made by it."""
PREFIX = "opt/covey"
PARTS = ROOT / "deploy" / "deb"
WHEELS = ("covey_job", "covey_agent")
EXTRAS = {"covey_agent": "[top]"}
"""Wheel -> what of its extras is installed, too."""
PROGRAMS = ("agentctl", "agentd", "covey-rack", "covey-swapd")
"""Programs that everybody has in /usr/bin; those of section 8 in /usr/sbin."""
PLACES = {
    name: place if name in units.KEPT else place.replace("etc/", "usr/lib/", 1) for name, place in units.PLACES.items()
}
"""File of systemd/ -> where it lies on a host: a package's own in /usr/lib, what people change in /etc."""
SCRIPTS = ("postinst", "prerm", "postrm")


class NotBuilt(Exception):
    """Why there is no package, with what to do next."""


def package(into: Path, compiles: bool = True) -> Path:
    """The package. NotBuilt when this machine cannot make it. Without `compiles` the byte path is compiled in it only
    where it was compiled for this checkout before."""
    if why := lacking():
        raise NotBuilt(why)
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="covey-deb-") as folder:
        root = Path(folder, "root")
        environment(root / PREFIX, Path(folder, "wheels"))
        byte_path = carried(root / PREFIX, compiles)
        settled(root)
        name = f"covey_{VERSION}_{architecture()}.deb"
        control(root, byte_path)
        run("dpkg-deb", "--root-owner-group", "-Zgzip", "-z6", "--build", str(root), str(Path(folder, name)))
        shutil.move(Path(folder, name), into / name)
    return into / name


def lacking() -> str:
    """What this machine lacks to make a package, with what to do next; empty: nothing."""
    for program, from_package in ((PYTHON, "python3"), ("dpkg-deb", "dpkg")):
        if shutil.which(program) is None:
            return f"there is no {program}\nnext: apt install {from_package}"
    return ""


def run(*command: str) -> str:
    """What the command said. NotBuilt with its words when it failed."""
    done = subprocess.run(command, env=plain(os.environ), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotBuilt(f"{' '.join(command[:3])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(prefix: Path, wheels: Path) -> None:
    """Make the environment, with the wheels of this checkout and what they require; programs in it name the place
    where it will be."""
    run(PYTHON, "-m", "venv", "--without-pip", str(prefix))
    built = [build(name, wheels, sdist=False) for name in WHEELS]
    installer = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", str(prefix / "bin/python")]
    if subprocess.run([sys.executable, "-c", "import uv"], capture_output=True, check=False).returncode:
        installer = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(prefix / "bin/python"),
            "install",
            "-q",
            "--no-compile",
        ]
    run(*installer, *(f"{wheel}{EXTRAS.get(name, '')}" for name, wheel in zip(WHEELS, built, strict=True)))
    for file in (*(prefix / "bin").iterdir(), prefix / "pyvenv.cfg"):
        if not file.is_symlink() and str(prefix) in (text := file.read_text()):
            file.write_text(text.replace(str(prefix), f"/{PREFIX}"))
    ours = ("python*", "agent*", "covey-*")
    others = [each for each in (prefix / "bin").iterdir() if not any(each.match(name) for name in ours)]
    for left in (*others, *prefix.glob(".*")):
        left.unlink()
    shutil.copy2(next(wheel for wheel in built if wheel.name.startswith("covey_job")), prefix / "share/covey")


def carried(prefix: Path, compiles: bool) -> str:
    """Put the compiled byte path where a wheel has it. How it runs, in a word and with the reason."""
    target = run(str(prefix / "bin/python"), "-c", "import sysconfig; print(sysconfig.get_config_var('SOABI'))").strip()
    if target != abi():
        return f"interpreted: {sys.executable} is {abi()}, and {PYTHON} is {target}"
    began_s, known = time.monotonic(), look()
    if not known.files and not compiles:
        return f"interpreted: {known.why}"
    try:
        made = compiled()
    except (NotCompiled, OSError) as why:
        return f"interpreted: {str(why).splitlines()[0]}"
    if not known.files:
        print(f"deb: the byte path was compiled in {time.monotonic() - began_s:.0f} s, and kept for the next time")
    (there,) = prefix.glob("lib/python*/site-packages/agent/compiled")
    shutil.copytree(made, there / "built" / made.name)
    return "compiled"


def settled(root: Path) -> None:
    """Put units, settings, manual pages and completions into their places; compile all modules to bytecode."""
    share = root / PREFIX / "share/covey"
    for name, place in PLACES.items():
        placed(share / name, root / place)
    manuals.write(root)
    for program in PROGRAMS:
        link = root / "usr" / ("sbin" if program in manuals.SYSTEM else "bin") / program
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"/{PREFIX}/bin/{program}")
    document = root / "usr/share/doc/covey"
    document.mkdir(parents=True)
    shutil.copy2(PARTS / "copyright", document / "copyright")
    (document / "changelog.gz").write_bytes(gzip.compress(changelog().encode(), mtime=0))
    overrides = root / "usr/share/lintian/overrides/covey"
    placed(PARTS / "lintian-overrides", overrides)
    for each in (root, *root.rglob("*")):
        if not each.is_symlink():
            each.chmod(0o755 if each.is_dir() or (each.stat().st_mode & 0o100 and "bin" in each.parts) else 0o644)
    strip = ("-s", str(root), "-p", "/")
    run(str(root / PREFIX / "bin/python"), "-m", "compileall", "-q", "-j0", *strip, str(root / PREFIX / "lib"))


def placed(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, to)


def changelog() -> str:
    """Debian's form of the changelog names version, person and day, and where the words are."""
    day = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime((ROOT / "CHANGELOG.md").stat().st_mtime))
    maintainer = re.search(r"^Maintainer: (.*)$", (PARTS / "control").read_text(), re.MULTILINE)
    assert maintainer
    return f"covey ({VERSION}) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- {maintainer[1]}  {day}\n"


def control(root: Path, byte_path: str) -> None:
    """The folder DEBIAN: what the package says of itself, and its scripts."""
    folder = root / "DEBIAN"
    size = sum(each.lstat().st_size for each in root.rglob("*") if each.is_file())
    text = (PARTS / "control").read_text()
    folder.mkdir()
    (folder / "control").write_text(
        text.format(
            version=VERSION,
            architecture=architecture(),
            kib=size // 1024,
            python=python_wanted(),
            libc=str(os.confstr("CS_GNU_LIBC_VERSION")).split()[-1],
            byte_path=byte_path,
        )
    )
    (folder / "conffiles").write_text("/etc/covey/agent.toml\n")
    (folder / "md5sums").write_text("".join(f"{line}\n" for line in sums(root)))
    for script in SCRIPTS:
        placed(PARTS / script, folder / script)
        (folder / script).chmod(0o755)


def sums(root: Path) -> Iterator[str]:
    for file in sorted(root.rglob("*")):
        inside = file.relative_to(root)
        if file.is_file() and not file.is_symlink() and inside.parts[0] not in ("DEBIAN", "etc"):
            yield f"{hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()}  {inside}"


def python_wanted() -> str:
    """`python3 (>= 3.11), python3 (<< 3.12)`: what is in the environment is for this one alone."""
    major, minor = run(PYTHON, "-c", "import sys; print(*sys.version_info[:2])").split()
    return f"python3 (>= {major}.{minor}), python3 (<< {major}.{int(minor) + 1})"


def architecture() -> str:
    return run("dpkg", "--print-architecture").strip()


def main(into: Path) -> int:
    began_s = time.monotonic()
    try:
        made = package(into)
    except NotBuilt as why:
        print(f"deb: {why}", file=sys.stderr)
        return 1
    said = run("dpkg-deb", "--field", str(made), "Description").splitlines()[-1].strip()
    print(f"deb: {made}, {made.stat().st_size / 1e6:.1f} MB, {time.monotonic() - began_s:.0f} s. {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
