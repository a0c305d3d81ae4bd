"""The first process of a simulated host: reaps orphans, and ends, with all of its host, when its stdin does.

Started as a file by an isolated Python, so it imports only what is built in; whoever made the host holds the other end
of the pipe, and no host outlives its laboratory.
"""

import os
import select
import signal


def main() -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.write(1, b"up\n")
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if 0 in ready and not os.read(0, 4096):
            return
        if wake_read in ready:
            os.read(wake_read, 4096)
        reap()


def reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    main()
