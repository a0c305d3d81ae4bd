"""The house rules that no linter knows, as tests. `docs/design/STYLE.md` says why each of them exists."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.asserting import File, can_fail, opened
from tests.sleeping import sleeps
from tools import reached

ROOT = Path(__file__).parent.parent
PACKAGES = ("covey", "gossip", "plugins", "agent", "cli", "sim", "chaos")
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/__init__.py"))
PURE_PLUGINS = [*PLUGINS, ROOT / "gossip/membership", ROOT / "gossip/spread", ROOT / "agent/raft"]
PLUGIN_PARTS = {"__init__", "plugin", "messages", "policy", "machine", "datapath", "service", "disk"}
IMPURE = {"asyncio", "time", "socket", "os", "subprocess", "threading", "zmq", "aiohttp", "structlog"}
OUTSIDE = {"time", "os", "uuid", "threading", "subprocess", "secrets", "socket", "multiprocessing", "select", "signal"}
LINES_MAX = 700
TEST_LINES_MAX = 900
LONGER_WITH_REASON: dict[str, str] = {}
FOLDER_FILES_MAX = 15
"""Files of a folder of product code, beside `__init__`."""
FULLER_WITH_REASON = {"chaos/stories": "one file a story, found by their names"}
ARGUMENTS_MAX = 8
"""Arguments of a function of product code, beside `self`."""
MORE_ARGUMENTS = {
    "covey/job/tensors.py::__init__",
    "covey/tensors/aggregator/block_rounds.py::__init__",
    "covey/tensors/numbers/tensor_wire.py::frame",
}
"""Functions that still take more. The list only shrinks."""
WALLS = {
    "agent/rpc/answers.py",
    "agent/runtime/plugin_runtime.py",
    "agent/api/http.py",
    "agent/ports/devices/driver_calls.py",
    "agent/program.py",
    "cli/main.py",
    "covey/frameworks/torch/devices.py",
    "covey/hooks/site/sitecustomize.py",
    "covey/hooks/frameworks/jax_hooks.py",
    "covey/hooks/frameworks/torch_hooks.py",
    "covey/hooks/frameworks/torch_memory.py",
    "covey/hooks/turns/hooked.py",
    "covey/hooks/watch.py",
    "covey/tensors/aggregator/aggregator_rounds.py",
    "covey/torch.py",
    "gossip/service.py",
    "plugins/memory/datapath/volumes/lenders.py",
}
"""Files where anything may be caught: the wall between plugins, what another host asks, the last resort of a command,
the wall between the slabs of a volume, what runs inside a script that did not ask for it, the thread of a driver's
call and the one that reads sums, whose callers get what they raised; and the simulator, which must survive whatever its
hosts raise."""


def files(*under: Path) -> list[Path]:
    return sorted(path for folder in under for path in folder.rglob("*.py"))


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        return [path for path in ROOT.rglob("*") if path.is_file() and not any(p.startswith(".") for p in path.parts)]
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


OUR_FILES = files(*(ROOT / package for package in PACKAGES))
TEST_FILES = files(ROOT / "tests")
TOOL_FILES = [*sorted((ROOT / "tools").glob("*.py")), *files(ROOT / "tools/gpu")]


@pytest.mark.parametrize("plugin", PURE_PLUGINS, ids=named)
def test_a_plugin_has_the_parts_of_a_plugin_and_nothing_else(plugin: Path) -> None:
    parts = {path.stem for path in plugin.iterdir() if not path.name.startswith("__pycache__")}
    assert parts <= PLUGIN_PARTS, f"{named(plugin)}: {sorted(parts - PLUGIN_PARTS)} is not a part of a plugin"
    assert {"messages", "policy", "machine"} <= parts


@pytest.mark.parametrize("plugin", PURE_PLUGINS, ids=named)
def test_what_thinks_and_remembers_touches_nothing_outside(plugin: Path) -> None:
    for part in ("messages", "policy", "machine"):
        for path in [plugin / f"{part}.py", *files(plugin / part)]:
            if path.exists():
                assert not IMPURE & set(imports(path)), f"{named(path)} imports {IMPURE & set(imports(path))}"


def test_plugins_and_gossip_reach_the_outside_through_ports_only() -> None:
    wrong = {
        named(path): OUTSIDE & set(imports(path))
        for path in files(ROOT / "plugins", ROOT / "gossip")
        if OUTSIDE & set(imports(path))
    }
    assert not wrong


def test_what_agents_do_not_run_says_why() -> None:
    assert reached.ours()[0] == []


def test_files_stay_small_enough_to_walk() -> None:
    long = {named(path): len(path.read_text().splitlines()) for path in OUR_FILES + TOOL_FILES}
    assert {name: n for name, n in long.items() if n > LINES_MAX and name not in LONGER_WITH_REASON} == {}
    tests = {named(path): len(path.read_text().splitlines()) for path in TEST_FILES}
    assert {name: n for name, n in tests.items() if n > TEST_LINES_MAX} == {}


def test_folders_stay_small_enough_to_look_through() -> None:
    count: dict[str, int] = {}
    for path in OUR_FILES:
        if path.name != "__init__.py":
            count[named(path.parent)] = count.get(named(path.parent), 0) + 1
    assert {folder for folder, n in count.items() if n > FOLDER_FILES_MAX} == set(FULLER_WITH_REASON)


def test_functions_take_few_arguments() -> None:
    found = set()
    for path in OUR_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if sum(each.arg not in ("self", "cls") for each in taken) > ARGUMENTS_MAX:
                    found.add(f"{named(path)}::{node.name}")
    assert found == MORE_ARGUMENTS


def test_nothing_is_left_open() -> None:
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error"]) + r")\b")
    allowed = {
        "chaos/world/loop.py",
        "tests/chaos/world/test_world.py",
    }  # a virtual loop refuses what has no meaning there
    found = [
        named(path)
        for path in OUR_FILES + TEST_FILES + TOOL_FILES
        if marks.search(path.read_text()) and named(path) not in allowed
    ]
    assert found == []


EVERYTHING = re.compile(r"except\s*:|except.*Exception\b")
"""What may be a handler of everything: only files with such a line are parsed, which takes long."""


def test_only_the_walls_catch_everything() -> None:
    for path in OUR_FILES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if EVERYTHING.search(text) else ():
            if (
                isinstance(node, ast.ExceptHandler)
                and named(path) not in WALLS
                and not named(path).startswith("chaos/")
            ):
                names = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
                for name in names:
                    assert name is not None and ast.unparse(name) not in ("Exception", "BaseException"), (
                        f"{named(path)}:{node.lineno} catches everything; name what you can handle"
                    )


def test_no_package_marker_under_tests_shadows_a_real_package() -> None:
    assert [named(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_every_test_can_fail() -> None:
    idle = [
        f"{named(path)}:{test.lineno} {test.name} asserts nothing"
        for path in TEST_FILES
        for test in opened(path, ROOT).tests()
        if not can_fail(test, opened(path, ROOT))
    ]
    assert idle == []


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0].rpartition(".")[2] == "Protocol" for base in node.bases)


def may_raise(method: ast.FunctionDef, of: dict[str, ast.FunctionDef], seen: set[str]) -> bool:
    """Whether a method asserts something that could be false, asks the `check` of something else, or calls a method of
    its own class that does."""
    seen.add(method.name)
    for node in ast.walk(method):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            own = isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
            name = node.func.attr
            if (name == "check" and not own) or (
                own and name in of and name not in seen and may_raise(of[name], of, seen)
            ):
                return True
    return False


def idle_checks(tree: ast.Module) -> list[int]:
    """Lines of `check(self)` methods that can never fail. A Protocol's is only a shape."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not is_protocol(node):
            methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
            check = methods.get("check")
            if check is not None and len(check.args.args) == 1 and not may_raise(check, methods, set()):
                found.append(check.lineno)
    return found


