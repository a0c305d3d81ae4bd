"""Arrays in remote memory: scripts in processes of their own over a real volume's process, its pager and a lender."""

import os
import signal
import time

import pytest

from covey.core.units import MIB
from tests.covey.live_volume import STRANGER, LiveVolume, faults_are_possible, heard, scripted, tell, until
from tests.families import in_gate

pytestmark = [
    pytest.mark.rack,
    pytest.mark.skipif(not faults_are_possible(), reason="this kernel gives no userfaultfd"),
]

FUZZ = """
rng = numpy.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
with RemoteArray(PATH, 5_000_003, "uint8", local_budget="1 MiB", offset=8192) as array:
    assert array.way == "faults", array.way
    shadow = numpy.zeros(5_000_003, "uint8")
    for _ in range(400):
        at = int(rng.integers(0, len(shadow)))
        size = min(int(rng.integers(1, 300_000)), len(shadow) - at)
        if rng.random() < 0.5:
            array.array[at : at + size] = shadow[at : at + size] = rng.integers(0, 256, size, "uint8")
        else:
            assert (array.array[at : at + size] == shadow[at : at + size]).all()
        if rng.random() < 0.02:
            array.flush()
    counts = array.counts()
    assert counts["local"] <= 16, counts
with RemoteArray(PATH, 5_000_003, "uint8", local_budget="1 MiB", offset=8192, mode="r") as again:
    assert (again.array == shadow).all()
with RemoteMemory.at(PATH) as memory:
    assert memory.read(8192, 5_000_003) == shadow.tobytes()
    assert memory.read(0, 8192) == bytes(8192)
print("good", counts["saved"])
"""


def test_whatever_is_written_is_read_back_and_no_more_is_local_than_allowed() -> None:
    with LiveVolume() as volume:
        assert volume.run(FUZZ).startswith("good")


HELD = """
array = RemoteArray(PATH, {words}, "uint32", local_budget="{budget}")
x = array.array
x[:] = numpy.arange(len(x), dtype="uint32")
print("written", flush=True)
sys.stdin.readline()
"""
CHECKED = """
with RemoteArray(PATH, {words}, "uint32", local_budget="1 MiB", mode="r") as array:
    assert (array.array == numpy.arange({words}, dtype="uint32")).all()
print("all there")
"""
WORDS = 2 * MIB


@pytest.mark.parametrize("killed", in_gate(1, [True, False]), ids=["killed", "without close"])
def test_a_script_that_ends_loses_nothing_that_it_wrote(killed: bool) -> None:
    with LiveVolume() as volume:
        with scripted(volume, HELD.format(words=WORDS, budget="2 MiB")) as script:
            assert heard(script) == "written"
            script.kill() if killed else tell(script)
            assert script.wait(20) == (-signal.SIGKILL if killed else 0)
            until(lambda: len(volume.pagers()) == 1)  # its pager has brought it home
        assert volume.run(CHECKED.format(words=WORDS)) == "all there\n"


AGAIN = (
    HELD
    + """
assert (x == numpy.arange(len(x), dtype="uint32")).all()
x += 1
assert (x == numpy.arange(1, len(x) + 1, dtype="uint32")).all()
x -= 1
array.close()
print("closed", flush=True)
"""
)


@pytest.mark.parametrize("dies", in_gate(1, ["pager", "vold", "slabd"]))
def test_a_process_behind_an_array_dies_and_nothing_is_lost(dies: str) -> None:
    """The script notices nothing of it."""
    with LiveVolume() as volume:
        with scripted(volume, AGAIN.format(words=WORDS, budget="2 MiB")) as script:
            assert heard(script) == "written"
            keeper, pager = volume.pagers()
            if dies == "pager":
                os.kill(pager, signal.SIGKILL)
                tell(script)
            else:
                volume.kill(dies)
                tell(script)
                time.sleep(0.5)
                volume.start_vold() if dies == "vold" else volume.start_slabd()
            assert heard(script) == "closed"
            assert script.wait(20) == 0
            assert keeper in volume.pagers() and (dies != "pager" or pager not in volume.pagers())
        assert volume.run(CHECKED.format(words=WORDS)) == "all there\n"


BUSY = """
array = RemoteArray(PATH, {words}, "uint32", local_budget="1 MiB")
x = array.array
expected = numpy.zeros({words}, "uint32")
print("begun", flush=True)
rng = numpy.random.default_rng(3)
until = time.monotonic() + 6
while time.monotonic() < until:
    at = int(rng.integers(0, len(x) - 70_000))
    assert (x[at : at + 70_000] == expected[at : at + 70_000]).all()
    x[at : at + 70_000] += 1
    expected[at : at + 70_000] += 1
assert (x == expected).all()
array.close()
with RemoteArray(PATH, {words}, "uint32", local_budget="1 MiB", mode="r") as again:
    assert (again.array == expected).all()
print("good", flush=True)
"""


