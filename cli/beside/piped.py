"""Standard input of `agentctl run --stdin`: it becomes that of the job's rank 0, as fast as that reads it.

    agentctl run --stdin  --turns-->  session beside rank 0: WRITES  --named pipe-->  rank 0: READS, then the command

At most a few hundred KiB are on the way; at its end the command reads the end of a file. The pipe is in the host's
folder for temporary files, under a name that nobody guesses, is the job's user's own, and its name goes once both ends
are open. What a start has read is gone, so another start of the job fails and says so."""

import os
import secrets
import threading
from collections.abc import Sequence

from cli.beside.attached import AttachedSession, opened, say
from cli.client import NOT_FOUND, AgentctlError
from cli.context import Context

_PIPE = 'p="${TMPDIR:-/tmp}/covey-stdin-$1"; shift; '
READS = (
    _PIPE + 'case ${COVEY_RANK:-0} in 0) ;; *) exec "$@" ;; esac; '
    'if [ "${COVEY_ATTEMPT:-1}" != 1 ]; then '
    'echo "covey: its standard input was read by an earlier start" >&2; exit 4; fi; '
    'mkfifo -m 600 "$p" || exit 4; exec "$@" <"$p"'
)
"""What the job runs: `sh -c READS stdin NAME COMMAND...`."""
WRITES = (
    _PIPE + "left=300; no() { echo 'covey: rank 0 has opened no standard input' >&2; exit 1; }; "
    'while [ ! -p "$p" ]; do left=$((left - 1)); [ $left -gt 0 ] || no; sleep 0.1; done; '
    '[ -O "$p" ] || no; exec 3>"$p"; rm -f "$p"; exec cat >&3 2>/dev/null'
)
"""What the session beside rank 0 runs: `sh -c WRITES stdin NAME`."""


class PipedInput:
    """The standard input of one job."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(16)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command of the job whose rank 0 runs this one."""
        return ["sh", "-c", READS, "stdin", self._name, *command]

    def start(self, context: Context, job: str) -> None:
        """Begin to hand it on, beside whatever else this program does. AgentctlError says why it cannot be."""
        found = opened(context.agent, job, 0, "exec", ["sh", "-c", WRITES, "stdin", self._name], False)
        session = AttachedSession(context.agent, "exec", found, False)
        threading.Thread(target=self._feed, args=(session, job), daemon=True).start()

    def _feed(self, session: AttachedSession, job: str) -> None:
        try:
            session.converse()  # its end is none of the job's: that may read less
        except AgentctlError as error:
            if error.code != NOT_FOUND:
                say(f"the standard input of {job} ends here: {error.why}")


def name_of(command: Sequence[str]) -> str:
    """The name of a job that runs this command, where nobody says another one."""
    return os.path.basename(command[0])[:63]
