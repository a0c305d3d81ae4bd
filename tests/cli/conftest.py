"""A fake agent: answers agentctl over a real unix socket with what a test put into it."""

import json
import os
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from plugins.scheduler.machine.log.jobs import OVER

Reply = tuple[int, Any]


class FakeAgent:
    """An agent whose `replies["GET /v1/hosts"]` is the data of an answer, an ErrorView with its status, parts of a
    stream, or a function of the request body that gives one of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replies: dict[str, Any] = {"GET /livez": {}}
        self.asked: list[tuple[str, Any]] = []
        self.unanswered: list[dict[str, Any]] = []
        """Hosts whose part is missing, sent beside every answer."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size)) if size else None
                outer.asked.append((f"{self.command} {self.path}", body))
                status, found = outer.reply(self.command, self.path, body)
                if isinstance(found, Iterator):
                    self.stream(found)
                    return
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def stream(self, parts: Iterator[bytes]) -> None:
                """Send each part as it comes, and hang up after the last."""
                self.send_response(200)
                self.end_headers()
                for part in parts:
                    self.wfile.write(part)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: a test's output is its own."""

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Hang up on agentctl when a reply raises, as a dying agent does."""

        self._server = Server(str(path), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def reply(self, method: str, target: str, body: Any) -> Reply:
        found = self.replies.get(f"{method} {target}", self.replies.get(f"{method} {target.partition('?')[0]}"))
        if callable(found):
            found = found(body)
        if isinstance(found, Iterator):
            return 200, found
        if found is None:
            return 404, {"code": 3, "what": f"no {target}", "why": "not in this test", "next": "nothing"}
        if isinstance(found, tuple):
            code, status = found
            return status, {"code": code, "what": "no", "why": "because", "next": "do this"}
        more = {"unanswered": self.unanswered} if self.unanswered else {}
        return 200, {"schema": 1, "as_of_wall_s": 1000.0, "host": "gpu1", "data": found, **more}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        os.unlink(self.path)


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], FakeAgent]]:
    """A function that makes fake agents; agentctl finds the first one by COVEY_AGENT. The test runs in an empty
    directory."""
    made: list[FakeAgent] = []

    def make() -> FakeAgent:
        made.append(FakeAgent(tmp_path / f"a{len(made)}.sock"))
        monkeypatch.setenv("COVEY_AGENT", ",".join(agent.address for agent in made))
        return made[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def agent(agents: Callable[[], FakeAgent]) -> FakeAgent:
    return agents()


GROUPS = ("times", "tally", "losses", "seen")
"""Groups of a job's fields, of which a test changes a part."""


def job_view(**changes: Any) -> dict[str, Any]:
    """The JSON of a running job of two workers."""
    view: dict[str, Any] = {
        "id": "j1",
        "name": "digits",
        "tenant": "default",
        "job_class": "guaranteed",
        "state": "running",
        "reason": "all ranks started",
        "workers": 2,
        "gpus": 2,
        "argv": ["python", "digits.py"],
        "cwd": "/home/ann",
        "times": {"submitted_wall_s": 900.0, "started_wall_s": 940.0, "ended_wall_s": None, "for_s": 60.0},
        "tally": {
            "attempt": 1,
            "preemptions": 0,
            "hosts_lost": 0,
            "requeues": 0,
            "failures": 0,
            "retries": {},
            "unfit": 0,
        },
        "losses": {"on_lost": "heal", "heals_not": "", "away": {}, "spares": 0, "hang_s": None, "hang_unseen": ""},
        "seen": {
            "timing": {
                "step_s": 0.25,
                "input_s": 0.1,
                "communicate_s": 0.001,
                "memory_bytes": 1 << 30,
                "boundary": "optimizer",
            },
            "hooked": {"0": "torch 2.13.0", "1": "covey-job is not installed"},
            "aggregator": "gpu3",
            "unlike": "",
        },
        "queue": 0,
        "attained_gpu_s": 12.0,
        "epoch": 5,
        "coordinator": "gpu2",
        "exit_code": None,
        "places": [{"host": "gpu1", "ranks": [0, 1], "gpus": ["a", "b"]}],
        "ranks": [
            {"rank": 0, "host": "gpu1", "gpus": ["a"], "state": "running", "pid": 77, "code": None},
            {"rank": 1, "host": "gpu1", "gpus": ["b"], "state": "ended", "pid": None, "code": -9},
        ],
        "step": 7,
        "metrics": {"loss": 0.25},
        "age_s": 0.0,
    }
    view |= {name: view[name] | new if name in GROUPS else new for name, new in changes.items()}
    return {"over": view["state"] in OVER, **view}


@pytest.fixture
def job() -> Callable[..., dict[str, Any]]:
    return job_view