def test_what_tests_rely_on_as_a_check_is_one() -> None:
    """Tests count `machine.check()` as an assertion: each `check` of a machine must assert, or ask one that does."""
    texts = {named(path): path.read_text() for path in OUR_FILES}
    idle = {name: idle_checks(ast.parse(text)) for name, text in texts.items() if "def check(" in text}
    assert {name: lines for name, lines in idle.items() if lines} == {}


CHECKS = '''
class Shape(Protocol[T]):
    def check(self): ...
class Documented:
    def check(self):
        """Says that it will assert something, one day, by part.check()."""
class Dots:
    def check(self): ...
class Passes:
    def check(self): pass
class Constant:
    def check(self): assert True, "always"
class Itself:
    def check(self): self.check()
class Helped:
    def check(self): self._sums()
    def _sums(self): return sum(self.held)
class Asserts:
    def check(self): assert self.held <= self.capacity
class Asks:
    def check(self):
        for part in self.parts: part.check()
class AsksItself:
    def check(self): self._sums()
    def _sums(self): assert sum(self.held) <= self.capacity
'''


def test_a_check_that_checks_nothing_is_found_whatever_it_says() -> None:
    lines = CHECKS.splitlines()
    names = [lines[number - 2] for number in idle_checks(ast.parse(CHECKS))]
    assert names == [f"class {name}:" for name in ("Documented", "Dots", "Passes", "Constant", "Itself", "Helped")]


