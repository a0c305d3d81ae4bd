"""`agentctl rack join` against a member that answers over UDP: what is written, and that a refusal writes nothing."""

import io
import os
import random
import socket
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent import keys
from agent.keyring.service import of_file
from cli.joining import asking
from cli.main import main
from covey.core.ids import HostId
from covey.wire import checked
from gossip.joining.machine import JoinTokens
from gossip.joining.messages import ID_BYTES, SECRET_BYTES, JoinToken, RackGiven
from gossip.joining.policy import TOKEN_S

KEY, OTHER = b"k" * 32, b"o" * 32
PERSONS = "[gpus]\nsimulated = 2  # for the laboratory\n"


class FakeMember:
    """A member of a rack: its UDP socket, and tokens by a clock that a test moves."""

    def __init__(self) -> None:
        self.tokens, self.now_s, self.host = JoinTokens((KEY,)), 0.0, "gpu1"
        self.lost = 0
        """The number of asks still to be lost."""
        self.silent = False
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.at = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            datagram, source = self.socket.recvfrom(2048)
            if not datagram:
                return
            self.lost -= 1
            if self.silent or self.lost >= 0:
                continue
            given = RackGiven(HostId(self.host), (KEY,), "covey", (HostId("gpu1"),), (self.at, "10.0.0.9:7946"))
            replied = self.tokens.asked(datagram, given, os.urandom(32), self.now_s)
            self.socket.sendto(replied.reply, source)

    def token(self, seed: int = 1) -> JoinToken:
        made = self.tokens.make(random.Random(seed).randbytes(ID_BYTES + SECRET_BYTES), self.now_s)
        assert made is not None
        return made

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
            link.sendto(b"", self.socket.getsockname())
        self._thread.join()
        self.socket.close()


@pytest.fixture
def member() -> Iterator[FakeMember]:
    made = FakeMember()
    yield made
    made.close()


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The agent.toml of this host, with a line of a person."""
    folder = tmp_path / "etc"
    folder.mkdir()
    path = folder / "agent.toml"
    head = f'name = "gpu2"\nstate_dir = "{tmp_path}/state"\nrun_dir = "/tmp/covey-joining-{os.getpid()}"\n'
    path.write_text(head + PERSONS)
    monkeypatch.chdir(tmp_path)
    return path


def join(toml: Path, at: str, *words: str) -> int:
    return main(["rack", "join", at, "--config", str(toml), *words])


def files(toml: Path) -> dict[str, str]:
    return {str(path.relative_to(toml.parent)): path.read_text() for path in sorted(toml.parent.rglob("*"))}


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The three lines of an error."""
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert [line[:7] for line in lines] == [lines[0][:7], "  why:  "[:7], "  next: "[:7]] and said.out == ""
    return said.err


def test_a_token_brings_the_key_and_no_line_of_a_person_is_lost(
    toml: Path, member: FakeMember, capsys: pytest.CaptureFixture[str]
) -> None:
    member.lost = 1
    assert join(toml, member.at, "--token", member.token().text) == 0
    key = toml.parent / keys.NAME
    assert keys.load(key, make=False) == [KEY] and key.stat().st_mode & 0o777 == 0o600
    written = tomllib.loads(toml.read_text())
    assert written["gossip"] == {"seeds": [member.at, "10.0.0.9:7946"]} and written["leader"] == {"voters": ["gpu1"]}
    assert PERSONS in toml.read_text()
    said = capsys.readouterr()
    assert said.out == f"gpu2 will join when its agent starts; next: agentd --config {toml}\n"
    assert KEY.hex() not in said.out + said.err


