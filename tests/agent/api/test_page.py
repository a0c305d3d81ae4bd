"""The agent's web page without a browser: what it is made of, and what it makes of rows, run by Node."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.api.http import PAGE

SCRIPTS = {path: file.read_text() for path, file, kind in PAGE if kind == "text/javascript"}
OURS = {path: text for path, text in SCRIPTS.items() if not path.startswith("/vendor/")}
HTML = next(file.read_text() for path, file, _ in PAGE if path == "/")
FOLDER = Path(__file__).parents[3] / "agent/api/page"
node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")


def test_the_page_has_no_script_or_style_within_it_and_makes_elements_of_text_only() -> None:
    assert re.findall(r"<script(?![^>]*\bsrc=)", HTML) == re.findall(r"<style|\bstyle=|\bon\w+=", HTML) == []
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://(?!www\.w3)"
    )
    assert {path: found for path, text in OURS.items() if (found := forbidden.findall(text))} == {}


def test_every_file_that_the_page_names_is_served() -> None:
    served = {path for path, _, _ in PAGE}
    named = set(re.findall(r'(?:src|href)="(/[\w/.]+\.\w+)"', HTML))
    for path, text in OURS.items():
        here = path.rpartition("/")[0]
        for found in re.findall(r'(?:from|later\()\s*"(\.[^"]+)"', text):
            named.add(str((Path("/x" + here) / found).resolve())[2:])
        named |= set(re.findall(r'(?:src|href): "(/vendor/[^"]+)"', text))
    assert len(named) > 15
    assert named - served == set()
    assert served - named <= {"/"}, "nothing is served that nobody asks for"


def test_what_others_wrote_is_served_with_their_licence_beside_it() -> None:
    assert "uPlot" in SCRIPTS["/vendor/uPlot.js"][:80]
    assert "The MIT License" in (FOLDER / "vendor/LICENSE-uPlot.txt").read_text()


def run(script: str, given: Any, tmp_path: Path) -> Any:
    """What a script answers that imports the page's modules: `given` in, JSON out."""
    shutil.copytree(FOLDER / "lib", tmp_path / "lib")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    names = (("* as facts", "facts"), ("{ Model }", "model"), ("* as dom", "dom"))
    head = "".join(f'import {what} from "./lib/{name}.js";' for what, name in names)
    (tmp_path / "run.js").write_text(
        f"{head}\nconst given = JSON.parse(process.argv[2]);\nconst answer = () => {{ {script} }};\n"
        "console.log(JSON.stringify(answer()));"
    )
    done = subprocess.run(
        ["node", "run.js", json.dumps(given)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


GPU = {
    "host": "gpu1", "index": 0, "condition": "ok", "why": "", "use": "", "job": None, "beside": [], "utilization": 0.0,
    "memory_used_bytes": 0, "memory_total_bytes": 1, "host_state": "alive",
}  # fmt: skip


@node
def test_each_state_of_a_gpu_is_told_apart_and_what_is_not_known_is_not_free(tmp_path: Path) -> None:
    gpus = [
        GPU,
        {**GPU, "job": "j1", "utilization": 0.9},
        {**GPU, "job": "j1", "utilization": None},
        {**GPU, "job": "j1", "use": "idle for 12 min: no process is there"},
        {**GPU, "job": "j1", "beside": ["j2"], "utilization": 0.9},
        {**GPU, "use": "used by process 4242, which no job of the rack started"},
        {**GPU, "condition": "lost", "job": "j1"},
        {**GPU, "condition": "unknown"},
        {**GPU, "condition": "of a later release"},
        {**GPU, "host_state": "gone", "job": "j1"},
    ]
    found = run("return given.map(facts.gpuState)", gpus, tmp_path)
    assert found == ["free", "busy", "held", "idle", "shared", "foreign", "sick", "unknown", "sick", "gone"]
    letters = run("return Object.values(facts.GPU_STATES).map((each) => each.letter)", 0, tmp_path / "again")
    assert len(set(letters)) == len(letters)


@node
def test_hosts_whose_gpus_nobody_told_have_tiles_that_are_not_known(tmp_path: Path) -> None:
    hosts = [
        {"state": "alive", "gpus_total": 2},
        {"state": "gone", "gpus_total": 1},
        {"state": "alive", "gpus_total": None},
    ]
    found = run("return given.map((host) => facts.hostTiles(host, undefined))", hosts, tmp_path)
    assert found == [["unknown", "unknown"], ["gone"], []]


@node
def test_the_model_takes_changes_by_key_and_counts_time_on_from_what_was_said(tmp_path: Path) -> None:
    job = {"id": "j1", "state": "queued", "over": False, "times": {"for_s": 5.0}, "step": None, "places": []}
    event = {"wall_s": 3.0, "host": "gpu1", "subject": "j1", "event": "granted", "reason": "", "key": ""}
    said = [
        ["snapshot", {"table": "jobs", "as_of_wall_s": 100.0, "rows": {"j1": job, "j2": {**job, "id": "j2"}}}],
        ["change", {"table": "jobs", "as_of_wall_s": 130.0, "set": {"j1": {"step": 7}, "j3": {**job, "id": "j3"}}}],
        [
            "change",
            {"table": "jobs", "as_of_wall_s": 140.0, "set": {}, "gone": ["j2"], "unanswered": [{"host": "gpu9"}]},
        ],
        ["change", {"table": "a later release's", "as_of_wall_s": 140.0, "set": {"x": {}}}],
        ["happened", event],
        ["happened", {**event, "wall_s": 2.0, "event": "submitted"}],
        ["happened", event],
    ]
    script = """const model = new Model(["jobs", "gpus", "slabs"]);
      for (const [kind, data] of given) model.take(kind, data);
      const jobs = [...model.rows("jobs").values()];
      return { ids: jobs.map((job) => job.id), step: jobs[0].step, for_s: jobs.map((job) => facts.jobFor(job, 150)),
               silent: model.tables.jobs.unanswered.length, known: [model.tables.jobs.known, model.tables.gpus.known],
               events: model.events.map((each) => each.event) };"""
    assert run(script, said, tmp_path) == {
        "ids": ["j1", "j3"],
        "step": 7,
        "for_s": [55, 25],
        "silent": 1,
        "known": [True, False],
        "events": ["submitted", "granted"],
    }


@node
def test_what_a_job_waits_for_is_said_as_agentctl_says_it(tmp_path: Path) -> None:
    turn = {"place": 12, "ahead": "j1 (ml, 4 GPUs) and 9 more"}
    jobs = [{"state": "queued", "turn": turn}, {"state": "running", "turn": None}, {"state": "queued"}]
    found = run("return given.map((job) => [facts.place(job), facts.ahead(job)])", jobs, tmp_path)
    assert found == [[12, "j1 (ml, 4 GPUs) and 9 more"], [None, ""], [None, ""]]
    timing = {"step_s": 1.0, "input_s": 0.62, "communicate_s": 0.2, "turns_s": 0.0}
    words = run("return facts.waitWords(given)", {"seen": {"timing": timing}, "metrics": {}}, tmp_path / "again")
    assert words == "62 % of each step waits for data; 20 % of each step waits for other ranks"


@node
def test_the_phases_of_a_job_follow_its_events(tmp_path: Path) -> None:
    said = ["submitted", "granted", "placed", "ranks run here", "stopping", "queued again", "granted", "placed"]
    events = [
        {"wall_s": at, "event": name, "reason": ""} for at, name in enumerate([*said, "hosts lost", "replaced", "done"])
    ]
    found = run("return facts.phases(given).map((each) => [each.state, each.from_s, each.to_s])", events, tmp_path)
    assert found == [
        ["queued", 0, 1], ["placing", 1, 2], ["running", 2, 4], ["stopping", 4, 5], ["queued", 5, 6], ["placing", 6, 7],
        ["running", 7, 8], ["healing", 8, 9], ["running", 9, 10],
    ]  # fmt: skip


@node
def test_numbers_that_are_not_known_are_said_not_to_be(tmp_path: Path) -> None:
    script = """const { seconds, bytes, percent, count, clock } = dom;
      return [seconds(null), bytes(undefined), percent(null), count(null), seconds(0), clock(0)];"""
    assert run(script, 0, tmp_path) == ["not known"] * 4 + ["0 µs", "not known"]


@node
def test_a_filter_takes_words_that_must_be_there_and_that_must_not(tmp_path: Path) -> None:
    script = """const rows = given.map((row) => [row, Object.values(row).join(" ")]);
      return ["queued", "-queued ml", "state:run", "tenant:ml state:queued", "x:1"].map((text) =>
        rows.filter(([row, words]) => facts.matcher(text)(row, words)).map(([row]) => row.id));"""
    rows = [{"id": "j1", "state": "running", "tenant": "ml"}, {"id": "j2", "state": "queued", "tenant": "ml"}]
    assert run(script, rows, tmp_path) == [["j2"], ["j1"], ["j1"], ["j2"], []]
