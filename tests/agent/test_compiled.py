"""The byte path as machine code is used only where it was made from these very sources, for this Python, by somebody
who may (`agent.compiled`), and everybody is told whether it is. That it does the same is shown by its tests, run so:
`make compiled`."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.compiled import build, compiler, files
from agent.compiled.files import CIPHER, MODULES, SUFFIX, Look


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment and a wheel in which nothing was compiled."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(files, "carried", lambda: tmp_path / "wheel")
    return tmp_path


def fill(folder: Path) -> Path:
    """Make a folder of compiled modules, without a compiler: none of them can be imported."""
    for name in ("abc__mypyc", *(module.replace(".", "/") for module in (*MODULES, CIPHER))):
        file = folder / (name + SUFFIX)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\x7fELF")
        file.chmod(0o755)
    return folder


@pytest.fixture
def made(prefix: Path) -> Path:
    return fill(files.folder())


def test_every_module_and_what_it_imports_of_ours_is_looked_at() -> None:
    """Types of what they import are compiled in: one that changed makes the result another one's."""
    sources = {file.relative_to(files.ROOT).as_posix() for file in files.sources()}
    assert CIPHER.replace(".", "/") + ".c" in sources
    for module in MODULES:
        path = module.replace(".", "/") + ".py"
        assert path in sources
        words = (files.ROOT / path).read_text().split()
        ours = {word for word in words if word.startswith(("agent.", "covey.", "gossip.", "plugins."))}
        imported = [word for word in ours if (files.ROOT / (word.replace(".", "/") + ".py")).is_file()]
        assert all(word.replace(".", "/") + ".py" in sources for word in imported), module


def test_no_folder_of_the_machine_that_compiles_is_searched_where_it_runs() -> None:
    """Whoever owns a folder of that name there could put a library into it."""
    link = "gcc -pthread -shared -L/home/py/lib -Wl,-rpath,/home/py/lib -Wl,-O1"
    assert compiler.linker(link) == "gcc -pthread -shared -L/home/py/lib -Wl,-O1"
    assert compiler.linker(link, "ccache clang") == "ccache clang -pthread -shared -L/home/py/lib -Wl,-O1"


def test_the_byte_path_runs_compiled_and_nothing_else_does(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_fails", lambda modules: "")
    assert files.use("supervisor") == files.use("aggd") == ""
    assert files.use("vold") == "compiled" == files.told(files.look())
    finder = sys.meta_path[0]
    spec = finder.find_spec("plugins.memory.datapath.doors.nbd_front", None)
    assert spec is not None and spec.origin == str(made / f"plugins/memory/datapath/doors/nbd_front{SUFFIX}")
    assert finder.find_spec("abc__mypyc", None) is not None
    assert finder.find_spec("plugins.memory.datapath.vold", None) is None


def test_what_is_forked_from_an_agent_runs_as_the_agent_does(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_fails", lambda modules: "no libcrypto" if CIPHER in modules else "")
    monkeypatch.setattr(files, "_of_agent", [])
    files.use_in_agent()
    shutil.rmtree(made)
    said = "compiled; but pages are sealed one by one, since no libcrypto; next: install OpenSSL 3"
    assert files.told_of_agent() == files.use("vold") == said and files.use("spill") == "compiled"
    looks = "import sys, agent.agentd; from agent.compiled.files import *; print({*MODULES, CIPHER} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", looks], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n", "an agent decides before it imports any"


def test_what_a_wheel_carries_is_used_and_what_was_compiled_here_comes_first(prefix: Path) -> None:
    carried = fill(files.carried() / files.folder_name())
    assert files.look().files[CIPHER].is_relative_to(carried)
    here = fill(files.folder())
    assert files.look().files[CIPHER].is_relative_to(here)


# ---- why it is not used ----------------------------------------------------------------------------------------------


def test_where_it_was_never_compiled_people_are_told_and_what_to_do(prefix: Path) -> None:
    said = files.use("vold")
    assert said == files.told(files.look()) and said.startswith("interpreted: it was never compiled for this")
    assert f"; next: {sys.executable} -m agent.compiled" in said


def test_what_was_made_from_other_sources_is_not_used(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = prefix / "clock.py"
    source.write_text("now_s = 1\n")
    monkeypatch.setattr(files, "ROOT", prefix)
    monkeypatch.setattr(files, "sources", lambda: [source])
    made = fill(files.folder())
    assert files.look().files
    source.write_text("now_s = 2\n")
    assert files.look() == Look({}, f"it was compiled from other sources (in {made.parent})")


def test_what_was_made_for_another_python_is_not_used(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was = files.abi()
    monkeypatch.setattr(files, "abi", lambda: "cpython-399-arm64-linux-gnu")
    assert files.look() == Look({}, f"it was compiled for {was}, and this is cpython-399-arm64-linux-gnu")


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda file: os.chmod(file, 0o777), "other users can write to {file}"),
        (lambda file: file.unlink(), "{folder} is not whole: it lacks agent.ports.network.stream"),
    ],
)
def test_what_others_can_write_or_is_not_whole_is_not_used(made: Path, harm: Callable[[Path], None], why: str) -> None:
    file = made / ("agent/ports/network/stream" + SUFFIX)
    harm(file)
    assert files.look() == Look({}, why.format(file=file, folder=made))