@pytest.mark.parametrize("way", ["stdin", "file"])
def test_a_token_need_not_be_an_argument(
    way: str, toml: Path, member: FakeMember, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = member.token().text + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    (tmp_path / "token").write_text(text)
    assert join(toml, member.at, "--token-file", "-" if way == "stdin" else str(tmp_path / "token")) == 0


def test_each_reason_for_a_refusal_is_told_and_nothing_is_written(
    toml: Path, member: FakeMember, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(toml)
    used, late = member.token(1), member.token(2)
    wrong = JoinToken(late.id, late.rack, b"w" * SECRET_BYTES)
    unknown = JoinToken(b"strng", late.rack, late.secret)
    other = toml.parent.parent / "other.toml"
    other.write_text(toml.read_text().replace("/state", "/other"))
    assert join(other, member.at, "--token", used.text) == 0
    capsys.readouterr()
    cases = ((used, "it was used"), (wrong, "its secret is not"), (unknown, "or has restarted since"))
    for token, why in cases:
        assert join(toml, member.at, "--token", token.text) == 4
        assert why in refused(capsys)
    member.now_s = TOKEN_S
    assert join(toml, member.at, "--token", late.text) == 4
    assert "it has expired" in refused(capsys)
    assert files(toml) == before


def test_what_answers_without_knowing_the_token_is_not_trusted(
    toml: Path, member: FakeMember, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.5)
    before, token = files(toml), member.token()
    monkeypatch.setattr("gossip.joining.policy.proves", lambda ask, token: True)
    member.tokens._made[token.id].token = JoinToken(token.id, token.rack, b"i" * SECRET_BYTES)
    assert join(toml, member.at, "--token", token.text) == 4
    assert "is not trusted" in refused(capsys) and files(toml) == before


def test_a_member_that_is_silent_or_not_there_is_told_apart(
    toml: Path, member: FakeMember, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.5)
    member.silent = True
    assert join(toml, member.at, "--token", member.token().text) == 6
    assert "does not answer" in refused(capsys)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert join(toml, f"127.0.0.1:{port}", "--token", member.token(2).text) == 5
    assert "no agent at" in refused(capsys)
    assert join(toml, "nowhere.invalid:7946", "--token", member.token(3).text) == 3
    assert "getent hosts nowhere.invalid" in refused(capsys)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "no token is given"),
        (("--token", "covey-abc"), "this is not a token"),
        (("--token", "x", "--token-file", "y"), "two tokens are given"),
        (("--token-file", "/nowhere"), "cannot read the token"),
    ],
)
def test_wrong_usage_is_told_before_anybody_is_asked(
    words: tuple[str, ...], what: str, toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert join(toml, "127.0.0.1:9", *words) == 2
    assert what in refused(capsys)
    assert main(["rack", "join", "gpu1", "--token", "x"]) == 2
    assert "is not a host and a port" in refused(capsys)
    assert main(["rack"]) == 2
    assert "no command is named" in refused(capsys)


@pytest.mark.parametrize("of", ["log", "seeds", "voters", "key"])
def test_a_host_of_another_rack_does_not_use_the_token_up(
    of: str, toml: Path, member: FakeMember, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if of == "log":
        (tmp_path / "state" / "consensus").mkdir(parents=True)
    elif of == "key":
        keys.generate(toml.parent / keys.NAME)
    else:
        toml.write_text(
            toml.read_text()
            + {"seeds": '[gossip]\nseeds = ["gpu9:7946"]\n', "voters": '[leader]\nvoters = ["gpu9"]\n'}[of]
        )
    before, token = files(toml), member.token().text
    assert join(toml, member.at, "--token", token) == 4
    assert "--leave-own" in refused(capsys) and files(toml) == before
    assert join(toml, member.at, "--token", token, "--leave-own") == 0
    written = tomllib.loads(toml.read_text())
    assert written["leader"] == {"voters": ["gpu1"]} and written["gossip"]["seeds"][0] == member.at
    assert keys.load(toml.parent / keys.NAME, make=False) == [KEY]
    assert (tmp_path / "state" / "consensus.given-up").is_dir() == (of == "log")
    assert not (tmp_path / "state" / "consensus").exists()
    assert (toml.parent / "gossip.key.given-up").exists() == (of == "key")


def test_a_host_that_has_the_key_leaves_its_own_log_without_a_token(
    toml: Path, member: FakeMember, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = toml.parent / keys.NAME
    path.touch(0o600)
    path.write_text(f"{OTHER.hex()}\n")
    (tmp_path / "state" / "consensus").mkdir(parents=True)
    before = files(toml)
    assert join(toml, member.at, "--leave-own") == 4
    assert "the gossip key of this host is not the one there" in refused(capsys) and files(toml) == before
    path.write_text(f"{KEY.hex()}\n")
    assert join(toml, member.at, "--leave-own") == 0
    assert (tmp_path / "state" / "consensus.given-up").is_dir()
    assert keys.load(path, make=False) == [KEY]


@pytest.mark.parametrize("at", ["key", "agent.toml"])
def test_an_interrupted_join_is_repeated_by_the_same_line(
    at: str, toml: Path, member: FakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token is used up; nothing is half written when it is killed between two files."""
    put, token = os.replace, member.token().text

    def killed(source: Path, to: Path) -> None:
        if Path(to).name == {"key": keys.NAME}.get(at, at):
            raise KeyboardInterrupt
        put(source, to)

    monkeypatch.setattr("os.replace", killed)
    before = toml.read_text()
    assert join(toml, member.at, "--token", token) != 0
    assert toml.read_text() == before and (toml.parent / keys.NAME).exists() == (at == "agent.toml")
    monkeypatch.setattr("os.replace", put)
    if at == "key":
        assert join(toml, member.at, "--token", token) == 4, "the key never came: another token is needed"
        token = member.token(2).text
    assert join(toml, member.at, "--token", token) == 0
    assert keys.load(toml.parent / keys.NAME, make=False) == [KEY]
    assert tomllib.loads(toml.read_text())["gossip"]["seeds"][0] == member.at
    assert not [path for path in toml.parent.iterdir() if path.name.startswith(".")]


def test_a_host_whose_keys_were_rotated_since_has_the_new_key(
    toml: Path, member: FakeMember, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = toml.parent / keys.NAME
    path.touch(0o600)
    path.write_text(f"{OTHER.hex()}\n")
    (tmp_path / "state").mkdir()
    ring = msgspec.structs.replace(of_file([OTHER]), keys=(KEY,), numbers=(1,))
    (tmp_path / "state" / "gossip.ring").write_bytes(checked.seal(ring))
    assert join(toml, member.at, "--leave-own") == 0
    assert keys.load(path, make=False) == [OTHER], "the ring is in its place"


def test_a_host_with_the_name_of_the_member_is_refused(
    toml: Path, member: FakeMember, capsys: pytest.CaptureFixture[str]
) -> None:
    member.host, before = "gpu2", files(toml)
    assert join(toml, member.at, "--token", member.token().text) == 4
    assert "this host is named gpu2" in refused(capsys) and files(toml) == before


def test_init_makes_key_and_file_once_and_says_what_to_start(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rack", "init", "--config", str(toml)]) == 0
    first = files(toml)
    said = capsys.readouterr()
    assert f"next: agentd --config {toml}" in said.err and "then: agentctl rack token" in said.err and said.out == ""
    assert PERSONS in first["agent.toml"] and tomllib.loads(first["agent.toml"])["leader"] == {"voters": ["gpu2"]}
    assert len(keys.load(toml.parent / keys.NAME, make=False)) == 1
    assert main(["rack", "init", "--config", str(toml)]) == 0
    assert files(toml) == first


def test_init_on_a_host_that_names_seeds_and_lacks_their_key_makes_no_other_key(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml.write_text(toml.read_text() + '[gossip]\nseeds = ["gpu1:7946"]\n')
    before = files(toml)
    assert main(["rack", "init", "--config", str(toml)]) == 4
    assert "their key is not here" in refused(capsys) and files(toml) == before