@pytest.mark.long
def test_pagers_killed_in_the_middle_of_faults_cost_time_and_no_byte() -> None:
    """Four pagers are killed while chunks are put in place and written back."""
    with LiveVolume() as volume, scripted(volume, BUSY.format(words=WORDS)) as script:
        assert heard(script) == "begun"
        for _ in range(4):
            time.sleep(0.8)
            os.kill(volume.pagers()[-1], signal.SIGKILL)
        assert heard(script) == "good"


def test_without_pager_and_keeper_the_script_ends_by_sigbus_and_says_where() -> None:
    with LiveVolume() as volume, scripted(volume, AGAIN.format(words=WORDS, budget="2 MiB")) as script:
        assert heard(script) == "written"
        for pid in volume.pagers():
            os.kill(pid, signal.SIGKILL)
        assert script.wait(20) == -signal.SIGBUS
        assert script.stderr is not None
        assert "Fatal Python error: Bus error" in script.stderr.read()


def test_two_arrays_on_one_volume_and_a_second_writer_of_the_same_bytes() -> None:
    said = """
one = RemoteArray(PATH, 100_000, "uint16", local_budget="1 MiB")
two = RemoteArray(PATH, 100_000, "uint16", local_budget="1 MiB", offset=200_704)
one.array[:], two.array[:] = 1, 2
assert (one.array == 1).all() and (two.array == 2).all()
try:
    RemoteArray(PATH, 10, local_budget="1 MiB", offset=4096)
except RemoteMemoryError as error:
    print(error)
one.flush()
with RemoteArray(PATH, 100_000, "uint16", local_budget="1 MiB", mode="r") as reader:
    assert (reader.array == 1).all()
    try:
        reader.array[0] = 3
    except ValueError as error:
        print(error)
one.close()
with RemoteArray(PATH, 10, local_budget="1 MiB", offset=4096):
    pass
two.close()
"""
    with LiveVolume() as volume:
        refused, read_only = volume.run(said).splitlines()
    assert "another array writes to bytes 4096 to 8192" in refused
    assert "mode='r'" in refused
    assert "read-only" in read_only


def test_a_child_after_fork_is_told_to_open_it_again_and_cannot_read_zeros() -> None:
    said = """
import warnings
array = RemoteArray(PATH, 1_000_000, "uint8", local_budget="1 MiB")
array.array[:] = 5
array.flush()
view = array.array
for touch in (False, True):
    child = os.fork()
    if child == 0:
        if touch:
            print("zeros" if view[500_000] == 0 else "something", flush=True)
        try:
            array.flush()
        except RemoteMemoryError as error:
            print(error, flush=True)
        with RemoteArray(PATH, 1_000_000, "uint8", local_budget="1 MiB", mode="r") as again:
            assert (again.array == 5).all()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
view[7] = 6
assert array.array[7] == 6
array.close()
"""
    with LiveVolume() as volume:
        told, ended, touched = volume.run(said).splitlines()
    assert "a forked process does not get its memory" in told
    assert (ended, touched) == ("0", str(-signal.SIGSEGV))


def test_a_budget_or_chunk_that_cannot_be_is_refused_in_words() -> None:
    said = """
for wrong in (dict(local_budget="256 KiB"), dict(chunk=65536 * 3), dict(chunk=2048), dict(chunk="2 MiB"),
              dict(offset=100), dict(offset=40 * 2**20), dict(mode="w"), dict(dtype=object)):
    try:
        RemoteArray(PATH, 1000, **{"local_budget": "1 MiB", **wrong})
    except (RemoteMemoryError, ValueError) as error:
        print(error)
with RemoteArray(PATH, 1000, local_budget=8 * 4096, chunk=4096) as array:
    array.array[:] = 1
"""
    with LiveVolume() as volume:
        lines = volume.run(said).splitlines()
    assert len(lines) == 8
    assert "at least 8 chunks of 65536 are needed" in lines[0]
    assert "chunks of 196608 bytes" in lines[1]
    assert "multiple of its page" in lines[4]


def test_pin_prefetch_and_advice() -> None:
    said = """
rows = RemoteArray(PATH, (256, 16384), "float32", local_budget="2 MiB")   # a row is a chunk
rows.array[:] = numpy.arange(256)[:, None]
rows.advise("random")
rows.pin(slice(10, 14))
for row in range(100, 200):
    assert rows.array[row, 5] == row
before = rows.counts()["touched"]
assert (rows.array[10:14] == numpy.arange(10, 14)[:, None]).all()
assert rows.counts()["touched"] == before, "pinned rows are here"
try:
    rows.pin(slice(0, 200))
except RemoteMemoryError as error:
    print(error)
rows.unpin()
rows.prefetch(range(50, 58))
time.sleep(1)
before = rows.counts()["touched"]
assert (rows.array[50:58] == numpy.arange(50, 58)[:, None]).all()
assert rows.counts()["touched"] == before, "prefetched rows are here"
rows.advise("dontneed")
time.sleep(1)
assert rows.counts()["local"] == 0
rows.advise("sequential")
before = rows.counts()["ahead"]
assert (rows.array[:, 0] == numpy.arange(256)).all()
counts = rows.counts()
assert counts["ahead"] - before > 200, counts  # whether they are here in time is for the benchmark
rows.close()
"""
    with LiveVolume() as volume:
        assert "more than the local budget" in volume.run(said)


