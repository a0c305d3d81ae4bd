"""Arguments and variables of a process as text that JSON, msgpack and a log can carry, byte for byte.

Linux gives a process bytes; most are UTF-8 and some are not (a path of an old archive, a Latin-1 value). A byte that is
not valid UTF-8 is carried as NUL and its two hexadecimal digits: no argument and no variable can have a NUL, so nothing
else is written like that.

    b"caf\\xc3\\xa9"  <->  "café"           b"caf\\xe9"  <->  "caf\\x00e9"

The limit for one string is the kernel's (`MAX_ARG_STRLEN`, execve(2)). The limits for all together are those of what
carries them: the log has the command, hosts have the environment (`plugins/scheduler/service/ranks/envs.py`). A refusal
names what is too large, and its size.
"""

import re
from collections.abc import Mapping, Sequence

from covey.core.units import KIB, format_size

STRING_BYTES_MAX = 128 * KIB - 1
"""Most bytes of one argument, or of one variable with its name and `=`: Linux gives a process no longer one."""
NAME_CHARACTERS_MAX = 256
ARGUMENTS_MAX, VARIABLES_MAX = 4096, 8192
ARGV_BYTES_MAX = 192 * KIB
"""Most bytes of all arguments together: they are part of a change of the log, which has 256 KiB at most."""
ENV_BYTES_MAX = 512 * KIB
"""Most bytes of all variables together: they travel to hosts and supervisors in messages of at most 1 MiB."""
NAMED_MAX = 3

TEXT = r"(?:[^\x00\ud800-\udfff]|\x00[89a-f][0-9a-f])"
"""Pattern of one character of a carried text."""
_STRAY = re.compile("[\udc80-\udcff]")
_ESCAPE = re.compile("\x00([89a-f][0-9a-f])")


def carried(data: bytes) -> str:
    """Text for the bytes of an argument, a path or a variable."""
    return _STRAY.sub(lambda found: f"\x00{ord(found[0]) - 0xDC00:02x}", data.decode("utf-8", "surrogateescape"))


def for_process(text: str) -> str:
    """The string that Python hands to a process as those bytes (`os.fsencode`, PEP 383)."""
    return _ESCAPE.sub(lambda found: chr(0xDC00 + int(found[1], 16)), text) if "\x00" in text else text


def for_processes(env: Mapping[str, str]) -> dict[str, str]:
    """The variables as Python hands them to a process: `for_process` of each name and value."""
    return {for_process(name): for_process(value) for name, value in env.items()}


def for_people(text: str) -> str:
    """The text for a screen: a byte that is not UTF-8 is shown by its number, such as `caf\\xe9`."""
    return _ESCAPE.sub(lambda found: f"\\x{found[1]}", text)


def size(text: str) -> int:
    """Number of bytes that the process gets. In the carried text a byte that is not UTF-8 takes three."""
    return len(for_process(text).encode("utf-8", "surrogateescape"))


def argv_excess(argv: Sequence[str]) -> tuple[str, str] | None:
    """Why Linux or the log cannot carry this command, as what and why; None when they can."""
    if len(argv) > ARGUMENTS_MAX:
        return f"the command has {len(argv):,} arguments", f"the limit is {ARGUMENTS_MAX:,}"
    sizes = [size(each) for each in argv]
    for place, each in enumerate(sizes):
        if each > STRING_BYTES_MAX:
            what = f"argument {place} of the command has {_bytes(each)} ({_beginning(argv[place])})"
            return what, f"Linux limits an argument to {_bytes(STRING_BYTES_MAX)}"
    if (whole := sum(len(each.encode()) for each in argv)) > ARGV_BYTES_MAX:
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        what = f"the arguments have {_bytes(whole)} together"
        return (
            what,
            f"the limit is {_bytes(ARGV_BYTES_MAX)}; argument {longest} alone has {_bytes(sizes[longest])}",
        )
    return None


def env_excess(env: Mapping[str, str]) -> tuple[str, str] | None:
    """Why Linux or the hosts cannot carry this environment, as what and why, naming variables; None when they can."""
    for name in env:
        if len(name) > NAME_CHARACTERS_MAX:
            what = f"the name of variable {_beginning(name)} has {len(name):,} characters"
            return what, f"the limit is {NAME_CHARACTERS_MAX}"
    sizes = {name: size(name) + 1 + size(value) for name, value in env.items()}
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:NAMED_MAX]
    if largest and sizes[largest[0]] > STRING_BYTES_MAX:
        what = f"variable {for_people(largest[0])} has {_bytes(sizes[largest[0]])}"
        return what, f"Linux limits a variable to {_bytes(STRING_BYTES_MAX)}, including its name"
    if len(env) > VARIABLES_MAX:
        return f"the environment has {len(env):,} variables", f"the limit is {VARIABLES_MAX:,}"
    if (whole := sum(len(name.encode()) + 1 + len(value.encode()) for name, value in env.items())) > ENV_BYTES_MAX:
        named = ", ".join(f"{for_people(name)} ({_bytes(sizes[name])})" for name in largest)
        what = f"the environment has {_bytes(whole)}"
        return what, f"the limit is {_bytes(ENV_BYTES_MAX)}; the largest variables are {named}"
    return None


def _bytes(count: int) -> str:
    return f"{count:,} bytes" if count < 10 * KIB else f"{count:,} bytes ({format_size(count)})"


def _beginning(text: str) -> str:
    return repr(for_people(text[:40])) + ("..." if len(text) > 40 else "")
