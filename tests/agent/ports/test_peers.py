"""The process and user at the other end of a unix socket, by the kernel; what it does not tell is no user."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agent.arrays.keeper import may_use
from agent.ports.network.peers import OVERFLOW_UID, peer_of, stands_for_others
from covey.ports.streams import ANYBODY, UNKNOWN_USER
from tests.covey.test_volume_users import as_user

ROOT = Path(__file__).parents[3]
OTHER = 64_999
SERVE = """
import os, socket, sys
from agent.ports.network.peers import peer_of
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listener.listen()
print("listens", flush=True)
for _ in range(2):
    print(peer_of(listener.accept()[0])[1], flush=True)
"""


def test_who_connected_is_told_also_when_he_is_gone(tmp_path: Path) -> None:
    """The kernel notes it at that moment: a peer that closed, or ended, is no other one afterwards."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", connect, path]) as process:
            process.wait()
        served, _ = listener.accept()
    with served:
        assert peer_of(served) == (process.pid, os.geteuid())


def test_a_socket_without_a_peer_is_nobodys() -> None:
    """The kernel says -1 of a socket that was never connected, which is the owner of a volume that has none."""
    closed = socket.socket(socket.AF_UNIX)
    closed.close()
    with socket.socket(socket.AF_UNIX) as alone, socket.socket() as over_tcp:
        for connection in (alone, closed, over_tcp):
            assert peer_of(connection) == (0, UNKNOWN_USER)


def test_an_unknown_user_is_no_number_that_permits_anything() -> None:
    assert UNKNOWN_USER < 0 and UNKNOWN_USER not in (-1, ANYBODY)
    for owner in (-1, ANYBODY, UNKNOWN_USER, 0, os.geteuid(), OTHER):
        for uid in (-1, ANYBODY, UNKNOWN_USER):
            assert not may_use(uid, owner)
    assert may_use(OTHER, OTHER) and may_use(0, OTHER) and not may_use(OTHER, -1)


def test_the_number_for_users_without_one_is_a_user_where_all_users_have_numbers(tmp_path: Path) -> None:
    whole, part, overflow = tmp_path / "whole", tmp_path / "part", tmp_path / "overflow"
    whole.write_text("         0          0 4294967295\n")
    part.write_text("         0       1000          1\n         1     100000      65535\n")
    overflow.write_text("77\n")
    assert not stands_for_others(77, overflow, whole)
    assert stands_for_others(77, overflow, part) and not stands_for_others(OVERFLOW_UID, overflow, part)
    nowhere = tmp_path / "none"
    assert stands_for_others(77, overflow, nowhere), "a map that cannot be read may lack somebody"
    assert stands_for_others(OVERFLOW_UID, nowhere, nowhere) and not stands_for_others(0, nowhere, nowhere)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare here; next: apt install util-linux")
def test_in_a_user_namespace_whoever_has_no_number_there_is_unknown(tmp_path: Path) -> None:
    path = f"/tmp/covey-peers-{os.getpid()}.sock"
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", SERVE, path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            if server.stdout.readline() != "listens\n":
                pytest.skip(f"no user namespace can be made here: {server.stderr.read().strip()[-200:]}")

            def connect() -> str:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(path)
                return "in"

            said = []
            for uid in (0, OTHER):
                assert as_user(uid, connect) == "in"
                said.append(int(server.stdout.readline()))
            assert said == [0, UNKNOWN_USER]
        finally:
            server.kill()
            Path(path).unlink(missing_ok=True)
