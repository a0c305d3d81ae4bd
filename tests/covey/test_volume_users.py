"""The user of a volume, where the agent is not root: of three users one runs the agent and one owns the volume."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.ports.network import unix_sockets
from agent.ports.network.unix_sockets import bind_unix
from tests.covey.live_volume import STRANGER, LiveVolume, python_of

pytestmark = [pytest.mark.rack, pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")]
AGENT, OWNER, THIRD = STRANGER - 1, STRANGER, STRANGER + 1


def as_user(uid: int, work: Callable[[], object]) -> str:
    """The answer that this user gets, in a process of their own: the text of the result, or the name of the error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if uid != os.geteuid():
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            said = str(work())
        except OSError as error:
            said = errno.errorcode.get(error.errno or 0, str(error))
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as told:
        return told.read()


def connected(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(path)
    return "in"


@pytest.mark.parametrize("lists", [True, False], ids=["with access lists", "without"])
def test_a_socket_is_handed_over_by_an_agent_that_is_no_root(
    tmp_path: Path, lists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent adds an access list entry for that user where the file system has lists; otherwise anyone can connect,
    and is asked who they are."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    os.chown(run, AGENT, AGENT)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp/") and folder != Path("/tmp"):
            os.chmod(folder, folder.stat().st_mode | 0o011)
    path = str(run / "vol.sock")
    if not lists:

        def refused(*arguments: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "no lists here")

        monkeypatch.setattr(unix_sockets.os, "setxattr", refused)  # type: ignore[attr-defined]
    inherited = socket.socket(socket.AF_UNIX)

    def bind() -> str:
        bound = bind_unix(path, uid=OWNER)
        os.dup2(bound.fileno(), inherited.fileno())
        return f"{run.stat().st_mode & 0o777:o} {as_user_in_child(path)}"

    def as_user_in_child(path: str) -> str:
        return f"{os.stat(path).st_mode & 0o777:o}"

    assert as_user(AGENT, bind) == f"711 {'660' if lists else '666'}"
    # the listener ended with that process: who may not even try gets another error than who finds nobody
    got = {uid: as_user(uid, lambda: connected(path)) for uid in (AGENT, OWNER, THIRD)}
    assert got == {AGENT: "ECONNREFUSED", OWNER: "ECONNREFUSED", THIRD: "EACCES" if lists else "ECONNREFUSED"}
    inherited.close()


OWN = """
with RemoteArray(PATH, 1_000_000, "uint8", local_budget="1 MiB") as array:
    array.array[:] = 7
    assert (array.array == 7).all()
    array.flush()
with RemoteMemory.at(PATH) as memory:
    print(os.geteuid(), memory.read(0, 3))
"""
TRIED = """
for door in (lambda: RemoteMemory.at(PATH), lambda: RemoteArray(PATH, 1000, local_budget="1 MiB")):
    try:
        door()
    except RemoteMemoryError as error:
        print(error)
"""


@pytest.mark.skipif(python_of(AGENT) is None, reason="no interpreter that another user may execute")
def test_a_volume_of_another_user_works_where_nothing_runs_as_root() -> None:
    """Volume, lender, writer of the log and pager run as the agent's user; a third user can connect to none."""
    with LiveVolume(uid=OWNER, agent_uid=AGENT) as volume:
        assert volume.run(OWN, uid=OWNER) == f"{OWNER} b'\\x07\\x07\\x07'\n"
        assert {os.stat(f"/proc/{pid}").st_uid for pid in volume.pagers()} <= {AGENT}
        assert os.stat(volume.path).st_uid == AGENT
        assert "Permission denied" in volume.run(TRIED, uid=THIRD)
        for name in ("vol-data.sock", "arr-data.sock"):
            os.chmod(f"{volume.run_dir}/{name}", 0o666)  # a file system without lists
        refused = volume.run(TRIED, uid=THIRD).splitlines()
        assert len(refused) == 2
        assert all(f"belongs to another user (uid {OWNER})" in line for line in refused)
        assert volume.run(OWN, uid=OWNER).startswith(str(OWNER))
        for name in ("vold-data.sock", "slabd.sock", "arr-data.sock.lock"):
            assert os.stat(f"{volume.run_dir}/{name}").st_mode & 0o077 == 0, name


def test_no_socket_is_made_where_another_user_could_put_his_own(tmp_path: Path) -> None:
    """`agentctl volume export --socket` takes any path: in his folder, where all may write, or through a link."""
    his, open_to_all, ours = tmp_path / "his", tmp_path / "open", tmp_path / "ours"
    for folder in (his, open_to_all, ours):
        folder.mkdir(mode=0o700)
    os.chown(his, THIRD, THIRD)
    os.chmod(open_to_all, 0o777)
    with pytest.raises(OSError, match=f"belongs to another user .uid {THIRD}., who could replace"):
        bind_unix(str(his / "x.sock"))
    with pytest.raises(OSError, match="everybody may write"):
        bind_unix(str(open_to_all / "x.sock"))
    os.chmod(open_to_all, 0o1777)
    bind_unix(str(open_to_all / "x.sock")).close()
    target = ours / "kept"
    target.write_text("his")
    (ours / "link.sock").symlink_to(target)
    with pytest.raises(OSError, match="exists and is not a socket"):
        bind_unix(str(ours / "link.sock"))
    (ours / "nowhere.sock").symlink_to(his / "x.sock")
    with pytest.raises(OSError, match="exists and is not a socket"):
        bind_unix(str(ours / "nowhere.sock"))
    assert target.read_text() == "his" and not os.path.lexists(his / "x.sock")
