"""What a rank and Covey's own programs inherit of the agent that starts them. This is the one place that says so, and
the tests look from inside (`tests/agent/ports/test_inheritance.py`).

A *rank*, and a spare that waits to become one:

- its job gives it arguments, the whole environment, its working directory and its umask (`COVEY_UMASK`);
- its shim gives it descriptors 0 (`/dev/null`), 1 and 2 (its output), and no others; a session and a process group of
  its own, without a terminal; the cores of its devices;
- it begins anew (`begin_anew`; its shim: `unblock_signals`) with the default action for every signal and none blocked,
  no ambient capability, the ordinary scheduling policy and, if the agent runs before others or is killed last,
  niceness 0 and an OOM score of 0;
- it inherits what an operator sets for the agent's service and means for what that runs: user and groups, resource
  limits, control group, cores, I/O priority, namespaces, `no_new_privs`, the system call filter, and which
  capabilities may ever be had.

Covey's *programs* (a supervisor, a keeper of spares, byte processes) get descriptors 0 to 2 and one pipe by which they
say that they are loaded (sockets they open themselves, or are sent), the agent's environment without what systemd says
to the agent alone (`NOT_INHERITED`), and no blocked signal. A *shim* gets the few variables by which it is found, and
writes its own errors to the log of the supervisor (descriptor 2).

Standard library only, and little of it: a shim imports this without site (`agent/ports/processes/shim.py`).
"""

from __future__ import annotations

import ctypes
import os

# Neither `signal` nor `resource`: what they import takes longer than all of the rest.
from _signal import (  # type: ignore[import-not-found]
    SIG_DFL,
    SIG_SETMASK,
    SIGKILL,
    SIGSTOP,
    pthread_sigmask,
    signal,
    valid_signals,
)

NOT_INHERITED = frozenset(
    """NOTIFY_SOCKET WATCHDOG_PID WATCHDOG_USEC LISTEN_PID LISTEN_FDS LISTEN_FDNAMES LISTEN_PIDFDID FDSTORE MAINPID
    MANAGERPID INVOCATION_ID JOURNAL_STREAM SYSTEMD_EXEC_PID CREDENTIALS_DIRECTORY MEMORY_PRESSURE_WATCH
    MEMORY_PRESSURE_WRITE""".split()  # noqa: SIM905
)
"""The agent's variables from systemd, which its programs do not get."""
UMASK = "COVEY_UMASK"
"""The variable of a rank's environment with its submitter's umask, octal."""
UMASK_UNLESS_SET = 0o077
"""The umask of a job that does not say one: what it writes is its user's alone."""
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4


def begin_anew() -> None:
    """Begin anew in a process that is about to become a rank. Nothing here raises: what this kernel cannot do it never
    gave."""
    for number in valid_signals():
        if number not in (SIGKILL, SIGSTOP):
            try:
                signal(number, SIG_DFL)
            except OSError:
                continue  # the C library's own
    ctypes.CDLL(None).prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    make_ordinary("self", 0)


def unblock_signals() -> None:
    """Unblock all signals in one of Covey's programs or a shim, as it begins."""
    pthread_sigmask(SIG_SETMASK, ())


def umask_of(env: dict[str, str]) -> int:
    """The umask in an environment. ValueError for what is no octal number."""
    given = env.get(UMASK)
    return int(given, 8) & 0o777 if given else UMASK_UNLESS_SET


def make_ordinary(process: int | str, pid: int) -> None:
    """Make a process ordinary: the agent runs before others and is killed last (systemd/covey.service); what it starts
    for users does not. `process` as /proc names it, `pid` as the kernel does (0: this one)."""
    try:
        if os.sched_getscheduler(pid) != os.SCHED_OTHER:
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
        if os.getpriority(os.PRIO_PROCESS, pid) < 0:
            os.setpriority(os.PRIO_PROCESS, pid, 0)
        with open(f"/proc/{process}/oom_score_adj", "r+") as file:
            if int(file.read()) < 0:
                file.seek(0)
                file.write("0")
    except OSError:
        return  # it has ended