def test_a_system_call_into_rows_that_are_not_here_works_where_it_is_permitted(tmp_path: object) -> None:
    said = """
array = RemoteArray(PATH, 4_000_000, "uint8", local_budget="1 MiB")
array.array[:] = 9
with open("/proc/self/mem", "rb") as nothing:
    pass
read, write = os.pipe()
if array.way == "faults":
    assert os.write(write, array.array[1_000_000:1_000_100].data) == 100
    assert os.read(read, 100) == bytes([9]) * 100
array.close()
"""
    with LiveVolume() as volume:
        assert volume.run(said) == ""


def test_views_outlive_close_without_reading_anything_wrong() -> None:
    said = """
array = RemoteArray(PATH, 1_000_000, "uint8", local_budget="1 MiB")
view = array.array
view[:] = 3
array.close()
try:
    array.array
except ValueError as error:
    print(error, flush=True)
view[0]
"""
    with LiveVolume() as volume:
        script = volume.script(said)
        text, _ = script.communicate(timeout=30)
        assert script.returncode == -signal.SIGSEGV
        assert "closed here" in text


# ---- whose volume it is ----------------------------------------------------------------------------------------------

OWN = """
with RemoteArray(PATH, 1_000_000, "uint8", local_budget="1 MiB") as array:
    print(os.geteuid(), array.way, flush=True)
    array.array[:] = 7
    assert (array.array == 7).all()
with RemoteMemory.at(PATH) as memory:
    assert memory.read(0, 10) == bytes([7]) * 10
"""
TRIED = """
try:
    RemoteMemory.at(PATH)
except RemoteMemoryError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_volume_is_open_to_its_user_and_closed_to_others() -> None:
    with LiveVolume(uid=STRANGER) as volume:
        uid, _, way = volume.run(OWN, uid=STRANGER).partition(" ")
        assert uid == str(STRANGER)
        assert way.startswith("faults")
        assert os.stat(volume.path).st_uid == STRANGER
        assert os.stat(volume.path).st_mode & 0o077 == 0
        os.chmod(volume.path, 0o666)  # whoever gets past the file's mode meets the kernel's word
        refused = volume.run(TRIED, uid=STRANGER + 1)
        assert f"belongs to another user (uid {STRANGER}), and this process has uid {STRANGER + 1}" in refused
        os.chmod(f"{volume.run_dir}/arr-data.sock", 0o666)
        lied = f"""
import covey.arrays.faulted_memory as faulted, socket
from covey.arrays.remote_memory import RemoteMemory
from covey.wire import job as wire
memory = RemoteMemory(wire.VolumeAt("data", 0, 0, PATH, bytes(32)), "")
memory._link.page_bytes, memory._link.size_bytes = 4096, {volume.size}
try:
    RemoteArray(memory, 1000, local_budget="1 MiB")
except RemoteMemoryError as error:
    print(error)
"""
        assert "belongs to another user" in volume.run(lied, uid=STRANGER + 1)


# ---- without userfaultfd ---------------------------------------------------------------------------------------------

EXPLICIT = """
from covey.kernel import userfault
if len(sys.argv) > 1 or os.environ.get("FORBID"):
    def refused():
        raise PermissionError(1, "userfaultfd: Operation not permitted")
    userfault.opened = refused
with RemoteArray(PATH, (1000, 333), "float32", local_budget="1 MiB") as array:
    print(array.way, flush=True)
    rng = numpy.random.default_rng(1)
    shadow = numpy.zeros((1000, 333), "float32")
    for _ in range(60):
        first = int(rng.integers(0, 900)); count = int(rng.integers(1, 100))
        rows = rng.random((count, 333), "float32")
        array.write_from(rows, first); shadow[first : first + count] = rows
        found = numpy.empty((50, 333), "float32")
        first = int(rng.integers(0, 950)); array.read_into(found, first)
        assert (found == shadow[first : first + 50]).all()
    array[3] = 2.5; shadow[3] = 2.5
    assert (array[3] == 2.5).all() and (array[-1] == shadow[-1]).all() and (array[:] == shadow).all()
    assert (numpy.asarray(array) == shadow).all()
    array.prefetch(); array.pin(slice(0, 10)); array.advise("random"); array.flush()
    if array.way.startswith("explicit"):
        try:
            array.array
        except RemoteMemoryError as error:
            print(error)
with RemoteArray(PATH, (1000, 333), "float32", local_budget="1 MiB", mode="r") as array:
    assert (array[:] == shadow).all()
"""


@pytest.mark.parametrize("forbid", ["", "1"])
def test_the_same_script_runs_both_ways_and_is_told_which(forbid: str) -> None:
    with LiveVolume() as volume:
        said = volume.run(EXPLICIT, FORBID=forbid).splitlines()
    if forbid:
        assert said[0] == "explicit: userfaultfd: Operation not permitted"
        assert "use read_into, write_from" in said[1]
    else:
        assert said == ["faults"]
