"""Buckets on their way between a device and host memory: what waits for what, and what is said if it does not come."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from covey.core.errors import CoveyError
from covey.kernel.this_process import OtherProcess
from tests.covey.device import lab
from tests.covey.hooks.torch_jobs import NEEDS_TORCH

pytestmark = [
    *NEEDS_TORCH,
    pytest.mark.xdist_group("lab"),
    pytest.mark.skipif(lab.compiler() is None, reason="there is no C++ compiler"),
]
WITHIN_S = 20.0


class Pushed:
    """The rounds of a played job: what came to host memory, and futures that get the average when the test says so."""

    def __init__(self) -> None:
        self.came = threading.Semaphore(0)
        self.arrays: list[list[float]] = []
        self._hosts: list[tuple[Any, Any]] = []

    def __call__(self, host: Any, future: Any) -> None:
        self.arrays.append(host.tolist())
        self._hosts.append((host, future))
        self.came.release()

    def averaged(self) -> None:
        """The oldest round ends: its average is ten times what came."""
        assert self.came.acquire(timeout=WITHIN_S)
        host, future = self._hosts.pop(0)
        host.mul_(10)
        future.set_result(host)


@pytest.fixture(autouse=True)
def loaded() -> Iterator[None]:
    lab.load()
    yield
    lab.latency(0.0)
    lab.refuse_pinned()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def buckets(said: list[str]) -> Any:
    from covey.frameworks.torch.devices import DeviceBuckets

    return DeviceBuckets(said.append)


def bucket_of(value: float, count: int = 4) -> tuple[Any, list[Any]]:
    """A bucket of gradients that all have this value, and its parameters."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(count, device="lab"))
    return torch.full((count,), value).to("lab"), [parameter]


def own_stream() -> Any:
    import torch

    return torch.accelerator.current_stream("lab")


def test_a_bucket_leaves_once_the_backward_pass_has_filled_it(buckets: Any) -> None:
    """Its gradients are written by work that has not begun when the bucket is taken."""
    import torch

    bucket, parameters = bucket_of(0.0)
    own_stream().synchronize()
    pushed = Pushed()
    with lab.held(own_stream()):
        bucket.copy_(torch.full((4,), 3.0))
        future = buckets.take("b", parameters, bucket, pushed)
        assert not pushed.came.acquire(timeout=0.05)
    pushed.averaged()
    future.wait()
    assert pushed.arrays == [[3.0] * 4] and bucket.tolist() == [30.0] * 4


def test_nothing_is_pushed_before_its_copy_is_whole(buckets: Any) -> None:
    bucket, parameters = bucket_of(5.0)
    own_stream().synchronize()
    lab.latency(0.02)
    pushed = Pushed()
    future = buckets.take("b", parameters, bucket, pushed)
    pushed.averaged()
    future.wait()
    assert pushed.arrays == [[5.0] * 4]


def test_whoever_waits_for_a_bucket_has_its_average(buckets: Any) -> None:
    """The copy up has not begun when the future is waited for: what the script's stream does next comes after it."""
    import torch

    bucket, parameters = bucket_of(2.0)
    used = torch.zeros(4, device="lab")
    pushed = Pushed()
    future = buckets.take("b", parameters, bucket, pushed)
    assert pushed.came.acquire(timeout=WITHIN_S)
    pushed.came.release()
    own_stream().synchronize()
    with lab.held(buckets.stream_of(bucket.device)):
        pushed.averaged()
        future.wait()
        used.copy_(bucket)
        assert lab.waiting(own_stream()) > 0
    assert used.tolist() == [20.0] * 4


def test_memory_is_used_again_and_no_pass_sees_that_of_another(buckets: Any) -> None:
    """In the second pass the average of the first one is still on its way up when the bucket is taken."""
    import torch

    bucket, parameters = bucket_of(1.0)
    pushed, pinned = Pushed(), lab.pinned_made()
    lab.latency(0.002)
    for step in range(4):
        bucket.copy_(torch.full((4,), float(step + 1)))
        future = buckets.take("b", parameters, bucket, pushed)
        pushed.averaged()
        future.wait()
        assert (bucket * 1).tolist() == [10.0 * (step + 1)] * 4
    assert pushed.arrays == [[float(step + 1)] * 4 for step in range(4)] and lab.pinned_made() <= pinned + 1


def test_buckets_that_are_under_way_at_once_do_not_share_memory(buckets: Any) -> None:
    each = [bucket_of(float(at)) for at in (1, 2, 3)]
    pushed = Pushed()
    futures = [buckets.take("b", parameters, bucket, pushed) for bucket, parameters in each]
    for _ in each:
        assert pushed.came.acquire(timeout=WITHIN_S)
    for future in futures:
        pushed.came.release()
        pushed.averaged()
        future.wait()
    assert [bucket.tolist()[0] for bucket, _ in each] == [10.0, 20.0, 30.0]


def test_two_streams_that_end_in_any_order_give_each_bucket_its_own(buckets: Any) -> None:
    """Buckets of two devices: the second one comes to host memory first, and is pushed second."""
    import torch

    first, second = bucket_of(1.0), bucket_of(2.0)
    there = torch.full((4,), 2.0).to("lab:1")
    own_stream().synchronize()
    pushed = Pushed()
    with lab.held(own_stream()):
        futures = [buckets.take("a", first[1], first[0], pushed), buckets.take("b", second[1], there, pushed)]
    for future in futures:
        pushed.averaged()
        future.wait()
    assert first[0].tolist() == [10.0] * 4 and there.tolist() == [20.0] * 4


