"""Sealed datagrams: which hosts may read them, what is refused, and that nothing crashes the opener."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.events import Message
from covey.core.ids import HostId
from gossip.membership import messages as m
from gossip.packet import (
    HEADER_BYTES,
    KEYS_MAX,
    TAG_BYTES,
    VERSION,
    WINDOW,
    Dropped,
    Keyring,
    Opened,
    Opener,
    Sealer,
    Window,
    budget,
    key_id,
)
from gossip.settings import DATAGRAM_BYTES, DATAGRAM_BYTES_MAX
from gossip.spread import messages as s
from gossip.types import U32_MAX, U63_MAX, Sender, batches, size

KEY, NEXT_KEY, FOREIGN_KEY = bytes(32), b"\1" * 32, b"\2" * 32
A = Sender(HostId("a"), b"A" * 16, 3)
B = Sender(HostId("b"), b"B" * 16, 1)


def sealer(me: Sender = A, keys: tuple[bytes, ...] = (KEY,), label: str = "rack", salt: bytes = b"salt") -> Sealer:
    return Sealer(Keyring(keys, label), me, salt)


def opener(keys: tuple[bytes, ...] = (KEY,), label: str = "rack", me: Sender = B) -> Opener:
    return Opener(Keyring(keys, label), me.identity)


def reason(found: Opened | Dropped) -> str:
    assert isinstance(found, Dropped)
    return found.reason


# ---- one message of each kind, with anything that may stand in it ----

names = st.from_regex(r"\A[a-z0-9][a-z0-9.-]{0,62}\Z").map(HostId)
u32s = st.integers(0, U32_MAX)
u63s = st.integers(0, U63_MAX)
uuids = st.binary(min_size=16, max_size=16)
addresses = st.from_regex(r"\A[0-9A-Za-z.:\[\]_-]{0,80}\Z")
known = st.builds(s.KnownVersion, u63s, u63s, u32s)
entries = st.builds(s.FactEntry, st.text(min_size=1, max_size=20), u32s, st.none() | st.binary(max_size=40))
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(m.Ping, u32s, u63s),
    st.builds(m.Ack, u32s),
    st.builds(m.Nack, u32s),
    st.builds(m.PingReq, u32s, names, u63s),
    st.builds(m.Alive, names, uuids, u63s, u32s, addresses),
    st.builds(m.Suspect, names, u63s, u63s, u32s, names),
    st.builds(m.Gone, names, u63s, u63s, u32s, names),
    st.builds(m.Left, names, u63s, u63s, u32s),
    st.builds(m.SyncAsk, u63s),
    st.builds(m.SyncSame),
    st.builds(m.SyncPull),
    st.builds(m.MemberRecord, names, uuids, u63s, u32s, addresses, st.integers(0, 3), names | st.just(HostId(""))),
    st.builds(m.WhoAreYou),
    st.builds(m.SeenAt, addresses),
    st.builds(m.NameTaken, names),
    st.builds(s.Syn, u63s, u63s, st.lists(known, max_size=10).map(tuple)),
    st.builds(s.Want, st.lists(known, max_size=10).map(tuple)),
    st.builds(s.Delta, u63s, u63s, u32s, u32s, u32s, u32s, st.lists(entries, max_size=5).map(tuple)),
)


@given(st.lists(messages, max_size=30), names)
def test_what_one_host_seals_another_one_reads_word_for_word(said: list[Message], name: HostId) -> None:
    sender = Sender(name, b"A" * 16, 3)
    batch = batches(said, size, budget(DATAGRAM_BYTES, name))[:1]
    datagram = sealer(sender).seal(batch[0] if batch else [])
    assert len(datagram) <= DATAGRAM_BYTES
    assert opener().open(datagram) == Opened(sender, tuple(batch[0]) if batch else (), 0)


def test_the_budget_leaves_no_more_unused_than_the_list_header() -> None:
    room = budget(DATAGRAM_BYTES, "a")
    said = [m.SyncSame()] * (room // size(m.SyncSame()))
    assert DATAGRAM_BYTES - 3 <= len(sealer().seal(said)) <= DATAGRAM_BYTES


# ---- who may not be heard ----


def test_a_host_without_the_key_is_not_heard_and_hears_nothing() -> None:
    foreign = sealer(keys=(FOREIGN_KEY,))
    assert reason(opener().open(foreign.seal([m.SyncSame()]))) == "unknown_key"
    assert reason(opener(keys=(FOREIGN_KEY,)).open(sealer().seal([m.SyncSame()]))) == "unknown_key"


def test_a_host_of_ours_that_speaks_another_version_is_told_from_noise() -> None:
    later = bytes([VERSION + 1])
    assert opener().open(later + sealer().seal([])[1:]) == Dropped("other_version", VERSION + 1)
    assert reason(opener().open(later + sealer(keys=(FOREIGN_KEY,)).seal([])[1:])) == "malformed"


def test_a_datagram_shows_neither_name_nor_label_nor_words() -> None:
    sender = Sender(HostId("secret-host"), b"A" * 16, 3)
    datagram = sealer(sender, label="secret-rack").seal([m.NameTaken(HostId("other-host"))])
    for word in (b"secret-host", b"secret-rack", b"other-host", b"A" * 16):
        assert word not in datagram


def test_another_cluster_under_the_same_key_is_not_heard() -> None:
    assert reason(opener(label="b").open(sealer(label="a").seal([m.SyncSame()]))) == "other_cluster"


def test_the_label_is_bound_by_the_seal_not_only_by_the_header() -> None:
    datagram = bytearray(sealer(label="a").seal([m.SyncSame()]))
    datagram[5:9] = sealer(label="b").seal([])[5:9]
    assert reason(opener(label="b").open(bytes(datagram))) == "unsealed"


def test_a_datagram_is_heard_once() -> None:
    ears, datagram = opener(), sealer().seal([m.SyncSame()])
    assert isinstance(ears.open(datagram), Opened)
    assert reason(ears.open(datagram)) == "replayed"


def test_datagrams_out_of_order_are_all_heard_within_the_window() -> None:
    mouth, ears = sealer(), opener()
    said = [mouth.seal([]) for _ in range(WINDOW)]
    assert all(isinstance(ears.open(datagram), Opened) for datagram in reversed(said))
    assert all(reason(ears.open(datagram)) == "replayed" for datagram in said)


def test_what_is_older_than_the_window_is_taken_for_a_replay() -> None:
    mouth, ears = sealer(), opener()
    said = [mouth.seal([]) for _ in range(WINDOW + 1)]
    assert isinstance(ears.open(said[-1]), Opened)
    assert reason(ears.open(said[0])) == "replayed"


def test_an_old_boot_is_refused_once_a_newer_one_was_seen() -> None:
    ears = opener()
    old, new = sealer(), sealer(Sender(A.host, A.uuid, A.boot + 1))
    before, after, late = old.seal([]), new.seal([]), old.seal([])
    assert isinstance(ears.open(before), Opened)
    assert isinstance(ears.open(after), Opened)
    assert ears.open(late) == Dropped("replayed", earlier=A, counter=2), "who sealed it is told, nothing else"
    assert ears.open(after) == Dropped("replayed")
    assert ears.open(late[:-1] + bytes([late[-1] ^ 1])) == Dropped("replayed"), "a forged one accuses nobody"


def test_an_old_boot_is_refused_also_after_a_restart_of_the_listener() -> None:
    ears = opener()
    ears.remember(A.identity, A.boot + 1)
    assert reason(ears.open(sealer().seal([]))) == "replayed"


def test_a_forged_boot_does_not_silence_the_real_sender() -> None:
    ears, mouth = opener(), sealer()
    forged = bytearray(mouth.seal([]))
    forged[17:25] = U63_MAX.to_bytes(8, "big")
    assert reason(ears.open(bytes(forged))) == "unsealed"
    assert isinstance(ears.open(mouth.seal([])), Opened)


def test_our_own_datagram_thrown_back_at_us_is_not_heard() -> None:
    assert reason(opener(me=A).open(sealer().seal([]))) == "reflected"


def test_an_oversized_datagram_is_dropped_unread() -> None:
    assert reason(opener().open(sealer().seal([m.SyncSame()] * DATAGRAM_BYTES_MAX))) == "oversized"
    assert reason(opener().open(bytes(65507))) == "oversized"


def test_a_name_that_is_not_the_senders_own_is_malformed() -> None:
    """The body says who it is from; the header holds a hash of that name."""

    class Liar(Sealer):
        def lie(self) -> bytes:
            self._me = Sender(B.host, B.uuid, A.boot)
            return self.seal([])

    liar = Liar(Keyring([KEY], "rack"), A, b"salt")
    assert reason(opener(me=Sender(HostId("c"), bytes(16), 1)).open(liar.lie())) == "malformed"


def test_a_message_of_a_later_version_is_skipped_and_the_others_are_heard() -> None:
    class Later(Message, frozen=True, array_like=True, tag=99):
        what: str

    found = opener().open(sealer().seal([m.Ack(1), Later("news"), m.Ack(2)]))
    assert found == Opened(A, (m.Ack(1), m.Ack(2)), 1)


def test_a_field_that_a_later_version_added_at_the_end_is_ignored() -> None:
    class Ack2(Message, frozen=True, array_like=True, tag=2):
        seq: int
        more: str

    assert opener().open(sealer().seal([Ack2(7, "x")])) == Opened(A, (m.Ack(7),), 0)


@pytest.mark.parametrize(
    "wrong",
    [
        m.NameTaken(HostId("Not A Name")),
        m.NameTaken(HostId("line-feed\n")),
        m.Ping(U32_MAX + 1, 1),
        m.Ping(-1, 1),
        m.Alive(HostId("a"), b"short", 1, 1, "10.0.0.1:1"),
        m.Alive(HostId("a"), bytes(16), 1, 1, "10.0.0.1:1 or elsewhere"),
        m.MemberRecord(HostId("a"), bytes(16), 1, 1, "10.0.0.1:1", 4, HostId("")),
        s.Delta(1, 1, 0, 1, 0, 0, (s.FactEntry("k", 1, bytes(257)),)),
        s.Delta(1, 1, 0, 1, 0, 0, tuple(s.FactEntry(f"k{n}", 1, b"") for n in range(41))),
        s.Delta(1, 1, 0, 1, 0, 0, (s.FactEntry("", 1, b""),)),
    ],
)
def test_a_message_out_of_bounds_is_skipped(wrong: Message) -> None:
    assert opener().open(sealer().seal([wrong])) == Opened(A, (), 1)


# ---- keys ----


def test_keys_rotate_without_a_gap() -> None:
    """Add to all, move to front on all, remove from all: at no step is a host deaf to another."""
    steps: list[tuple[bytes, ...]] = [(KEY,), (KEY, NEXT_KEY), (NEXT_KEY, KEY), (NEXT_KEY,)]
    for before, after in itertools.pairwise(steps):
        for mouth, ears in ((before, after), (after, before), (after, after)):
            sealed = sealer(keys=mouth).seal([m.SyncSame()])
            assert isinstance(opener(keys=ears).open(sealed), Opened), (mouth, ears)


def test_a_removed_key_opens_nothing_any_more() -> None:
    sealed = sealer().seal([])
    assert isinstance(opener(keys=(NEXT_KEY, KEY)).open(sealed), Opened)
    assert reason(opener(keys=(NEXT_KEY,)).open(sealed)) == "unknown_key"


@pytest.mark.parametrize("keys", [[], [b"short"], [KEY, KEY], [bytes([n]) * 32 for n in range(KEYS_MAX + 1)]])
def test_a_ring_of_wrong_keys_is_refused(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="key"):
        Keyring(keys, "rack")


def test_no_two_datagrams_share_key_and_nonce() -> None:
    """Datagrams differ within a boot, between senders, and when a boot counter was set back (another salt)."""
    mouths = [sealer(), sealer(B), sealer(salt=b"tlas"), sealer(Sender(A.host, A.uuid, 4))]
    headers = [mouth.seal([])[9:37] for mouth in mouths for _ in range(3)]
    assert len(set(headers)) == len(headers)


def test_a_key_id_is_no_part_of_its_key() -> None:
    assert key_id(KEY) not in KEY and len({key_id(KEY), key_id(NEXT_KEY), key_id(FOREIGN_KEY)}) == 3


# ---- the window, against the obvious model ----


@given(st.lists(st.integers(1, 3 * WINDOW), max_size=200))
def test_the_window_accepts_each_counter_once_and_none_behind_it(counters: list[int]) -> None:
    window, seen, newest = Window(1), set[int](), 0
    for counter in counters:
        expected = counter not in seen and counter > newest - WINDOW
        assert window.is_new(counter) == expected
        if expected:
            window.add(counter)
            seen.add(counter)
            newest = max(newest, counter)


# ---- nothing crashes it ----


@given(st.binary(max_size=2000))
def test_random_bytes_are_dropped_for_a_reason(datagram: bytes) -> None:
    assert isinstance(opener().open(datagram), Dropped)


@given(st.lists(messages, max_size=5), st.integers(0, 10_000), st.integers(1, 255))
def test_a_datagram_with_one_byte_changed_is_dropped(said: list[Message], place: int, change: int) -> None:
    datagram = bytearray(sealer().seal(said))
    datagram[place % len(datagram)] ^= change
    assert isinstance(opener().open(bytes(datagram)), Dropped)


@given(st.lists(messages, max_size=5), st.integers(0, 10_000))
def test_a_truncated_datagram_is_dropped(said: list[Message], length: int) -> None:
    datagram = sealer().seal(said)
    assert isinstance(opener().open(datagram[: length % len(datagram)]), Dropped)


def sealed_body(body: bytes) -> bytes:
    """Any bytes at all, under a valid seal: what a faulty member of the rack could send."""
    mouth = sealer()
    header = mouth.seal([])[:HEADER_BYTES]
    return header + mouth._cipher(key_id(KEY)).encrypt(header[-12:], body, header + b"rack")


@given(st.binary(max_size=400))
def test_a_mad_member_cannot_crash_the_body_decoder(body: bytes) -> None:
    found = opener().open(sealed_body(body))
    assert isinstance(found, Dropped | Opened)


@given(st.lists(messages, min_size=1, max_size=5), st.data())
def test_a_mad_member_cannot_crash_the_message_decoders(said: list[Message], data: st.DataObject) -> None:
    raw = [bytearray(msgspec.msgpack.encode(message)) for message in said]
    for one in raw:
        one[data.draw(st.integers(0, len(one) - 1))] = data.draw(st.integers(0, 255))
    body = msgspec.msgpack.encode((A.host, A.uuid, []))[:-1] + bytes([0x90 + len(raw)]) + b"".join(raw)
    found = opener().open(sealed_body(body))
    assert isinstance(found, Dropped | Opened)


def test_a_deeply_nested_body_is_malformed() -> None:
    found = opener().open(sealed_body(b"\x93\xa1a\xc4\x10" + A.uuid + b"\x91" * 800 + b"\xc0"))
    assert found in (Dropped("malformed"), Opened(A, (), 1))


def test_header_and_tag_are_what_the_essay_says() -> None:
    assert (HEADER_BYTES, TAG_BYTES) == (37, 16)
