"""Lists in every form, on terminals of every width, and as they change (`-w`)."""

import csv
import io
import json
import re
import socket
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import pyte
import pytest

from cli import watched
from cli.client import Agent, AgentctlError, _events
from cli.context import Context
from cli.hosts import gossip, gpus, hosts, keys, voters
from cli.jobs import interference, jobs, quota, tensors
from cli.lists import FORMS
from cli.main import main
from cli.memory import slabs
from cli.table import Paint
from cli.tenant import list as tenants
from cli.volume import ls
from tests.cli.conftest import FakeAgent, job_view
from tests.cli.rack_answers import HOSTS, Run
from tests.cli.rack_answers import answers as answers
from tests.cli.rack_answers import run as run
from tests.cli.test_books import ROWS, told
from tests.cli.test_groups import KNOWN, UNKNOWN

LISTS = (
    *("hosts", "gpus", "jobs", "slabs", "volume ls", "tensors", "quota", "tenant list", "voters", "gossip", "keys"),
    *("groups", "memory", "why j1"),
)
WIDTHS = (20, 40, 60, 80, 200)
WHY = "9th of the waiting jobs, in queue 0; 6 GPUs are free; the tenant uses its quota of sixteen"


@pytest.fixture
def rack(agent: FakeAgent) -> FakeAgent:
    agent.replies |= {
        "GET /v1/jobs": [job_view(), job_view(id="j2", state="queued", reason=WHY, name="resnet-50-imagenet")],
        "GET /v1/tenants": [{"tenant": "ml", "gpus": None, "used": 3, "users": ["ann", "bob"]}],
        "GET /v1/gossip": [
            {"host": "gpu1", "up_s": 9.0, "health": 0, "alone": False, "sent": 9, "sent_bytes": 9, "received": 9,
             "received_bytes": 9, "probes": 9, "probes_failed": 0, "refutations": 0, "stalls": 0, "stalled_s": 0.0,
             "full": 0, "dropped": {}, "suspects": []}
        ],
        "GET /v1/groups": [KNOWN, UNKNOWN],
        "GET /v1/keys": [{"host": "gpu1", "ids": ["aa"]}],
        "GET /v1/voters": {"voters": ["gpu1"], "learner": "", "leaving": "", "under_way": "", "rows": [
            {"host": "gpu1", "part": "votes", "leads": True, "entry": 7, "names": ["gpu1"], "notes": [], "age_s": 0.0}
        ]},
    }  # fmt: skip
    return agent


@pytest.mark.parametrize("words", LISTS)
def test_every_list_has_every_form(words: str, run: Run, rack: FakeAgent) -> None:
    said = {form: run(*words.split(), "-o", form) for form in FORMS}
    assert {form: code for form, (code, _, _) in said.items()} == dict.fromkeys(FORMS, 0)
    names = said["name"][1].splitlines()
    rows = [json.loads(line) for line in said["jsonl"][1].splitlines()]
    table = list(csv.DictReader(io.StringIO(said["csv"][1])))
    assert len(names) == len(rows) == len(table) > 0 and all(names)
    assert json.loads(said["json"][1])["schema"] == 1
    assert said["table"][1] == said["wide"][1], "no terminal, so nothing is left out"
    first = next(iter(table[0]))
    assert run(*words.split(), "-o", "csv", "--columns", first)[1].splitlines()[0] == first
    code, found, _ = run(*words.split(), "-o", "csv", "--filter", f"{first}={table[0][first]}")
    assert code == 0 and next(iter(csv.DictReader(io.StringIO(found)))) == table[0]
    assert run(*words.split(), "--filter", f"{first}=no such")[0] == 0


def test_rows_are_sorted_and_filtered_by_columns_and_by_fields_of_the_json(run: Run, rack: FakeAgent) -> None:
    assert run("hosts", "-o", "name", "--sort=-age_s")[1].split() == ["gpu2", "gpu1"]
    assert run("hosts", "-o", "name", "--sort", "state")[1].split() == ["gpu1", "gpu2"]
    assert run("hosts", "-o", "name", "--filter", "state=susp*,gone")[1].split() == ["gpu2"]
    assert run("hosts", "-o", "name", "--filter", "leads=true", "--filter", "state=suspect")[1] == ""
    assert run("hosts", "-o", "name", "--filter", "gpus_total=")[1].split() == ["gpu2"], "not known is no number"
    (only,) = json.loads(run("hosts", "--json", "--filter", "host=gpu1")[1])["data"]
    assert only["host"] == "gpu1"
    for wrong in (("--filter", "stat=alive"), ("--sort", "stat"), ("--columns", "stat")):
        code, _, error = run("hosts", *wrong)
        assert code == 2 and "did you mean state?" in error, wrong
    code, _, error = run("hosts", "--filter", "state")
    assert code == 2 and "FIELD=VALUE" in error