def test_what_cannot_be_imported_is_left_and_the_program_runs_interpreted(made: Path) -> None:
    before = list(sys.meta_path)
    said = files.use("slabd")
    assert said.startswith("interpreted: the import of its machine code failed with: ") and "abc__mypyc" in said
    assert sys.meta_path == before, "later imports find the sources"


def test_without_a_libcrypto_all_else_runs_compiled(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_fails", lambda modules: "no libcrypto" if CIPHER in modules else "")
    assert files.use("spill") == "compiled", "it seals nothing"
    said = files.use("vold")
    assert said == "compiled; but pages are sealed one by one, since no libcrypto; next: install OpenSSL 3"


# ---- compiling -------------------------------------------------------------------------------------------------------


def test_without_a_compiler_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", str(prefix / "nothing"))
    assert build.main() == 1
    assert "install gcc" in capsys.readouterr().err and not list(prefix.iterdir())


def test_types_of_pytorch_and_jax_are_not_read() -> None:
    """Either took minutes and gigabytes."""
    default, *followed = build.MYPY.split("\n[mypy-")
    assert "\nfollow_imports = skip\n" in default + "\n"
    names = {name.partition(",")[0] for name in followed}
    assert names == {"agent", "covey", "gossip", "plugins", *build.READ} and not names & {"torch", "jax", "jaxlib"}


BUILD = """
import sys
from pathlib import Path
from agent.compiled import build
work = Path(sys.argv[1])
work.mkdir()
script = work / "compiler"
script.write_text(
    "import subprocess, sys; from agent.compiled.compiler import guard; guard(sys.argv[1]);"
    "open(sys.argv[1] + '/half.c', 'w').close();"
    "print(subprocess.Popen(['sleep', '600'], start_new_session=False).pid, file=open(sys.argv[2], 'w'), flush=True);"
    "import time; time.sleep(600)"
)
build.guarded([sys.executable, str(script), str(work), sys.argv[2]], work)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(true: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.02)
    raise AssertionError(what)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_build_that_is_killed_leaves_no_compiler_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    work, told = tmp_path / ".covey-work", tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(work), str(told)], env={**os.environ, "PYTHONPATH": str(files.ROOT)}
    )
    try:
        until(lambda: told.exists() and told.read_text().endswith("\n"), "the compiler did not begin")
        compiler = int(told.read_text())
        group = os.getpgid(compiler)
        assert lives(compiler) and (work / "half.c").exists()
    finally:
        process.send_signal(number)
        process.wait()
    try:
        until(lambda: not lives(compiler), "the compiler runs on")
        until(lambda: not work.exists(), "half of the files are left")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def test_what_an_earlier_build_left_is_removed_and_two_do_not_compile_at_once(prefix: Path) -> None:
    (prefix / ".covey-left").mkdir()
    with build._alone(prefix):
        assert not (prefix / ".covey-left").exists()
        with pytest.raises(build.NotCompiled, match="another process compiles"), build._alone(prefix):
            pass
