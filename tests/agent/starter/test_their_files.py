"""What an agent reads in a folder whose user wishes it ill. Only root can be several users."""

import asyncio
import os
import socket
import stat
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.ports.starter.their_files import READ_BYTES_MAX, FolderFiles
from agent.starter.accounts import Denied, UnixAccount
from agent.starter.folders import JobFolders
from agent.starter.sessions import Sessions
from tests.agent.starter.starter_here import ALICE, BOB
from tests.covey.test_volume_users import as_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
AGENT = 64_100
SECRET = b"the gossip key"


def account(uid: int) -> UnixAccount:
    return UnixAccount(f"u{uid}", uid, uid, "/", "/bin/sh")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp/") and folder != Path("/tmp"):
            os.chmod(folder, folder.stat().st_mode | 0o011)
    path = tmp_path / "u"
    made = JobFolders(str(path), AGENT)
    made.set_up()
    made.make("j1", account(ALICE))
    key = tmp_path / "gossip.key"
    key.write_bytes(SECRET)
    os.chown(key, AGENT, AGENT)
    os.chmod(key, 0o600)
    yield path


def by_alice(root: Path, line: str) -> str:
    """Do a line of Python in alice's folder."""

    def work() -> object:
        os.chdir(root / "jobs/j1")
        os.umask(0o027)
        exec(line, {"os": os, "open": open, "socket": socket})
        return "done"

    return as_user(ALICE, work)


def by_agent(root: Path, work: Callable[[FolderFiles], Coroutine[Any, Any, object]]) -> str:
    """Do something with the files, as the agent's user."""
    return as_user(AGENT, lambda: asyncio.run(work(FolderFiles(str(root)))))


def test_the_agent_reads_and_removes_what_the_user_wrote(root: Path) -> None:
    assert by_alice(root, "open('rank0.log', 'w').write('hello')") == "done"
    assert by_agent(root, lambda files: files.read("jobs/j1/rank0.log", ALICE)) == "b'hello'"
    assert by_agent(root, lambda files: files.peek("jobs/j1/rank0.log", 1, 3)) == "b'ell'"
    assert by_agent(root, lambda files: files.size("jobs/j1/rank0.log")) == "5"
    assert by_agent(root, lambda files: files.names("jobs/")) == "['jobs/j1/rank0.log']"
    assert by_agent(root, lambda files: files.names("jobs/j1/rank")) == "['jobs/j1/rank0.log']"
    by_agent(root, lambda files: files.delete("jobs/j1/rank0.log"))
    assert by_agent(root, lambda files: files.names("jobs/")) == "[]"
    assert by_agent(root, lambda files: files.read("jobs/j1/rank0.log", ALICE)) == "None"


def test_no_other_user_reads_or_lists_or_writes_there(root: Path) -> None:
    by_alice(root, "open('rank0.log', 'w').write('hello')")
    for work in (
        lambda: (root / "jobs/j1/rank0.log").read_text(),
        lambda: os.listdir(root / "jobs/j1"),
        lambda: os.listdir(root / "jobs"),
        lambda: (root / "jobs/j1/x").write_text("x"),
        lambda: (root / "jobs/j2").mkdir(),
        lambda: os.rename(root / "jobs/j1", root / "jobs/j2"),
        lambda: os.rename(root / "jobs", root / "others"),
    ):
        assert as_user(BOB, work) == "EACCES"


def test_the_folder_itself_cannot_be_replaced_by_its_user(root: Path) -> None:
    assert as_user(ALICE, lambda: os.rename(root / "jobs/j1", root / "jobs/j9")) == "EACCES"
    assert as_user(ALICE, lambda: os.symlink("/etc", root / "jobs/j9")) == "EACCES"


def test_what_cannot_be_removed_is_no_error(root: Path) -> None:
    """Else a user would keep an agent from clearing up the others' output."""
    by_alice(root, "os.makedirs('rank0.log/x')")
    assert by_agent(root, lambda files: files.delete("jobs/j1/rank0.log")) == "None"


@pytest.mark.parametrize(
    "line",
    [
        "os.symlink('../../../gossip.key', 'rank0.log')",
        "os.symlink('/etc/hostname', 'rank0.log')",
        "os.mkfifo('rank0.log')",
        "os.mkdir('rank0.log')",
        "socket.socket(socket.AF_UNIX).bind('rank0.log')",
        "open('a', 'w').write('x'); os.link('a', 'rank0.log')",
        "open('rank0.log', 'w').write('x'); os.chmod('rank0.log', 0)",
    ],
)
def test_what_is_no_plain_file_of_the_user_is_not_read(root: Path, line: str) -> None:
    """Neither does it keep the reader waiting, as a pipe without a writer would."""
    assert by_alice(root, line) == "done"
    assert by_agent(root, lambda files: files.read("jobs/j1/rank0.log", ALICE)) == "b''", "as good as damaged"
    for said in (
        by_agent(root, lambda files: files.size("jobs/j1/rank0.log")),
        by_agent(root, lambda files: files.peek("jobs/j1/rank0.log", 0, 100)),
    ):
        assert "gossip" not in said and not said.startswith("b'") and not said.isdigit(), said


