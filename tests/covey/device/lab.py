"""The laboratory device `lab` of PyTorch: memory that the host cannot read, streams and events that end late.

    from tests.covey.device import lab
    lab.load()                              # builds lab.cpp for this PyTorch, once; then there is torch.device("lab")
    lab.latency(0.0005)                     # all work of all streams takes half a millisecond longer
    with lab.held(stream): ...              # nothing of this stream happens meanwhile

There are two devices. Random numbers are drawn from a generator of each device, as on a GPU.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("lab.cpp")
BUILD_S = 300.0
FLAGS = ("-O1", "-g0", "-std=c++20", "-shared", "-fPIC", "-pthread")
DEVICES = 2
UUID = "LAB_UUID"
"""Environment variable: which device of its host a process has, where there are more processes than `DEVICES`."""
_kept: list[Any] = []
"""What PyTorch refers to for as long as this process lives."""


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def library() -> Path:
    """Path of the compiled device, which is compiled if it is not there yet. RuntimeError with the compiler's words."""
    import torch

    from covey.hooks.gate.build import TorchBuild, cache_folder

    build = TorchBuild.of(torch)
    told = "\n".join([build.version, str(build.cxx11_abi), *FLAGS]).encode()
    path = cache_folder() / f"lab-{hashlib.sha256(told + SOURCE.read_bytes()).hexdigest()[:24]}.so"
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(descriptor)
    include, lib = build.folder / "include", build.folder / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(build.cxx11_abi)}"
    command = [str(compiler()), *FLAGS, abi, "-isystem", str(include), "-o", name, str(SOURCE), f"-L{lib}"]
    done = subprocess.run(
        [*command, "-ltorch_cpu", "-lc10"], capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    if done.returncode:
        Path(name).unlink()
        raise RuntimeError(f"the compiler ended with {done.returncode}:\n{done.stderr[-2000:]}")
    os.replace(name, path)
    return path


def load() -> ctypes.CDLL:
    """Make the device known to PyTorch, once in this process. Memory and threads come with its first use, so a process
    that loaded it may fork before that."""
    if _kept:
        native: ctypes.CDLL = _kept[0]
        return native
    import torch

    native = ctypes.CDLL(str(library()))
    torch.utils.rename_privateuse1_backend("lab")
    native.lab_register()
    _kept.append(native)
    module: Any = _module(torch, native)
    torch._register_device_module("lab", module)
    sys.modules["torch.lab"] = module
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
    _kept.append(_draws(torch, module.generators))
    return native


def _module(torch: Any, native: ctypes.CDLL) -> types.ModuleType:
    """What `torch.lab` is, as `torch.cuda` is for CUDA."""
    module: Any = types.ModuleType("torch.lab")
    module.generators = [torch.Generator().manual_seed(0) for _ in range(DEVICES)]

    def index(device: Any = None) -> int:
        found = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return int(native.lab_device() if found is None else found)

    def seed_all(seed: int) -> None:
        for each in module.generators:
            each.manual_seed(seed)

    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: DEVICES
    module.get_device_properties = lambda device: types.SimpleNamespace(uuid=os.environ.get(UUID) or index(device))
    module.current_device = native.lab_device
    module.set_device = lambda device: native.lab_set_device(index(device))
    module.manual_seed_all = seed_all
    module.manual_seed = lambda seed: module.generators[index()].manual_seed(seed)
    module.get_rng_state = lambda device=None: module.generators[index(device)].get_state()
    module.set_rng_state = lambda state, device=None: module.generators[index(device)].set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    made: types.ModuleType = module
    return made


def _draws(torch: Any, generators: list[Any]) -> Any:
    """Operators that draw random numbers, from the generator of the tensor's device."""

    def drawn(name: str) -> Any:
        def draw(own: Any, *args: Any, generator: Any = None, **more: Any) -> Any:
            found = torch.empty(own.shape, dtype=own.dtype)
            getattr(found, name)(*args, generator=generator or generators[own.device.index], **more)
            return own.copy_(found)

        return draw

    def dropped(own: Any, p: float, train: bool | None) -> Any:
        if train is False or p == 0:
            return own.clone(), torch.ones_like(own, dtype=torch.bool)
        kept = torch.empty(own.shape).bernoulli_(1 - p, generator=generators[own.device.index]).to(own.device)
        return own * kept.to(own.dtype) / (1 - p), kept.to(torch.bool)

    into = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in ("normal_", "uniform_", "bernoulli_.float"):
        into.impl(name, drawn(name.partition(".")[0]))
    into.impl("native_dropout", dropped)
    return into


# ---- what a test asks for ----


def latency(seconds: float) -> None:
    """From now on each piece of work of each stream ends so much later."""
    load().lab_latency(int(seconds * 1e6))


def hold(stream: Any) -> None:
    """Let nothing of this stream happen until `release`."""
    load().lab_hold(stream.device_index, ctypes.c_long(stream.stream_id), 1)


def release(stream: Any) -> None:
    load().lab_hold(stream.device_index, ctypes.c_long(stream.stream_id), 0)


@contextlib.contextmanager
def held(stream: Any) -> Iterator[None]:
    hold(stream)
    try:
        yield
    finally:
        release(stream)


def waiting(stream: Any) -> int:
    """Number of pieces of work of this stream that have not ended."""
    return int(load().lab_waiting(stream.device_index, ctypes.c_long(stream.stream_id)))


def pinned_made() -> int:
    """How often somebody asked for pinned memory."""
    return int(load().lab_pinned_made())


def refuse_pinned(above: int = -1) -> None:
    """Pin no memory of more bytes than this from now on; -1: any."""
    load().lab_refuse_pinned(ctypes.c_long(above))


def synchronized_devices() -> int:
    """How often somebody waited for a whole device."""
    return int(load().lab_synchronized_devices())