def test_json_keeps_its_shape_whichever_rows_are_asked_for(run: Run, rack: FakeAgent) -> None:
    """Rows that lie inside of others: jobs in groups, measurements in volumes, ended jobs beside what they lack."""
    (group,) = json.loads(run("groups", "-o", "json", "--filter", "job=j1*")[1])["data"]
    assert [job["job"] for job in group["jobs"]] == ["j1"] and group["hosts"] == KNOWN["hosts"]
    whole = json.loads(run("memory", "--json")[1])
    assert json.loads(run("memory", "--json", "--filter", "op=read")[1]) == whole and whole["accounts"]
    assert json.loads(run("memory", "--json", "--filter", "op=none")[1])["data"] == []
    rack.replies["GET /v1/history"] = told(*ROWS)
    data = json.loads(run("history", "--json", "--filter", "id=j2")[1])["data"]
    assert [job["id"] for job in data["jobs"]] == ["j2"] and data.keys() == told(*ROWS).keys()


def test_history_has_every_form_and_two_that_are_traces(run: Run, rack: FakeAgent) -> None:
    rack.replies["GET /v1/history"] = told(*ROWS)
    names = [job.id for job in ROWS]
    assert run("history", "-o", "name", "--sort", "id")[1].split() == sorted(names)
    assert [json.loads(line)["id"] for line in run("history", "-o", "jsonl")[1].splitlines()] == names
    assert run("history", "-o", "csv", "--columns", "id")[1].split() == ["id", *names]
    trace = run("history", "-o", "csv", "--filter", f"id={names[0]}")[1]
    assert [row["job_id"] for row in csv.DictReader(io.StringIO(trace))] == [names[0]]
    assert run("history", "--format", "sacct")[1] == run("history", "-o", "sacct")[1] != ""
    code, _, error = run("history", "-o", "sacct", "--columns", "id")
    assert code == 2 and "--columns" in error


# ---- narrow terminals ------------------------------------------------------------------------------------------------