def test_a_hard_link_to_another_users_file_is_not_read(root: Path) -> None:
    """The kernel refuses to make one where links are protected; root makes it here, as a kernel without that would."""
    os.link(root.parent / "gossip.key", root / "jobs/j1/rank0.log")
    assert by_agent(root, lambda files: files.read("jobs/j1/rank0.log", ALICE)) == "b''"
    by_agent(root, lambda files: files.delete("jobs/j1/rank0.log"))
    assert (root.parent / "gossip.key").read_bytes() == SECRET, "a name was removed, and nothing behind it"


def test_a_link_to_the_users_own_file_elsewhere_is_not_followed(root: Path) -> None:
    own = root.parent / "own"
    own.write_text("own")
    os.chown(own, ALICE, ALICE)
    os.chmod(own, 0o644)
    assert by_alice(root, "os.symlink('../../../own', 'rank0.log')") == "done"
    assert by_agent(root, lambda files: files.read("jobs/j1/rank0.log", ALICE)) == "b''"


def test_a_file_of_another_user_is_not_the_jobs(root: Path) -> None:
    path = root / "jobs/j1/rank0.log"
    path.write_bytes(SECRET)
    for uid in (AGENT, BOB, 0):
        os.chown(path, uid, uid)
        assert by_agent(root, lambda files: files.read("jobs/j1/rank0.log", ALICE)) == "b''"


def test_a_folder_that_became_a_link_is_not_followed(root: Path) -> None:
    os.symlink(root.parent, root / "jobs/j2")
    assert by_agent(root, lambda files: files.read("jobs/j2/gossip.key", ALICE)) == "None"
    assert by_agent(root, lambda files: files.names("jobs/j2/")) == "[]"


def test_the_folder_of_another_user_is_not_taken_for_the_jobs(root: Path) -> None:
    by_alice(root, "open('3.state', 'w').write('x')")
    assert by_agent(root, lambda files: files.read("jobs/j1/3.state", BOB)) == "b''"


@pytest.mark.parametrize(
    "name",
    ["jobs/j1/../../../gossip.key", "gossip.key", "jobs/../gossip.key", "jobs/j1/a/b", "jobs//rank0.log", "/etc/x"],
)
def test_no_name_leads_out_of_a_jobs_folder(root: Path, name: str) -> None:
    assert by_agent(root, lambda files: files.read(name, ALICE)) == "None"
    by_agent(root, lambda files: files.delete(name))
    assert (root.parent / "gossip.key").exists()


def test_a_file_of_any_size_takes_bounded_memory(root: Path) -> None:
    size = READ_BYTES_MAX + 1
    by_alice(root, f"os.truncate(os.open('3.state', os.O_CREAT | os.O_WRONLY, 0o640), {size})")

    async def read(files: FolderFiles) -> int:
        return len(await files.read("jobs/j1/3.state", ALICE) or b"")

    assert by_agent(root, read) == "0"


def test_what_is_made_there_never_runs_as_the_agent(root: Path) -> None:
    by_alice(root, "os.close(os.open('x', os.O_CREAT | os.O_WRONLY, 0o6755)); os.chmod('x', 0o6755); os.mkdir('d')")
    for name in ("x", "d"):
        found = (root / "jobs/j1" / name).stat()
        assert (found.st_uid, found.st_gid) == (ALICE, ALICE), "the agent's group is nobody's there"


def test_a_folder_is_cleared_by_its_user_whatever_is_in_it(root: Path) -> None:
    """Root follows no link of the user's, and removes nothing outside."""
    by_alice(root, "os.makedirs('a/b/c'); os.symlink('/', 'a/root'); open('a/b/x', 'w'); os.chmod('a/b', 0)")
    made = JobFolders(str(root), AGENT)
    made.forget("j1", Sessions().clear)
    assert not (root / "jobs/j1").exists()
    assert (root.parent / "gossip.key").exists()
    made.forget("j1", Sessions().clear)


def test_what_the_user_cannot_remove_stays_and_is_told(root: Path) -> None:
    (root / "jobs/j1/d").mkdir(mode=0o755)
    (root / "jobs/j1/d/x").touch()
    with pytest.raises(Denied, match="cannot be removed"):
        JobFolders(str(root), AGENT).forget("j1", Sessions().clear)
    assert (root / "jobs/j1/d/x").exists()


def test_a_folder_of_another_user_is_not_given_to_a_second_one(root: Path) -> None:
    made = JobFolders(str(root), AGENT)
    with pytest.raises(Denied, match="belongs to another user"):
        made.make("j1", account(BOB))
    assert (root / "jobs/j1").stat().st_uid == ALICE
    os.chmod(root / "jobs/j1", 0o777)
    made.make("j1", account(ALICE))
    assert stat.S_IMODE((root / "jobs/j1").stat().st_mode) & 0o007 == 0, "nobody else's again"


def test_a_folder_whose_making_was_cut_off_is_made_ready(root: Path) -> None:
    (root / "jobs/j3").mkdir(mode=0o700)
    assert by_agent(root, lambda files: files.names("jobs/j3/")) == "[]"
    JobFolders(str(root), AGENT).make("j3", account(BOB))
    assert (root / "jobs/j3").stat().st_uid == BOB
