"""Garbage on jobs.sock: its senders are shut out, and the log is not theirs to fill."""

from hypothesis import given
from hypothesis import strategies as st

from agent.ports.network.protocol_error_limit import FORGIVE_S, LINES_MAX, OFFENCES_MAX, PEERS_MAX, ProtocolErrorLimit


def test_a_peer_is_shut_out_after_a_few_offences_until_it_kept_quiet_for_a_while() -> None:
    offences = ProtocolErrorLimit()
    for n in range(OFFENCES_MAX):
        assert not offences.shut_out("a", n)
        offences.add("a", n)
    assert offences.shut_out("a", 10.0) and not offences.shut_out("b", 10.0)
    assert offences.shut_out("a", 10.0 + FORGIVE_S - 1), "it came back too early, and that counts"
    assert offences.shut_out("a", 10.0 + FORGIVE_S + 1)
    assert not offences.shut_out("a", 10.0 + 2 * FORGIVE_S + 1)


def test_offences_far_apart_do_not_add_up() -> None:
    offences = ProtocolErrorLimit()
    for n in range(3 * OFFENCES_MAX):
        offences.add("a", n * FORGIVE_S)
    assert not offences.shut_out("a", 3 * OFFENCES_MAX * FORGIVE_S)


@given(st.lists(st.tuples(st.integers(0, 400), st.floats(0, 5)), max_size=600))
def test_for_any_number_of_peers_lines_and_memory_are_bounded_and_offences_counted(
    story: list[tuple[int, float]],
) -> None:
    offences, now_s, lines, told = ProtocolErrorLimit(), 0.0, 0, 0
    for peer, pause_s in story:
        now_s += pause_s
        unsaid = offences.add(f"unix:pid {peer}", now_s)
        if unsaid is not None:
            lines, told = lines + 1, told + 1 + unsaid
    assert lines <= LINES_MAX * (now_s // FORGIVE_S + 1)
    assert told + offences._unsaid == len(story)
    assert len(offences._peers) <= PEERS_MAX