def on_terminal(text: str, width: int) -> list[str]:
    """The lines that a terminal of this width shows of a text."""
    screen = pyte.Screen(width, 400)
    pyte.Stream(screen).feed(text.replace("\n", "\r\n"))
    return [line.rstrip() for line in screen.display if line.strip()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", LISTS)
def test_a_narrow_terminal_loses_columns_and_no_word_is_cut(
    words: str, width: int, run: Run, rack: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(*words.split(), "-o", "wide")[1]
    init = Paint.__init__

    def narrow(self: Paint, when: str = "auto", out: Any = None) -> None:
        init(self, when, out)
        self.width = width

    monkeypatch.setattr(Paint, "__init__", narrow)
    said = run(*words.split())[1]
    assert max(map(len, said.splitlines())) <= width
    assert on_terminal(said, width) == [line.rstrip() for line in said.splitlines() if line.strip()]
    known = set(re.findall(r"\S+", whole))
    assert [word for word in re.findall(r"\S+", said) if word not in known] == [], "a word that was cut"
    titles = said.splitlines()[0]
    assert titles.split()[0] == whole.split()[0], "what a row is called is always there"
    if width == 200:
        assert titles == whole.splitlines()[0]


# ---- as they change --------------------------------------------------------------------------------------------------


def of_list(rows: list[dict[str, Any]], key: str) -> tuple[str, dict[str, Any]]:
    return "snapshot", {"as_of_wall_s": 9.0, "rows": {row[key]: row for row in rows}, "unanswered": []}


def change(set: Mapping[str, Any], gone: tuple[str, ...] = ()) -> tuple[str, dict[str, Any]]:
    return "change", {"as_of_wall_s": 9.0, "set": set, "gone": gone, "unanswered": []}


def watching(monkeypatch: pytest.MonkeyPatch, *told: Any) -> None:
    def events(_agent: Agent, _table: str) -> Iterator[Any]:
        yield from told
        raise KeyboardInterrupt

    monkeypatch.setattr(watched, "events", events)


def test_without_a_terminal_each_change_is_a_line_and_ctrl_c_ends_it(
    run: Run, rack: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = of_list([job_view(), job_view(id="j2", over=True, state="done")], "id")
    watching(monkeypatch, told, None, change({"j1": {"step": 77}}), change({"j1": {"state": "done", "over": True}}))
    code, out, _ = run("jobs", "-w", "--everyone")
    lines = [line.split("  ") for line in out.splitlines()]
    assert code == 130 and [(line[1], line[5]) for line in lines] == [
        ("j1", "running"),
        ("j1", "running"),
        ("j1", "done"),
    ]
    for words in (("--sort", "time"), ("--limit", "3")):
        code, _, err = run("jobs", "-w", *words)
        assert code == 2 and "jobs -w takes no --sort and no --limit" in err
    asked = [target for target, _ in rack.asked]
    assert [each for each in asked if each.startswith("GET /v1/jobs?")] == ["GET /v1/jobs?limit=1"], (
        "filters are checked"
    )
    watching(monkeypatch, of_list(HOSTS, "host"), change({"gpu2": {"state": "gone"}}), change({}, ("gpu1",)))
    code, out, _ = run("hosts", "-w", "-o", "jsonl", "--filter", "state=gone,suspect")
    said = [json.loads(line) for line in out.splitlines()]
    assert [(each["key"], each["row"]["state"]) for each in said] == [("gpu2", "suspect"), ("gpu2", "gone")]


def test_on_a_terminal_the_list_is_drawn_anew_within_its_lines(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "DRAW_S", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "6")
    paint = Paint("never")
    paint.width = 40
    args = Namespace(json=False, columns=None, output="table", filter=[], sort=None, noun="hosts")
    many = [{**HOSTS[0], "host": f"gpu{n}"} for n in range(9)]
    watching(monkeypatch, of_list(many, "host"), change({"gpu0": {"state": "gone"}}), None)
    with pytest.raises(KeyboardInterrupt):
        watched.watch(Context(args, Agent([]), paint), "hosts", hosts.listing)
    screen = pyte.Screen(40, 6)
    pyte.Stream(screen).feed(capsys.readouterr().out.replace("\n", "\r\n"))
    assert "gpu0  gone" in screen.display[1] and "more lines" in "".join(screen.display)
    assert screen.display[0].startswith("HOST"), "nothing scrolled away"


def test_a_stream_is_read_whatever_parts_it_comes_in_and_a_refusal_is_told() -> None:
    event = b'event: change\nid: 3.1\ndata: {"a": 1}\n\n'
    for answer, expected in (
        (b"HTTP/1.0 200 OK\r\nA: b\r\n\r\n: Covey\n\n" + event + event, [("change", {"a": 1}, "3.1")] * 2),
        (b"HTTP/1.0 403 Forbidden\r\n\r\n" + b'{"code": 4, "what": "no", "why": "w", "next": "n"}', 4),
        (b"SSH-2.0\r\n", 1),
        (b"", 1),
    ):
        ours, theirs = socket.socketpair()
        with ours, theirs:

            def send(to: socket.socket = theirs, data: bytes = answer) -> None:
                for at in range(0, len(data), 5):
                    to.sendall(data[at : at + 5])
                to.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            sender.start()
            try:
                found: Any = [each for each in _events(ours, "/v1/events", "unix:x") if each is not None]
            except AgentctlError as error:
                found = error.code
            sender.join()
            assert found == expected


def test_each_watched_list_says_what_its_rows_need() -> None:
    """Rows of a stream are the rows of the list: what a list shows of them is there."""
    modules = (gossip, gpus, hosts, keys, voters, interference, jobs, quota, tensors, slabs, tenants, ls)
    for module in modules:
        listing = getattr(module, "LISTING", None)
        if listing is not None:
            assert set(listing.right) | set(listing.least) <= set(listing.titles), module.__name__
    assert main(["hosts", "-w", "--columns", "no"]) == 2
