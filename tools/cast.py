"""Record a command on a terminal as asciinema's text (version 2): `python -m tools.cast docs/start/run.cast make run`.

The file has a header and a line for each piece of output, `[seconds, "o", text]`, with the times at which it came, so
that a player shows what somebody saw who typed the command. Nothing is made shorter or faster.
"""

import argparse
import codecs
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

WIDTH, HEIGHT = 100, 30
READ_BYTES = 1 << 16
PROMPT = "$ "


def header(command: Sequence[str], wall_s: float) -> str:
    """The first line of the file."""
    words = " ".join(command)
    return json.dumps({"version": 2, "width": WIDTH, "height": HEIGHT, "timestamp": int(wall_s), "title": words})


def event(after_s: float, text: str) -> str:
    """A piece of output, so many seconds after the beginning."""
    return json.dumps([round(after_s, 3), "o", text], ensure_ascii=False)


def recorded(command: Sequence[str]) -> Iterator[tuple[float, str] | int]:
    """Run the command on a terminal of its own: pieces of what it writes there, each with its seconds from the
    beginning, and at last its exit code."""
    began_s = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], list(command))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        while data := os.read(terminal, READ_BYTES):
            if text := decoder.decode(data):
                yield time.monotonic() - began_s, text
    except OSError:  # Linux says so once nobody has the terminal open any more
        pass
    finally:
        os.close(terminal)
    yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def text_of(path: Path) -> str:
    """All that a recording's terminal was given."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return "".join(text for _, kind, text in map(json.loads, lines) if kind == "o")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    lines = [header(args.command, time.time()), event(0.0, f"{PROMPT}{' '.join(args.command)}\r\n")]
    code = 1
    for piece in recorded(args.command):
        if isinstance(piece, int):
            code = piece
            break
        at, text = piece
        sys.stdout.write(text)
        sys.stdout.flush()
        lines.append(event(at, text))
    if code == 0:
        args.file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        print(f"{args.file} is not written: the command ended with {code}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
