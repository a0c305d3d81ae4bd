"""Manual pages and completions say what the parsers take, and shells can read them."""

import gzip
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from cli.main import NOUNS, VERBS
from tools import manuals


@cache
def made() -> dict[str, bytes]:
    return dict(manuals.files())


def page(name: str, section: int) -> str:
    text = gzip.decompress(made()[f"usr/share/man/man{section}/{name}.{section}.gz"]).decode()
    return text.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "").replace("\\fI", "")


def test_every_program_that_people_type_has_a_page_and_completions() -> None:
    sections = {"agentctl": 1, "covey-rack": 1, "agentd": 8, "covey-swapd": 8}
    assert sections.keys() == manuals.programs().keys() == manuals.WORDS.keys()
    for name, section in sections.items():
        assert f".SH NAME\n{name} - " in page(name, section)
        assert f"usr/share/bash-completion/completions/{name}" in made()
        assert f"usr/share/zsh/vendor-completions/_{name}" in made()


def test_the_page_of_agentctl_has_all_its_commands_and_their_options() -> None:
    text = page("agentctl", 1)
    commands = [*NOUNS, *(f"{noun} {verb}" for noun, verbs in VERBS.items() for verb in verbs)]
    assert [command for command in commands if f"agentctl {command}" not in text] == []
    assert "--workers" in text and "--journal" not in text


def test_the_page_of_agentd_has_its_options() -> None:
    assert {"--check", "--show-config", "--install-unit", "--make-key"} <= set(
        re.findall(r"--[a-z-]+", page("agentd", 8))
    )


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_can_read_the_completions(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    for name, content in made().items():
        if (shell == "bash") == ("bash-completion" in name) and "/man/" not in name:
            (tmp_path / "script").write_bytes(content)
            done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), name


def test_bash_completes_a_command_and_an_option(tmp_path: Path) -> None:
    script = tmp_path / "agentctl"
    script.write_bytes(made()["usr/share/bash-completion/completions/agentctl"])

    def completed(*words: str) -> list[str]:
        typed = " ".join(f"'{word}'" for word in words)
        line = f". {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_agentctl; echo ${{COMPREPLY[@]}}"
        return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split()

    assert completed("agentctl", "vol") == ["volume"]
    assert completed("agentctl", "volume", "exp") == ["export"]
    assert "--workers" in completed("agentctl", "submit", "--wor")


def test_bash_completes_names_that_the_agent_knows_now(tmp_path: Path) -> None:
    script = tmp_path / "agentctl"
    script.write_bytes(made()["usr/share/bash-completion/completions/agentctl"])
    table = "JOB  NAME\nj7   train\nj12  eval\n2 jobs waiting or running; as gpu1 knows it, now"
    line = (
        f"agentctl() {{ echo '{table}'; }}; . {script}; COMP_WORDS=(agentctl why j1); COMP_CWORD=2; "
        "_shtab_agentctl; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["j12"]


def test_a_manual_page_is_read_without_a_warning(tmp_path: Path) -> None:
    if shutil.which("man") is None:
        pytest.skip("there is no man here")
    for name, content in made().items():
        if "/man/" in name:
            file = tmp_path / Path(name).name
            file.write_bytes(content)
            command = ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            assert (done.returncode, done.stderr) == (0, ""), name
