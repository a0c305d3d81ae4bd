"""Arrays in remote memory whose script, pager or reader ends at the worst moment, or keeps only a view."""

import os
import random
import signal
import time

import pytest

from covey.core.units import MIB
from tests.covey.live_volume import LiveVolume, faults_are_possible, heard, scripted, tell, until

pytestmark = [
    pytest.mark.rack,
    pytest.mark.skipif(not faults_are_possible(), reason="this kernel gives no userfaultfd"),
]
WORDS = 2 * MIB

FILLED = """
with RemoteArray(PATH, {words}, "uint32", local_budget="2 MiB") as array:
    array.array[:] = numpy.arange(1, {words} + 1, dtype="uint32")
"""
WRITES = """
array = RemoteArray(PATH, {words}, "uint32", local_budget="1 MiB")
x = array.array
print("begun", flush=True)
rng = numpy.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
while True:
    for at in rng.integers(0, len(x), 1000).tolist():
        x[at] = at + 1
"""
SAME = """
with RemoteArray(PATH, {words}, "uint32", local_budget="2 MiB", mode="r") as array:
    wrong = numpy.flatnonzero(array.array != numpy.arange(1, {words} + 1, dtype="uint32"))
    print(len(wrong), wrong[:3])
"""


@pytest.mark.long
def test_a_script_killed_while_it_waits_to_write_leaves_no_zeros() -> None:
    """Chunks that the script touched and that had not come yet are not here, and must not be written back as zeros."""
    rng = random.Random(5)
    with LiveVolume() as volume:
        volume.run(FILLED.format(words=WORDS))
        for _ in range(8):
            with scripted(volume, WRITES.format(words=WORDS)) as script:
                assert heard(script) == "begun"
                time.sleep(rng.uniform(0.05, 0.3))
                script.kill()
                script.wait()
                until(lambda: len(volume.pagers()) == 1)
            assert volume.run(SAME.format(words=WORDS)).startswith("0 ")


def test_a_readers_pager_that_is_replaced_writes_nothing_back() -> None:
    """By then the reader may have older bytes than another array wrote."""
    reads = """
array = RemoteArray(PATH, 100_000, "uint32", local_budget="1 MiB", mode="r")
assert (array.array == 1).all()
print("read", flush=True)
sys.stdin.readline()
array.flush()
array.close()
print("closed", flush=True)
"""
    writes = """
with RemoteArray(PATH, 100_000, "uint32", local_budget="1 MiB") as array:
    array.array[:] = {word}
"""
    with LiveVolume() as volume:
        volume.run(writes.format(word=1))
        with scripted(volume, reads) as reader:
            assert heard(reader) == "read"
            volume.run(writes.format(word=2))
            before = volume.pagers()
            os.kill(before[-1], signal.SIGKILL)
            until(lambda: len(volume.pagers()) == 2 and volume.pagers() != before)
            tell(reader)
            assert heard(reader) == "closed"
        said = volume.run(
            "with RemoteMemory.at(PATH) as memory:\n"
            "    print(numpy.unique(numpy.frombuffer(memory.read(0, 400_000), 'uint32')))"
        )
        assert said == "[2]\n"


def test_a_script_may_keep_the_array_alone() -> None:
    """When the script drops the view too, what it wrote is at the volume and its pager ends."""
    said = """
import gc
x = RemoteArray(PATH, 2_000_000, "uint8", local_budget="1 MiB").array
gc.collect()
signal.alarm(60)                     # a thread that waits for nobody is ended by that, with its script
x[:] = 7
assert (x == 7).all()
half = x[1_000_000:]
del x
gc.collect()
assert (half == 7).all()
del half
gc.collect()
for _ in range(100):
    try:
        with RemoteArray(PATH, 2_000_000, "uint8", local_budget="1 MiB") as again:
            assert (again.array == 7).all()
        break
    except RemoteMemoryError:        # the pager of the first one is still at it
        time.sleep(0.1)
print("all there", len(os.listdir("/proc/self/fd")))
"""
    with LiveVolume() as volume:
        assert volume.run(said, within_s=90.0).startswith("all there")
        until(lambda: len(volume.pagers()) == 1)


@pytest.mark.parametrize("kept", ["array = ", "x = "], ids=["object", "view"])
def test_nothing_of_a_childs_own_comes_to_lie_where_the_array_was(kept: str) -> None:
    """A fork leaves the array's memory out; other memory there would be unmapped with the array, or read as it."""
    said = f"""
import ctypes, gc
{kept}RemoteArray(PATH, 50_000_000 // 4, "uint8", local_budget="1 MiB").array
address = {kept.split()[0]}.ctypes.data
child = os.fork()
if child == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    there = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(4096), 3, 0x100022, -1, ctypes.c_long(0))
    os._exit(1 if there == address else 0)      # MAP_FIXED_NOREPLACE: it is taken
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    with LiveVolume() as volume:
        assert volume.run(said) == "0\n"


def test_what_this_host_cannot_do_is_said_and_the_next_array_is_served() -> None:
    opens = """
try:
    with RemoteArray(PATH, 1000, local_budget="1 MiB") as array:
        array.array[:] = 1
        print("served")
except RemoteMemoryError as error:
    print(error)
"""
    with LiveVolume() as volume:
        lock = f"{volume.run_dir}/arr-data.sock.lock"
        os.mkdir(lock)
        assert "this host cannot serve arrays: [Errno 21] Is a directory" in volume.run(opens)
        os.rmdir(lock)
        assert volume.run(opens) == "served\n"
