"""The network card under an address, on this machine."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agent.ports.network import card
from agent.ports.network.card import card_now
from covey.ports.probes import CardNow

ROOT = Path(__file__).parents[3]


def test_the_loopback_interface_is_found_and_its_bytes_grow_with_what_is_sent() -> None:
    before = card_now("127.0.0.1")
    assert before is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        one.sendto(bytes(10_000), one.getsockname())
        one.recv(20_000)
    after = card_now("127.0.0.1")
    assert after is not None and after.name == before.name
    assert after.sent_bytes - before.sent_bytes >= 10_000 and after.received_bytes - before.received_bytes >= 10_000


def test_an_address_of_no_interface_and_no_address_have_no_card() -> None:
    assert card_now("203.0.113.7") is None and card_now("gpu1") is None and card_now("") is None
    assert card_now("2001:db8::7") is None


def test_counters_that_cannot_be_read_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "DEVICES", Path("/nowhere"))
    assert card_now("127.0.0.1") is None


def test_each_address_of_an_interface_leads_to_it_and_the_loopback_is_no_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A service's address is often kept at the loopback, where no traffic of its card is counted."""
    v4 = {"10.9.0.1": "lo", "10.9.0.2": "eth0", "10.9.0.3": "eth0", "10.9.9.9": "lo"}
    listed = [(name, socket.inet_aton(address)) for address, name in v4.items()]
    monkeypatch.setattr(card, "_addresses_4", lambda: [*listed, ("eth0", socket.inet_aton("10.9.0.1"))])
    rows = {"2001:db8::5": "lo", "2001:db8::6": "eth0", "::1": "lo"}
    (tmp_path / "v6").write_text(
        "".join(f"{socket.inet_pton(socket.AF_INET6, each).hex()} 02 40 00 80 {name}\n" for each, name in rows.items())
    )
    monkeypatch.setattr(card, "ADDRESSES_6", tmp_path / "v6")
    (tmp_path / "dev").write_text("Inter-|\n" + "".join(f"  {name}: {' 7' * 16}\n" for name in ("lo", "eth0")))
    monkeypatch.setattr(card, "DEVICES", tmp_path / "dev")
    found = {address: card_now(address) for address in (*v4, *rows, "127.0.0.7")}
    eth0, lo = CardNow("eth0", 7, 7), CardNow("lo", 7, 7)
    assert {address for address, at in found.items() if at == eth0} == {
        *("10.9.0.1", "10.9.0.2", "10.9.0.3", "2001:db8::6")
    }
    assert {address for address, at in found.items() if at == lo} == {"::1", "127.0.0.7"}
    assert {address for address, at in found.items() if at is None} == {"10.9.9.9", "2001:db8::5"}


SHOW = "from agent.ports.network.card import card_now; print(*(card_now(f'10.9.0.{n}').name for n in (1, 2, 3)))"
NAMESPACE = """
ip link add d0 type veth peer name d1 && ip link set d0 up || exit 9
ip address add 10.9.0.1/24 dev d0 && ip address add 10.9.0.2/24 dev d0 || exit 9
ip address add 10.9.0.3/24 dev d0 label d0:vip || exit 9
exec "$0" -c "$1"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace")
@pytest.mark.skipif(not (shutil.which("unshare") and shutil.which("ip")), reason="next: apt install iproute2")
def test_the_kernel_lists_every_address_of_an_interface() -> None:
    command = ["unshare", "--net", "sh", "-c", NAMESPACE, sys.executable, SHOW]
    said = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT, check=False)
    if said.returncode in (1, 9) and "Traceback" not in said.stderr:
        pytest.skip(f"no interfaces can be made here: {said.stderr.strip()[-200:]}")
    assert said.stdout.split() == ["d0", "d0", "d0"], said.stderr
