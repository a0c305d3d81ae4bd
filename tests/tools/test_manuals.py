"""Manual pages and completions say what the parsers take, and shells can read them."""

import gzip
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from cli.examples import EXAMPLES
from cli.main import MODULES, NOUNS, VERBS
from tools import annotated, manuals


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
    assert made()["usr/share/fish/vendor_completions.d/agentctl.fish"].startswith(b"# fish completion of agentctl")


def test_the_page_of_agentctl_has_all_its_commands_and_their_options() -> None:
    text = page("agentctl", 1)
    commands = [*NOUNS, *(f"{noun} {verb}" for noun, verbs in VERBS.items() for verb in verbs)]
    assert [command for command in commands if f"agentctl {command}" not in text] == []
    assert "--workers" in text and "--journal" not in text


def test_the_page_of_agentctl_has_the_example_of_each_command() -> None:
    text = page("agentctl", 1).replace("\\(aq", "'")
    assert [line for command in MODULES for line in EXAMPLES[command] if line not in text] == []


def test_the_page_of_agent_toml_has_every_setting_and_its_default() -> None:
    text = page("agent.toml", 5).replace("\\(aq", "'").replace("\\e", "\\")
    lines = [
        line.removeprefix("#") for line in annotated.FILE.read_text().splitlines() if re.match(r"#\w+ = |\[", line)
    ]
    assert len(lines) > 100 and [line for line in lines if line not in text] == []


def test_the_page_of_agentd_has_its_options() -> None:
    assert {"--check", "--show-config", "--install-unit", "--make-key"} <= set(
        re.findall(r"--[a-z-]+", page("agentd", 8))
    )


@pytest.mark.parametrize("shell", manuals.PLACES)
def test_a_shell_can_read_the_completions(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    for name, content in made().items():
        if name.startswith(f"usr/share/{shell}"):
            (tmp_path / "script").write_bytes(content)
            done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), name


def test_a_manual_page_has_no_error_of_roff(tmp_path: Path) -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("there is no mandoc here; next: apt install mandoc")
    for name, content in made().items():
        if "/man/" in name:
            file = tmp_path / Path(name).stem
            file.write_bytes(gzip.decompress(content))
            done = subprocess.run(["mandoc", "-Tlint", "-Werror", file], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (0, ""), name


def test_bash_completes_the_options_of_a_program(tmp_path: Path) -> None:
    script = tmp_path / "agentd"
    script.write_bytes(made()["usr/share/bash-completion/completions/agentd"])
    line = f". {script}; COMP_WORDS=(agentd --show); COMP_CWORD=1; _shtab_agentd; echo ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout == "--show-config\n"


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