def test_nobody_waits_for_the_whole_device(buckets: Any) -> None:
    """A stream of the script that never ends does not hold gradients up."""
    import torch

    bucket, parameters = bucket_of(1.0)
    own_stream().synchronize()
    other, pushed = torch.Stream(device="lab"), Pushed()
    waited = lab.synchronized_devices()
    with lab.held(other):
        torch.Event(device="lab").record(other)
        future = buckets.take("b", parameters, bucket, pushed)
        pushed.averaged()
        future.wait()
        assert bucket.tolist() == [10.0] * 4 and lab.waiting(other) == 1
    assert lab.synchronized_devices() == waited


def test_a_stream_that_never_finishes_is_named(buckets: Any, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which bucket and after how long, and comes to all buckets of the pass."""
    from covey.frameworks.torch import devices

    monkeypatch.setattr(devices, "STREAM_S", 0.2)
    monkeypatch.setattr(devices, "SAY_S", 0.05)
    first, second = bucket_of(1.0), bucket_of(2.0)
    own_stream().synchronize()
    pushed = Pushed()
    with lab.held(own_stream()):
        futures = [
            buckets.take(f"the bucket of {at!r}", of, one, pushed) for at, (one, of) in enumerate((first, second))
        ]
        for future in futures:
            end_s = time.monotonic() + WITHIN_S
            while not future.done() and time.monotonic() < end_s:
                time.sleep(0.001)
            with pytest.raises(Exception, match=r"the bucket of 0 is not complete on its device after 0\.\d s"):
                future.value()
    assert (
        not pushed.arrays
        and len(said) == 1
        and said[0].startswith("waits for its device: the bucket of 0 is not complete after 0.")
    )


def test_memory_that_cannot_be_pinned_is_an_error_with_its_size(buckets: Any) -> None:
    bucket, parameters = bucket_of(1.0, 1 << 20)
    lab.refuse_pinned(above=1 << 20)
    with pytest.raises(CoveyError) as raised:
        buckets.take("the bucket of 'w'", parameters, bucket, Pushed())
    assert raised.value.why.startswith(
        "the bucket of 'w' needs 4 MiB of page-locked host memory, and PyTorch says: lab"
    )


def test_a_process_that_did_not_make_it_is_refused(buckets: Any) -> None:
    """Its thread is not there, so the backward pass would wait for ever."""
    buckets._process = (1, 1)
    bucket, parameters = bucket_of(1.0)
    with pytest.raises(OtherProcess, match="belong to process 1"):
        buckets.take("w", parameters, bucket, lambda host, future: None)


def test_a_graph_that_is_recorded_is_refused(buckets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.get_device_module("lab"), "is_current_stream_capturing", lambda: True, raising=False)
    bucket, parameters = bucket_of(1.0)
    with pytest.raises(CoveyError, match="a device graph is being recorded"):
        buckets.take("b", parameters, bucket, Pushed())


def test_what_cannot_be_averaged_is_refused_when_it_is_attached() -> None:
    import torch

    import covey.torch

    def attach(module: Any) -> None:
        covey.torch.attach(SimpleNamespace(module=module))

    with pytest.raises(
        TypeError, match=r"gradients of 'weight' are float32 on meta; this PyTorch's accelerator is lab"
    ):
        attach(torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(TypeError, match=r"gradients of '0.weight' are sparse.*sparse=False"):
        attach(torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True).to("lab")))
    with pytest.raises(TypeError, match=r"gradients of 'weight' are complex64 on lab:0; Covey averages dense float32"):
        attach(torch.nn.Linear(2, 2, dtype=torch.complex64).to("lab"))


def test_a_state_is_read_as_it_was_when_the_step_began() -> None:
    """Buffers that a forward pass changes are those of before, and parameters wait for the optimizer's last step."""
    import torch

    from covey.frameworks.torch.state import TrainingState

    model = torch.nn.BatchNorm1d(4).to("lab")
    state = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1), [])
    state.first = 1
    own_stream().synchronize()
    lab.hold(own_stream())
    try:
        with torch.no_grad():
            model.weight.copy_(torch.full((4,), 7.0))  # the optimizer's step
        arrays = state.arrays()
        model.running_mean.copy_(torch.full((4,), 9.0))  # the next forward pass
        threading.Timer(0.05, lab.release, [own_stream()]).start()
        assert arrays["parameter/weight"].tolist() == [7.0] * 4 and arrays["buffer/running_mean"].tolist() == [0.0] * 4
    finally:
        lab.release(own_stream())


def test_a_tensor_on_a_device_that_the_model_does_not_use_is_named() -> None:
    import torch

    from covey.frameworks.torch.state import TrainingState

    model = torch.nn.Linear(2, 2).to("lab")
    other = SimpleNamespace(state_dict=lambda: {"mean": torch.zeros(2, device="lab:1")}, load_state_dict=dict)
    with pytest.raises(CoveyError, match="also/0/mean is on lab:1, and the model uses lab:0"):
        TrainingState(model, torch.optim.SGD(model.parameters(), 0.1), [other])


def test_generators_of_devices_go_on_where_they_were_kept() -> None:
    import json

    import torch

    from covey.frameworks.torch.random_state import generators, set_generators

    here, there = [torch.device("lab:0")], [torch.device("lab:1")]

    def drawn(device: Any) -> Any:
        return torch.empty(4, device=device).normal_().tolist()

    torch.get_device_module(there[0]).generators[1].manual_seed(9)
    before = generators(here)
    kept = json.loads(before.as_json())
    wanted = drawn(here[0])
    assert generators(here) != before
    set_generators(kept, there)
    assert drawn(there[0]) == wanted, "a successor may have another device"
