"""Every size at which the handling of a tensor changes (docs/design/SIZES.md): listed, walked by ranks."""

import ast
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.healing.neighbours import HealedRank
from covey.job.job_state import ScriptState, begun
from covey.job.tensors import TensorClient
from covey.tensors.numbers.blocks import Sizes
from covey.tensors.numbers.moments import AT_A_TIME
from covey.tensors.numbers.pieces import PIECE
from covey.tensors.numbers.tensor_wire import PART_BYTES
from covey.tensors.numbers.updates import SGD
from covey.tensors.same_host.lent_rounds import LEAST_BYTES as LENT_BYTES
from covey.tensors.same_host.lent_rounds import SAME_ROUNDS
from covey.tensors.same_host.shared_rounds import SMALL_BYTES
from tests.covey.test_healing import JOB, HealingGang, Lost, Rank
from tests.covey.test_host_rounds import gang
from tests.plugins.aggregator.loopback import AggdThread

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/design/SIZES.md").read_text()
LISTED = {
    cells[1].strip(" `"): int(cells[2].replace(",", ""))
    for cells in (line.split("|") for line in PAGE.splitlines() if line.startswith("| `"))
}
MODULES = (
    *("frameworks/torch/gradients", "healing/healing", "healing/held_state", "healing/machine"),
    *("healing/own_gather", "healing/owns", "healing/state_pieces", "healing/taking_over", "job/job_state"),
    *("job/tensors", "tensors/aggregator/aggregator_rounds", "tensors/aggregator/block_rounds"),
    *("tensors/aggregator/early_copy", "tensors/aggregator/host_rounds", "tensors/aggregator/link"),
    *("tensors/direct/connection", "tensors/direct/local_link", "tensors/direct/owned_table", "tensors/direct/owner"),
    *("tensors/owner/memory", "tensors/owner/part_additions", "tensors/owner/rank_frames", "tensors/owner/sums"),
    *("tensors/aggregator/packed_rounds", "tensors/aggregator/rounds", "tensors/numbers/blocks"),
    *("tensors/numbers/moments", "tensors/numbers/pieces", "tensors/numbers/spoken"),
    *("tensors/numbers/tensor_wire", "tensors/numbers/types", "tensors/same_host/huge_pages"),
    *("tensors/same_host/layout", "tensors/same_host/lent_rounds", "tensors/same_host/memory"),
    *("tensors/same_host/shared_rounds", "wire/page_pipe", "wire/splicing"),
)
ON_THE_WAY = [
    *(ROOT / f"covey/{name}.py" for name in MODULES),
    *sorted((ROOT / "plugins/aggregator/datapath").rglob("*.py")),
]
UNLIKE = {"PIECE", "ROOM", "AT_A_TIME"}
"""Sizes whose names have no BYTES."""
NO_SIZES = {"SECRET_BYTES", "SUM_BYTES", "_HEADER_BYTES"}
"""Names with BYTES that are sizes of fields, not of tensors or messages."""


