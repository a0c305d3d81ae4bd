"""What the web page says when a list is not whole, or a host that is alive has something wrong: run by Node."""

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
DRIVER = """
const vm = require("vm");
const [script, answers, hash] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const made = () => ({
  children: [], attributes: {}, hidden: true,
  setAttribute(name, value) { this.attributes[name] = value; },
  append(...more) { this.children.push(...more); }, replaceChildren(...more) { this.children = more; },
  createTHead() { return this; }, createTBody() { return this; }, createCell() { return this; },
  insertRow() { const row = made(); this.children.push(row); return row; },
  insertCell() { const cell = made(); this.children.push(cell); return cell; },
});
const parts = {};
const document = {
  hidden: false, createElement: made, createElementNS: made, getElementById: (id) => (parts[id] ??= made()),
};
const asked = [];
const fetch = async (path) => {
  asked.push(path);
  const found = answers[path.split("?")[0]];
  return { ok: !found.what, json: async () => found };
};
const location = { hash }, addEventListener = () => {};
const given = { document, location, addEventListener, fetch, decodeURIComponent, encodeURIComponent };
vm.runInNewContext(script, { ...given, AbortSignal, Object, Math, Date, Promise, setTimeout: () => {
  const own = (part) => [part.textContent ?? "", part.attributes.points ?? ""];
  const texts = (part) => [...own(part), ...part.children.flatMap(texts)].filter(Boolean);
  const shown = Object.fromEntries(Object.entries(parts).map(([id, part]) => [id, texts(part)]));
  console.log(JSON.stringify({ shown, asked }));
} });
"""
HOST = {"host": "gpu1", "state": "alive", "leads": True, "since_s": 9, "age_s": 0, "gpus_free": 1, "gpus_total": 2}


def shown(
    hosts: list[dict[str, Any]], unanswered: list[dict[str, Any]], hash: str = "", curve: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The texts in each element of the page, and the points of lines, after one round of reads."""
    body = {"schema": 1, "host": "gpu1", "as_of_wall_s": 1000}
    answers = {
        "/states.json": {},
        "/v1/hosts": {**body, "data": hosts},
        "/v1/jobs": {**body, "data": []},
        "/v1/jobs/j1/curve": curve or {},
        **{f"/v1/{name}": {**body, "data": [], "unanswered": unanswered} for name in ("gpus", "slabs")},
    }
    script = (files("agent.api") / "page" / "page.js").read_text()
    done = subprocess.run(
        ["node", "-e", DRIVER], input=json.dumps([script, answers, hash]), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert {path for path in found["asked"] if "timeout_s" in path} == {"/v1/gpus?timeout_s=1", "/v1/slabs?timeout_s=1"}
    texts: dict[str, Any] = found["shown"]
    return texts


def test_a_page_of_a_rack_that_is_well_has_no_alarm() -> None:
    page = shown([HOST], [])
    assert page["summary"][0].startswith("gpu1 knows: 1 of 1 hosts alive, gpu1 leads")
    assert not any("incomplete" in text for texts in page.values() for text in texts)


def test_the_page_names_who_did_not_answer_and_what_is_wrong_with_hosts() -> None:
    twin = {"what": "two machines claim this name", "next": "rename one"}
    page = shown([HOST, {**HOST, "host": "gpu9", "leads": False, "troubles": [twin]}], [
        {"host": "gpu3", "why": "no answer within 1 s", "age_s": None},
        {"host": "gpu4", "why": "its agent restarts", "age_s": 12},
    ])  # fmt: skip
    assert page["hosts"][0] == "gpu9: two machines claim this name; next: rename one"
    assert "wrong: two machines claim this name" in page["hosts"]
    assert "2 of 2 hosts alive, 1 wrong, gpu1 leads" in page["summary"][0]
    for name in ("gpus", "slabs"):
        assert page[name][:2] == [
            "incomplete: gpu3 is missing (no answer within 1 s)",
            "incomplete: gpu4 is shown as it was 12 s ago (its agent restarts)",
        ]


def test_the_curves_of_a_job_are_drawn_with_loss_first_and_what_is_missing_is_said() -> None:
    points = [
        {"step": 0, "step_s": None, "metrics": {"accuracy": 0.5, "loss": 4.0}},
        {"step": 5, "step_s": 0.25, "metrics": {"loss": None}},
        {"step": 10, "step_s": 0.25, "metrics": {"loss": 1.0}},
    ]
    page = shown([HOST], [], "#job=j1", {"data": {"id": "j1", "points": points, "unanswered": ["gpu3"]}})
    assert page["job-title"] == ["Job j1"]
    assert page["curves"] == [
        *("loss 1; 1 to 4 in steps 0 to 10", "0.0,4.0 640.0,116.0"),
        *("accuracy 0.5; 0.5 to 0.5 in steps 0 to 0", "320.0,60.0 320.0,60.0"),
        *("step time, s 0.25; 0.25 to 0.25 in steps 5 to 10", "0.0,60.0 640.0,60.0"),
        "gpu3 did not answer, so steps may be missing",
    ]
    refused = shown([HOST], [], "#job=j1", {"what": "no job j1", "why": "none has this id"})
    assert refused["curves"] == ["no job j1: none has this id"]
    empty = shown([HOST], [], "#job=j1", {"data": {"id": "j1", "points": [], "unanswered": []}})
    assert empty["curves"][0].startswith("no step of this job is known")
    assert shown([HOST], [], "#job=%")["curves"] == ["URI malformed"], "and the rest of the page goes on"
