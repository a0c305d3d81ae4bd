"""What each wheel holds: a training environment gets `covey` alone, a GPU host no simulator; nothing is forgotten."""

import configparser
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from covey.core.version import VERSION
from tools import annotated
from tools.wheels import FOLDERS, ROOT, build, plain

TOPS = {
    "covey_job": {"covey"},
    "covey_agent": {"gossip", "plugins", "agent", "cli"},
    "covey_tools": {"sim", "chaos"},
}
PROGRAMS = {
    "covey_job": set(),
    "covey_agent": {"agentd", "agentctl", "covey-program", "covey-rack", "covey-starter", "covey-swapd"},
    "covey_tools": {"covey-sim", "covey-vectors", "covey-chaos"},
}
SHARED = {"agent.toml", "examples/digits.py"} | {
    f"covey.{kind}" for kind in ("service", "sysctl.conf", "sysusers.conf", "tmpfiles.conf")
}
CARRIED = {".py", ".toml", ".html", ".css", ".js", ".typed", ".c", ".pyi"}
Wheel = Callable[[str], zipfile.ZipFile]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return cache(lambda name: zipfile.ZipFile(build(name, tmp_path_factory.mktemp(name))))


def inside(built: zipfile.ZipFile, kind: str) -> list[str]:
    """Names in the part of a wheel whose name ends with this: `.dist-info`, `.data`; without the part's name."""
    return [name.partition("/")[2] for name in built.namelist() if name.partition("/")[0].endswith(kind)]


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.xdist_group("wheels")
def test_a_wheel_holds_its_packages_whole_and_no_other(wheel: Wheel, name: str) -> None:
    names = wheel(name).namelist()
    tops = {path.partition("/")[0] for path in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == TOPS[name]
    ours = [p for top in TOPS[name] for p in (ROOT / top).rglob("*") if p.suffix in CARRIED and p.is_file()]
    wanted = {str(p.relative_to(ROOT)) for p in ours if p.name != "pyproject.toml" and "mutants" not in p.parts}
    assert len(wanted) > 20
    assert wanted - set(names) == set()


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.xdist_group("wheels")
def test_a_wheel_has_its_programs_the_one_version_and_the_licence(wheel: Wheel, name: str) -> None:
    info = f"{name}-{VERSION}.dist-info"
    texts = {at: wheel(name).read(f"{info}/{at}").decode() for at in inside(wheel(name), ".dist-info")}
    assert f"\nVersion: {VERSION}\n" in texts["METADATA"]
    assert texts["licenses/LICENSE"] == (ROOT / "LICENSE").read_text()
    entries = configparser.ConfigParser()
    entries.read_string(texts.get("entry_points.txt", ""))
    assert set(dict(entries).get("console_scripts", ())) == PROGRAMS[name]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.cpu_seconds(600)
@pytest.mark.xdist_group("wheels")
def test_the_compiled_wheel_of_the_agent_runs_its_byte_path_compiled(wheel: Wheel, tmp_path: Path) -> None:
    made = build("covey_agent", tmp_path / "dist", compiled=True)
    assert made.name.startswith(f"covey_agent-{VERSION}-cp3") and "-linux_" in made.name
    there = tmp_path / "there"
    for each in (zipfile.ZipFile(made), wheel("covey_job")):
        each.extractall(there)
    try_it = "from agent.compiled.files import *; print(use('vold'), use('slabd'), look().files[CIPHER], sep=chr(10))"
    environ = {**plain(os.environ), "PYTHONPATH": str(there)}
    done = subprocess.run(
        [sys.executable, "-c", try_it], env=environ, cwd="/", capture_output=True, text=True, check=True
    )
    *said, cipher = done.stdout.splitlines()
    assert said == ["compiled", "compiled"]
    assert Path(cipher).is_relative_to(there / "agent/compiled/built")


@pytest.mark.xdist_group("wheels")
def test_a_pure_wheel_is_for_every_python_and_carries_no_machine_code(wheel: Wheel) -> None:
    built = wheel("covey_agent")
    assert str(built.filename).endswith("-py3-none-any.whl")
    assert [name for name in built.namelist() if ".so" in name or "/built/" in name] == []


@pytest.mark.xdist_group("wheels")
def test_units_settings_and_the_example_come_with_the_agent(wheel: Wheel) -> None:
    shared = {path.removeprefix("data/share/covey/") for path in inside(wheel("covey_agent"), ".data")}
    assert shared >= SHARED
    steps = (ROOT / "docs/guides/install.md").read_text().partition("cd /opt/covey/share/covey")[2].partition("```")[0]
    named = set(re.findall(r"(?<![\w./])(?:\./)?((?:covey|agent)\.[a-z.]+)", steps))
    assert named == SHARED - {"examples/digits.py"}, "docs/guides/install.md names what the wheel brings"
    unit = (ROOT / "systemd/covey.service").read_text()
    assert "Documentation=file:/opt/covey/share/covey/guides/install.md\n" in unit
    assert {"guides/install.md", "guides/memory.md"} <= shared
    assert inside(wheel("covey_job"), ".data") == inside(wheel("covey_tools"), ".data") == []


def test_the_version_is_written_in_one_place() -> None:
    folders = {top for tops in TOPS.values() for top in tops}
    files = [path for folder in sorted(folders) for path in (ROOT / folder).rglob("*.py")]
    files += [ROOT / folder / "pyproject.toml" for folder in FOLDERS.values()]
    said = [path for path in files if re.search(rf"(?<![\d.]){re.escape(VERSION)}(?![\d.])", path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in said] == ["covey/core/version.py"]


def test_the_annotated_agent_toml_says_every_setting_and_its_default() -> None:
    assert Path(ROOT, "systemd", "agent.toml").read_text() == annotated.text(), "next: make agent-toml"


def test_hooks_before_a_commit_are_those_of_the_gate_and_of_this_checkout() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (.*)", text) == ["local"]
    assert set(re.findall(r"language: (.*)", text)) == {"system"}
    tools = [entry.split() for entry in re.findall(r"entry: (.*)", text)]
    assert [Path(words[0]).name for words in tools] == ["ruff", "ruff", "mypy", "lint-imports"]
    gate = (ROOT / "Makefile").read_text()
    assert [words[0] for words in tools if f"$(BIN)/{Path(words[0]).name}" not in gate] == []