def number(node: ast.expr) -> int | None:
    """The value of an expression such as `64 << 10`; None: it depends on something else, which is listed."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(ast.Constant(value=int(left)), ast.LShift(), ast.Constant(value=int(right))):
            return left << right
        case _:
            return None


def sizes_in(path: Path) -> dict[str, int]:
    """Module-level numbers whose names say that they are sizes, as they are written in the source."""
    module = str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    assigned = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    named = {target.id: node.value for node in assigned for target in node.targets if isinstance(target, ast.Name)}
    sizes = {name: number(value) for name, value in named.items() if "BYTES" in name or name in UNLIKE}
    return {f"{module}.{name}": size for name, size in sizes.items() if size is not None and name not in NO_SIZES}


def test_the_page_lists_every_size_and_says_what_it_is() -> None:
    """A new or changed size needs a line in docs/design/SIZES.md, and a tensor on both sides of it here."""
    known = {name: size for path in ON_THE_WAY for name, size in sizes_in(path).items()}
    known |= {
        f"covey.tensors.numbers.blocks.Sizes.{name}": getattr(Sizes(), name)
        for name in Sizes._fields
        if name != "aligned"
    }
    assert known == LISTED


def around(*edges: int, element: int = 4) -> list[int]:
    """Numbers of elements of tensors just below each of these sizes, equal to it, and just above."""
    return sorted({edge // element + more for edge in edges for more in (-1, 0, 1)})


FAR = around(
    *(4096, 16 << 10, Sizes().elsewhere_bytes, 2 * Sizes().least_bytes, 3 * Sizes().least_bytes, PIECE * 4),
    *(PART_BYTES, 3 * Sizes().most_bytes),
)


PLACES = np.arange((LENT_BYTES >> 2) + 2, dtype=np.float32) % 251


def value(rank: int, step: int, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """An array of whole numbers, so that sums are exact in any order."""
    return PLACES[:count] + np.float32(rank * 37 + step)


class Walker(Rank):
    """A rank whose state and gradients have all sizes of `FAR`."""

    def _train(self) -> bytes:
        w = {f"w{count}": np.zeros(count, np.float32) for count in FAR}

        def load(arrays: dict[str, Any], own: Any) -> None:
            for name, array in w.items():
                array[:] = arrays[name]

        me = HealedRank(self.rank, self.client.world_size, self.incarnation)
        state = begun(self.client, me, ScriptState(lambda: w, load, None))
        self.has_state = True
        for step in state.steps(self.gang.steps):
            handles = []
            for at, count in enumerate(FAR):
                handles.append(self.client.push(f"g{count}", value(self.rank, step, count)))
                if at == len(FAR) // 2:
                    self._passes(step, "half way")
            found = [handle.wait() for handle in handles]  # before this no state may change
            for count, each in zip(FAR, found, strict=True):
                w[f"w{count}"] += each
        return b"".join(array.tobytes() for array in w.values())


@pytest.mark.parametrize("tables", [1, 3])
def test_a_lost_rank_goes_on_to_the_same_bits_with_tensors_of_every_size(tmp_path: Path, tables: int) -> None:
    """The successor has the same number of tables as the others, on any host; its state takes many pieces."""
    job = HealingGang(tmp_path / "g", 2, tables=tables, steps=3)
    job.now = {rank: Walker(job, rank, 0) for rank in range(2)}
    for rank in job.now.values():
        rank.client._far.part_bytes = PART_BYTES
    job.now[1].lost_at = lambda at, here: (at, here) == (1, "half way")
    for rank in job.now.values():
        rank.start()
    job.now[1].thread.join(60)
    assert isinstance(job.now[1].error, Lost)
    job.now[1].kill()
    job.now[1] = Walker(job, 1, 1)
    job.now[1].client._far.part_bytes = PART_BYTES
    job.now[1].start()
    right = [sum(value(rank, step, count) for rank in range(2) for step in range(3)) for count in FAR]
    assert job.end() == [b"".join(np.asarray(each).tobytes() for each in right)] * 2


HERE = around(4096, SMALL_BYTES, PIECE * 4, 2 << 20)


@pytest.mark.parametrize(
    ("hosts", "sizes", "rounds"), [((2,), [*HERE, *around(LENT_BYTES)], SAME_ROUNDS + 1), ((2, 1), HERE, 2)]
)
def test_ranks_of_one_host_have_the_sums_of_every_size(
    tmp_path: Path, hosts: tuple[int, ...], sizes: list[int], rounds: int
) -> None:
    """The ranks add in memory that they share; large tensors are lent once they came from one address for a while."""
    ranks = sum(hosts)
    with gang(tmp_path, *hosts) as job:
        job.serve()
        job.share()

        def script(rank: int, client: TensorClient) -> None:
            given = {count: np.empty(count, np.float32) for count in sizes}
            for step in range(rounds):
                for count, array in given.items():
                    array[:] = value(rank, step, count)
                    found = client.push_pull(f"g{count}", array)
                    right = ranks * PLACES[:count] + np.float32(sum(other * 37 + step for other in range(ranks)))
                    assert np.array_equal(found, right), (rank, step, count)

        job.play(script, 90.0)


def test_an_aggregator_of_the_same_host_has_the_sums_of_every_size(tmp_path: Path) -> None:
    """Ranks use a unix socket, and send large tensors as pages."""
    owner = AggdThread(tmp_path, near="near.sock")
    clients = [TensorClient(JOB, rank, 2, lambda epoch, why, table: None) for rank in range(2)]
    at = owner.serve(JOB, 1 << 32, 2)
    assert at.near
    wrong: list[tuple[int, int]] = []

    def run(rank: int) -> None:
        clients[rank].moved(at)
        for count in FAR:
            found = clients[rank].push_pull(f"g{count}", value(rank, 0, count))
            if not np.array_equal(found, value(0, 0, count) + value(1, 0, count)):
                wrong.append((rank, count))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for client in clients:
        client.close()
    owner.finish()
    assert not wrong


def test_moments_of_every_size_are_gathered_whole(tmp_path: Path) -> None:
    with gang(tmp_path, 1, 1) as job:
        job.serve()
        for client in job.clients:
            client.memory_is(None)

        def script(rank: int, client: TensorClient) -> None:
            for count in around(AT_A_TIME * 4):
                client.model(f"w{count}", np.zeros(count, np.float32), update=SGD(1.0, momentum=0.5))
                client.push_pull(f"w{count}", value(rank, 0, count))
                (velocity,) = client.moments(f"w{count}").arrays
                assert np.array_equal(velocity, value(0, 0, count) + value(1, 0, count)), count

        job.play(script, 90.0)
