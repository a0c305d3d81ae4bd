"""Ranks that exchange tensors over RDMA (SoftRoCE), in the guest (`make rdma`). Not in the gate, by its name.

TCP goes over the loopback device and queue pairs over `va`, so that the one can be cut without the other.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from covey.ports.verbs import Verbs
from covey.tensors.aggregator import aggregator_rounds, link
from covey.tensors.direct import connection, owner
from covey.tensors.rdma import tensor_pair
from covey.tensors.rdma.tensor_pair import LOCKED_BYTES
from covey.verbs.pyverbs_port import PyVerbs
from tests.covey import test_direct
from tests.covey.test_direct import Ranks, is_reference, train
from tests.covey.test_tensors import until

ROUNDS = 8
PATIENCE = 20.0
"""Factor of every time that an answer may take: the guest's processor is emulated, by a machine that may be busy."""


def patient() -> None:
    """Give each answer more time, in this process."""
    for module in (link, connection, owner, tensor_pair, aggregator_rounds):
        for name in ("CONNECT_S", "DEAD_S", "HANDSHAKE_S", "PROBE_S", "ANSWER_S"):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) * PATIENCE)
    test_direct.WITHIN_S = 400.0


SCRIPT = f"""
import os, sys, time
from tests.guest.tensors_by_rdma import patient
from covey.verbs.pyverbs_port import PyVerbs
from tests.covey.test_direct import Ranks, is_reference, train

patient()

def ranks():
    return Ranks(3, verbs=[PyVerbs() for _ in range(3)])

def trained(ranks):
    ranks.end(train(ranks, {ROUNDS}))
    assert is_reference(ranks, {ROUNDS}) and not ranks.whys, ranks.whys
    return [client.owner.now() for client in ranks.clients]
"""
FORKS = f"""{SCRIPT}
ranks, children = ranks(), []
os.register_at_fork(after_in_child=lambda: [client.abandon() for client in ranks.clients])
threads = train(ranks, {ROUNDS}, 0.2)
while len(ranks.results) < 3:
    time.sleep(0.01)
for _ in range(3):
    child = os.fork()
    if not child:
        sys.exit(0)  # as a script's child ends that uses os.fork: everything is freed
    children.append(child)
for child in children:
    print(os.waitpid(child, 0)[1])
ranks.end(threads)
now = [client.owner.now() for client in ranks.clients]
print([each.pairs for each in now], is_reference(ranks, {ROUNDS}), ranks.whys)
ranks.close()
"""
LOCKS = f"""{SCRIPT}
import resource
os.setgid(1000)
os.setuid(1000)
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({LOCKED_BYTES} * 5, {LOCKED_BYTES} * 5))
ranks = ranks()
now = trained(ranks)
print(sum(each.pairs for each in now), *sorted({{each.no_rdma for each in now}}), sep="|")
ranks.close()
"""


@pytest.fixture(autouse=True, scope="module")
def patience() -> None:
    patient()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    verbs: Sequence[Verbs] = [PyVerbs() for _ in range(3)]
    made = Ranks(3, verbs=verbs)
    yield made
    made.close()


def pairs(ranks: Ranks) -> list[int]:
    return [client.owner.now().pairs for client in ranks.clients]


def run(script: str) -> str:
    done = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def registered() -> int:
    """Count of memory regions and queue pairs of all processes, as the kernel has them."""
    found = [subprocess.run(("rdma", "resource", "show", kind), capture_output=True, text=True, check=True).stdout
             for kind in ("mr", "qp")]  # fmt: skip
    return sum(line.count(" pid ") for each in found for line in each.splitlines())


@pytest.mark.cpu_seconds(0)
def test_large_parts_go_over_rdma_with_the_bits_of_tcp(ranks: Ranks) -> None:
    ranks.end(train(ranks, ROUNDS))
    assert is_reference(ranks, ROUNDS) and not ranks.whys
    assert pairs(ranks) == [2, 2, 2] and [client.owner.now().bad_frames for client in ranks.clients] == [0, 0, 0]
    assert registered() >= 2 * 6 * 2
    ranks.close()
    until(lambda: registered() == 0, 100.0)


@pytest.mark.cpu_seconds(0)
def test_many_parts_at_once_are_added(ranks: Ranks) -> None:
    """Twelve parts for each owner: each slot is used three times in a round."""

    def script(rank: int, client: object) -> None:
        for round in range(3):
            found = ranks.clients[rank].push_pull("g", np.full((9 << 20,), rank + round, np.float32))
            assert (found == 3 + 3 * round).all()

    ranks.end(ranks.start(script))
    assert pairs(ranks) == [2, 2, 2] and not ranks.whys


@pytest.mark.cpu_seconds(0)
def test_a_network_of_the_device_that_fails_in_a_round_leaves_tcp_and_the_same_bits(ranks: Ranks) -> None:
    threads = train(ranks, 3 * ROUNDS, 0.1)
    until(lambda: len(ranks.results) == 3, 300.0)
    assert pairs(ranks) == [2, 2, 2]
    subprocess.run(("ip", "link", "set", "va", "down"), check=True)
    try:
        ranks.end(threads)
        assert is_reference(ranks, 3 * ROUNDS) and pairs(ranks) == [0, 0, 0]
        whys = {client.owner.now().no_rdma for client in ranks.clients}
        assert all(whys), whys
        print(whys)
    finally:
        subprocess.run(("ip", "link", "set", "va", "up"), check=True)


def is_active() -> bool:
    return not PyVerbs().look(0).why


@pytest.mark.cpu_seconds(0)
def test_children_that_end_take_no_queue_pair_along() -> None:
    """What they free is the parent's."""
    until(is_active)
    assert run(FORKS) == "0\n0\n0\n[2, 2, 2] True []"


@pytest.mark.cpu_seconds(0)
def test_memory_that_the_kernel_does_not_lock_leaves_tcp() -> None:
    """A user's limit that suffices for two of six connections, of which both ends are in one process here."""
    until(is_active)
    os.chmod("/dev/infiniband/uverbs0", 0o666)
    count, *whys = run(LOCKS).split("|")
    assert 0 < int(count) < 6 and any("refuses to register" in why for why in whys), (count, whys)
