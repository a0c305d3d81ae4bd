"""A session beside a rank, as whoever typed the command sees it: output is written here, input and signals are sent.

Two threads, since an agent answers one question at a time: this one asks for output, the other one sends what is typed.
Every question can be asked again (`agent.jobs.beside`), so an agent that restarts, or a network that was away for less
than `PATIENCE_S`, costs a pause."""

import base64
import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Mapping
from typing import Any

from cli.client import FAILED, NO_AGENT, NOT_FOUND, TOO_LATE, TRY_AGAIN, Agent, AgentctlError

WAIT_S = {"exec": 8.0, "shell": 2.0}
"""How long one question waits for output, seconds; a shell's are short, so that a lost terminal is seen soon."""
HERE_S = 8.0
"""Seconds between two words to the session that somebody is still here, where nothing is typed: output that this
terminal does not take may hold up the questions for more."""
PATIENCE_S = 30.0
"""Seconds for which an agent that does not answer is asked again."""
ANSWER_S = 20.0
READ_BYTES = 32 << 10
AGAIN = (NO_AGENT, TOO_LATE, TRY_AGAIN)
INTERRUPTED = 130


class AttachedSession:
    """One session. `opened`: the agent's answer to its begin."""

    def __init__(self, agent: Agent, kind: str, opened: Mapping[str, Any], terminal: bool) -> None:
        self._agent, self._wait_s, self._terminal = agent, WAIT_S[kind], terminal
        self._job = str(opened["job"])
        self._about = {name: opened[name] for name in ("host", "epoch", "session")}
        self._seen, self._at = int(opened.get("at", 0)), int(opened.get("taken", 0))
        self._wake_out, self._wake_in = os.pipe()
        self._signals = 0
        self._sized = terminal
        self._over = False
        self._why: AgentctlError | None = None

    def run(self) -> int:
        """The command's exit code. AgentctlError when its session cannot be reached any more."""
        with self._signals_told(), raw(self._terminal):
            return self.converse()

    def converse(self) -> int:
        """`run`, without a terminal and signals: any thread may do that."""
        threading.Thread(target=self._send_all, daemon=True).start()
        try:
            return self._write_all()
        finally:
            self._over = True
            self._wake()

    # ---- output ----

    def _write_all(self) -> int:
        while True:
            answer = self._turn({"seen": self._seen, "wait_s": self._wait_s})
            for where, text in answer["parts"]:
                data = base64.b64decode(text)
                _write(1 if where == 1 else 2, data)
            self._seen = answer["at"] + sum(len(base64.b64decode(text)) for _, text in answer["parts"])
            if answer["code"] is not None:
                return int(answer["code"])
            if self._why is not None:
                raise self._why

    # ---- input ----

    def _send_all(self) -> None:
        """Send what is typed, sizes of the terminal and signals, until the session is over."""
        is_open, said = True, 0
        try:
            while not self._over:
                ready, _, _ = select.select([self._wake_out, *([0] if is_open else [])], [], [], HERE_S)
                if self._wake_out in ready:
                    os.read(self._wake_out, 4096)
                if self._over:
                    return
                fields: dict[str, Any] = {"signals": self._signals}
                if self._sized:
                    self._sized = False
                    fields |= _size()
                if self._signals > said + 1:
                    fields["leaves"] = True
                data = b""
                if 0 in ready:
                    data = os.read(0, READ_BYTES)
                    is_open = bool(data)
                    if self._terminal and not is_open:
                        raise OSError("this terminal is gone")
                self._send(fields, data, ended=0 in ready and not data)
                said = max(said, self._signals - 1)
        except AgentctlError as error:
            self._why = error
        except OSError as error:
            self._why = AgentctlError(FAILED, "the input cannot be read", str(error), "agentctl exec JOB -- COMMAND")

    def _send(self, fields: Mapping[str, Any], data: bytes, ended: bool) -> None:
        """Send all of `data`, in as many turns as the command takes to read it."""
        end = self._at + len(data)
        while not self._over:
            part = data[len(data) - (end - self._at) :]
            more = {"at": self._at, "data": base64.b64encode(part).decode(), "ended": ended, "wait_s": 2.0}
            answer = self._turn({**fields, **more})
            self._at = max(self._at, int(answer["taken"]))
            if self._at >= end:
                return

    # ---- turns ----

    def _turn(self, fields: Mapping[str, Any]) -> Any:
        """One question, asked again while no agent answers it."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            agent = Agent(self._agent.addresses, self._agent.found_by, ANSWER_S)
            agent.address = self._agent.address
            try:
                return agent.post("jobs", self._job, "turn", body={**self._about, **fields}).data
            except AgentctlError as error:
                if error.code == NOT_FOUND:
                    error.what = f"{self._job}: {error.what}"
                if error.code not in AGAIN or time.monotonic() > until_s or self._over:
                    raise
                if len(self._agent.addresses) > 1:
                    self._agent.address = None
            time.sleep(0.3)

    # ---- signals ----

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_in, b".")

    @contextlib.contextmanager
    def _signals_told(self) -> Iterator[None]:
        """Let the session hear of Ctrl-C and of sizes of the terminal. A second Ctrl-C ends its command; a terminal in
        raw mode sends it as a byte."""

        def interrupted(_number: int, _frame: object) -> None:
            self._signals += 1
            if self._signals > 2:
                raise KeyboardInterrupt
            self._wake()

        def sized(_number: int, _frame: object) -> None:
            self._sized = True
            self._wake()

        before = [(signal.SIGINT, signal.signal(signal.SIGINT, interrupted))]
        if self._terminal:
            before.append((signal.SIGWINCH, signal.signal(signal.SIGWINCH, sized)))
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)


def _write(descriptor: int, data: bytes) -> None:
    """Write all, to a descriptor that may not block either."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def _size() -> dict[str, int]:
    try:
        found = os.get_terminal_size(0)
    except OSError:
        return {}
    return {"rows": found.lines, "columns": found.columns}


@contextlib.contextmanager
def raw(wanted: bool) -> Iterator[None]:
    """Let this terminal hand on every key as it is; it is as before afterwards."""
    if not wanted or not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def opened(
    agent: Agent, job: str, rank: int, kind: str, argv: list[str], terminal: bool, holds_job: bool = False
) -> dict[str, Any]:
    """Begin a session beside a rank, or find a shell again. AgentctlError says why not."""
    body: dict[str, Any] = {"rank": rank, "kind": kind, "argv": argv, "terminal": terminal, "holds_job": holds_job}
    if terminal:
        term = os.environ.get("TERM", "")
        body |= {"term": term if len(term) <= 64 and term.isascii() else "", **_size()}
    patient = Agent(agent.addresses, agent.found_by, ANSWER_S)
    patient.address = agent.address
    found = dict(patient.post("jobs", job, "sessions", body=body).data)
    agent.address = patient.address
    return found


def job_and_rank(text: str) -> tuple[str, int]:
    """`j3` or `j3.1`. AgentctlError: neither."""
    job, dot, rank = text.partition(".")
    if dot and not (rank.isascii() and rank.isdigit() and len(rank) < 6):
        why = "after the dot comes the number of a rank"
        raise AgentctlError(2, f"invalid {text[:80]!r}", why, f"agentctl job {job[:80] or 'j1'}    (lists its ranks)")
    return job, int(rank or 0)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