IDLE = """
import pytest
from tests.agent.here import ranks

class Fake:
    def read(self):
        raise OSError("a fake that fails is no assertion")

def check_nothing():
    return 1

def expect(value):
    assert value

def test_idle(): Fake().read()
def test_named_like_a_check(): check_nothing()
def test_only_builds(): ranks("j1")
def test_direct(): assert True
def test_by_a_helper(): expect(1)
def test_raises():
    with pytest.raises(OSError): Fake().read()
"""


def test_a_test_that_asserts_nothing_is_found_whatever_its_helpers_are_called(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(IDLE)
    file = File(path, ROOT)
    assert {test.name: can_fail(test, file) for test in file.tests()} == {
        "test_idle": False,
        "test_named_like_a_check": False,
        "test_only_builds": False,
        "test_direct": True,
        "test_by_a_helper": True,
        "test_raises": True,
    }


SLEEPY_LEFT = {
    "tests/agent/ports/devices/test_cpu.py": 1,  # a lease of real time that is said again
    "tests/covey/hooks/test_gate.py": 4,  # shares of a processor over real time
    "tests/covey/hooks/test_gpu.py": 1,
    "tests/covey/hooks/test_jax_share.py": 2,
    "tests/guest/one_sided_faults.py": 1,  # in a virtual machine, whose processes nobody here can watch
    "tests/guest/systemd_swap.py": 1,
}
"""Places that sleep in real time and then assert, by file. A number may only go down: `tests.quiet` has what to do
instead."""


def test_no_test_sleeps_and_then_asserts() -> None:
    found = {named(path): lines for path in TEST_FILES if (lines := sleeps(path, ROOT))}
    more = {name: lines for name, lines in found.items() if len(lines) > SLEEPY_LEFT.get(name, 0)}
    assert more == {}, "wait for a sign that it ran (tests/quiet.py, or a counter), and then assert"
    fewer = {name: len(found.get(name, ())) for name, n in SLEEPY_LEFT.items() if len(found.get(name, ())) < n}
    assert fewer == {}, "the number in SLEEPY_LEFT goes down with it"


SLEEPY = """
import asyncio, time
from threading import Event, Thread

async def sleeps(job):
    await asyncio.sleep(0.1)
    assert not job.done()

def sleeps_as_long_as_it_is_told(job, seconds):
    if seconds:
        time.sleep(2 * seconds)
        assert job.state == "queued"

def waits_in_vain(done: Event):
    assert done is not None and not done.wait(0.3), "nothing came"

def joins_in_vain(thread: Thread):
    thread.join(0.1)
    assert thread.is_alive()

async def gives_way_once(job):
    await asyncio.sleep(0)
    assert job.done()

def waits_for_a_sign(done: Event, thread: Thread):
    assert done.wait(10.0)
    thread.join(10.0)
    assert not thread.is_alive()

async def looks_again(job):
    while not job.done():
        await asyncio.sleep(0.01)
    assert job.result()
"""


def test_a_sleep_before_an_assertion_is_found_and_virtual_time_is_not_meant(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(SLEEPY)
    found = [SLEEPY.splitlines()[number - 1].strip() for number in sleeps(path, ROOT)]
    assert [line.partition(",")[0] for line in found] == [
        "await asyncio.sleep(0.1)",
        "time.sleep(2 * seconds)",
        "assert done is not None and not done.wait(0.3)",
        "thread.join(0.1)",
    ]
    for virtual in ("from tests.virtual_time import play", "from tests.plugins.scheduler.rack import on_a_rack"):
        path.write_text(f"{virtual}\n{SLEEPY}")
        assert sleeps(path, ROOT) == []
    path.write_text(f"from tests.agent.here import until\n{SLEEPY}")
    assert len(sleeps(path, ROOT)) == 4


def test_policies_say_what_they_answer() -> None:
    for plugin in PURE_PLUGINS:
        for path in [plugin / "policy.py", *files(plugin / "policy")]:
            if not path.exists():
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                    assert ast.get_docstring(node), f"{named(path)}:{node.lineno} {node.name} has no docstring"


def test_every_module_says_what_it_is() -> None:
    assert [
        named(path)
        for path in OUR_FILES
        if (text := path.read_text()).strip() and not text.startswith('"""') and not ast.get_docstring(ast.parse(text))
    ] == []


MAY_BEGIN_SO = re.compile(r"""[\"']\s*(Of|As|Or|Likewise|The same)\b""")
BEGINS_WITHOUT_NOUN = re.compile(r"\s*(Of|As|Or|Likewise|The same)\b")


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Docstrings of modules, classes and functions, and the strings under fields and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.value


def without_noun(path: Path) -> list[int]:
    """Lines of docstrings that continue a sentence from elsewhere, so that they cannot be read alone."""
    source = path.read_text()
    found = docstrings(ast.parse(source)) if MAY_BEGIN_SO.search(source) else ()
    return sorted(text.lineno for text in found if BEGINS_WITHOUT_NOUN.match(str(text.value)))


def test_no_docstring_begins_without_its_noun() -> None:
    paths = [path for path in tracked() if path.suffix == ".py"]
    found = [f"{named(path)}:{line}" for path in paths for line in without_noun(path)]
    assert found == [], "say what it is, with its noun and unit: a docstring can be read alone"


NOUNLESS = '''
"""As `x`, but faster."""
ROUNDS = 3
"""Of a job."""
AS_LONG = 4
"""Assigned seconds."""
class Told:
    """Or nothing."""
    size: int
    """The same in bytes."""
    name: str
    """The samest name."""
    def heard(self):
        """Likewise of another host."""
        return ("Of course", """Of no docstring""")
'''


def test_a_docstring_that_has_lost_its_noun_is_found_and_longer_words_are_not_meant(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(NOUNLESS)
    found = [NOUNLESS.splitlines()[number - 1].strip(' "').split()[0] for number in without_noun(path)]
    assert found == ["As", "Of", "Or", "The", "Likewise"]


def test_the_project_names_no_place_it_was_made_in() -> None:
    places = re.compile(
        "|".join([r"/wo" + r"rk/", r"\.\./sha" + r"red", r"py" + r"pi\.org", r"npm" + r"js\.", r"/ro" + r"ot/"])
    )
    texts = {".py", ".md", ".toml", ".cfg", ".service", ".conf", ".txt", ".html", ".js", ".css", ""}
    found = [
        named(p)
        for p in tracked()
        if p.suffix in texts and p.stat().st_size < 1e6 and places.search(p.read_text(errors="replace"))
    ]
    assert found == []


def test_the_contracts_of_imports_name_every_plugin() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    plugins = {f"plugins.{plugin.name}" for plugin in PLUGINS}
    inside = next(set(contract["containers"]) for contract in contracts if contract["name"].startswith("2."))
    apart = next(set(contract["modules"]) for contract in contracts if contract["name"].startswith("3."))
    assert plugins <= inside and plugins == apart


def test_the_map_shows_every_plugin_and_package() -> None:
    text = (ROOT / "docs/MAP.md").read_text()
    missing = [
        f"{name}/" for name in (*PACKAGES, "systemd", "tests", "tools", "bench", "examples") if f"{name}/" not in text
    ]
    missing += [f"plugins/{plugin.name}" for plugin in PLUGINS if f"plugins/{plugin.name}" not in text]
    assert missing == []


PAPERS = sorted(page for page in (ROOT / "docs/design/papers").glob("*.md") if page.stem != "index")
PATH = re.compile(r"`([\w./-]+/[\w.-]*\w\.py)(?:::([\w.]+))?`")
"""Pattern of `path.py` or `path.py::name` or `path.py::Class.method`; a bare `name.py` is prose."""


def led_to(path: str, page: Path) -> Path:
    """File that a path on a page means: from the root, or from the plugin that the page is about."""
    return next((at for at in (ROOT / path, ROOT / "plugins" / page.stem / path) if at.is_file()), ROOT / path)


def defined(path: Path) -> dict[str, str]:
    """What a file defines, with its docstring: functions, classes, methods as `Class.method`, constants."""
    found: dict[str, str] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found[prefix + node.name] = ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update({prefix + target.id: "" for target in targets if isinstance(target, ast.Name)})

    walk(ast.parse(path.read_text()).body, "")
    return found


def wrong_names(text: str, page: Path = PAPERS[0]) -> list[str]:
    """Paths that lead nowhere, and names that the very file does not define."""
    wrong = []
    for path, name in sorted(set(PATH.findall(text))):
        at = led_to(path, page)
        if not at.is_file():
            wrong.append(f"{path} does not exist")
        elif name and name not in defined(at):
            wrong.append(f"{path} defines no {name}")
    return wrong


def claims_without_reference(text: str) -> list[str]:
    """Rows of a table that begin with a section of a paper, and whose test does not name one."""
    wrong = []
    for row in text.splitlines():
        section = row.split("|")[1].strip() if row.startswith("|") and row.count("|") >= 4 else "none"
        if section.startswith("none") or section in ("section", "source") or set(section) == {"-"}:
            continue
        for path, name in PATH.findall(row):
            if path.startswith("tests/") and name and "Reference:" not in defined(ROOT / path).get(name, "Reference:"):
                wrong.append(f"[{section}] {path}::{name} names no section")
    return wrong


@pytest.mark.parametrize("page", PAPERS, ids=named)
def test_pages_of_papers_name_functions_and_tests_that_exist(page: Path) -> None:
    text = page.read_text()
    assert len(PATH.findall(text)) >= 10, "the page maps sections to functions and tests"
    assert wrong_names(text, page) == []


@pytest.mark.parametrize("page", PAPERS, ids=named)
def test_each_claim_of_a_paper_is_a_test_that_names_its_section(page: Path) -> None:
    assert claims_without_reference(page.read_text()) == []


@pytest.mark.parametrize("name", ["design/ARCHITECTURE", "MAP", "start/plugin"])
def test_pages_for_newcomers_name_files_and_functions_that_exist(name: str) -> None:
    page = ROOT / f"docs/{name}.md"
    assert len(set(PATH.findall(page.read_text()))) >= 8, "each step names its file and function"
    assert wrong_names(page.read_text(), page) == []


REFERENCE = re.compile(r"((?:[\w.-]+/)+[\w-]+\.(?:py|md))|`([\w-]+\.(?:py|md))`|\(([\w-]+\.md)")
"""Pattern of a path in code or in a comment, a bare file in backquotes, a page in brackets."""
OF_USERS = {"./train.py", "agent.py"}
"""Files that a user may have."""


def references_that_lead_nowhere(path: Path) -> list[str]:
    """References that lead nowhere from the root, from `docs` or `examples`, or from a folder above the file that names
    them."""
    found = {next(filter(None, groups)) for groups in REFERENCE.findall(path.read_text())}
    above = [folder for folder in path.parents if folder.is_relative_to(ROOT)]
    known = (ROOT, ROOT / "docs", ROOT / "examples", *above)
    return sorted(ref for ref in found - OF_USERS if not any((at / ref).exists() for at in known))


def test_references_in_the_code_lead_to_files_of_this_repository() -> None:
    wrong = {named(path): references_that_lead_nowhere(path) for path in (*OUR_FILES, *files(ROOT / "bench"))}
    assert {name: refs for name, refs in wrong.items() if refs} == {}


def test_a_reference_to_a_file_that_was_renamed_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text('"""See `words.py`, agent/raft/disk.py, (leader.md 4), `covey/core/events.py` and docs/MAP.md."""')
    assert references_that_lead_nowhere(path) == ["agent/raft/disk.py", "leader.md", "words.py"]


def test_every_page_of_a_paper_is_a_plugins() -> None:
    assert {page.stem for page in PAPERS} == {plugin.name for plugin in PLUGINS}


def test_a_name_that_is_only_mentioned_or_lives_in_another_file_is_found_out() -> None:
    here = "tests/test_tidy.py"
    assert wrong_names(f"| 1 | `{here}::wrong_names` | `{here}::File` |") == [f"{here} defines no File"]
    assert wrong_names("`tests/test_nobody.py::test_x`") == ["tests/test_nobody.py does not exist"]
    assert claims_without_reference(f"| 2.1 | it | `x/y.py` | `{here}::test_every_test_can_fail` |") != []
    assert claims_without_reference(f"| none | it | `x/y.py` | `{here}::test_every_test_can_fail` |") == []


def places(page: Path) -> list[str]:
    """What looks like a path on a page: in code that begins with a folder of the repository, or, on a page that lists
    its own folder, names a file; and what the drawing of the tree names at the beginning of a line."""
    text = page.read_text()
    tops = "|".join([*PACKAGES, "systemd", "tests", "tools", "bench", "examples", "docs"])
    found = re.findall(rf"`((?:{tops})/[\w./-]*)(?:::\w+)?`", text)
    if page.name == "README.md":
        found += re.findall(r"`([\w-]+\.(?:py|md|toml))`", text)
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        found += re.findall(rf"^ *((?:{tops})/[\w./-]*)", block, re.MULTILINE)
    return sorted(set(found))


def lost_names(text: str) -> list[str]:
    """File names in rows of the map that are not beside the last full path before them."""
    lost = []
    for line in text.splitlines():
        folder = ROOT
        for name in re.findall(r"`([\w./-]+(?:\.(?:py|cpp|js|toml|txt)|/))`", line) if line.startswith("|") else ():
            if "/" in name:
                folder = ROOT / name if name.endswith("/") else (ROOT / name).parent
            elif not (folder / name).exists() and not (ROOT / name).exists() and name != "metrics.py":
                lost.append(f"{name}: {line[:60]}")
    return lost


def test_bare_names_of_the_map_lie_beside_the_last_full_path() -> None:
    assert lost_names((ROOT / "docs/MAP.md").read_text()) == []
    assert lost_names("| x | `chaos/world/net.py`, `faults.py` |") == [
        "faults.py: | x | `chaos/world/net.py`, `faults.py` |"
    ]


@pytest.mark.parametrize("page", [ROOT / "docs/MAP.md", ROOT / "bench/README.md"], ids=named)
def test_paths_of_the_map_and_of_the_list_of_experiments_exist(page: Path) -> None:
    found = places(page)
    assert len(found) >= 5
    assert [p for p in found if not (ROOT / p).exists() and not (page.parent / p).exists()] == []
