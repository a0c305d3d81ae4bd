"""JAX's hooks for `covey.hooks`. Called after jax was imported.

    post hook of jit   jaxlib calls it after each jitted call that ran (`jax.debug_nans` is made of it): which function
                       is the training step, `jitted.JittedCalls` finds out
    slow path of jit   the first call of a function, and all calls of one with effects, pass it by: one function of
                       `jax._src.pjit` is wrapped for these
    waits              `block_until_ready`, `_value` (`float(loss)`, `device_get`) and `item` of arrays are wrapped:
                       how long the script waited for the device

A jitted function stays what `jax.jit` made. A call returns before the device is done, so a step's duration is the time
from call to call. Numpy reads an array of a CPU device without Python noticing: that wait is not seen. The post hook
and the names that begin with an underscore are not public: where one is missing (another version of JAX), less is seen,
and `agentctl job` says so. `covey.hooks.frameworks.jax_share` handles a shared device.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
from jax._src import api, core, pjit
from jax._src.array import ArrayImpl

from covey.hooks.frameworks.jax_share import CallTurns, JittedWork, StartMemory
from covey.hooks.jitted import JittedCalls
from covey.hooks.limits import sharing
from covey.hooks.limits.sharing import ShareControl
from covey.hooks.reporter import Reporter, of_process
from covey.hooks.turns import hooked
from covey.hooks.turns.gates import PolledTurns
from covey.hooks.turns.hooked import HookedTurns

Hook = Callable[[Any, Any, Any, Any], None]
AT_START = "memory limit at start only"
"""Words for people: JAX takes its memory once, so a limit that changes while it runs is not obeyed."""
_installed: Reporter | None = None


def install() -> Reporter:
    """Install the hooks, once per process. Returns the reporter of this process."""
    global _installed
    if _installed is None:
        reporter = _installed = of_process()
        share = sharing.of_process()
        memory = StartMemory(lambda: hooks.ran)
        turns = hooked.of_process()
        hooks = JaxHooks(reporter, share, memory, turns)
        stops = [hooks.guarded(part) for part in (hooks.after_calls, hooks.slow_calls)]
        hooks.guarded(hooks.waits)
        if all(stops):
            share.gains(fixed=memory)
            turns.gains(PolledTurns(hooks.turns))
        gate = f"gate per jitted call, {AT_START}" if all(stops) else "no gate"
        ours = (share, turns) if all(stops) else (None, None)
        reporter.attach(f"jax {jax.__version__}, {gate}", hooks.device_bytes, None, *ours)
    return _installed


class JaxHooks:
    """The hooks: each tells the reporter; an error in one is reported once and never raised."""

    def __init__(self, reporter: Reporter, share: ShareControl, memory: StartMemory, turns: HookedTurns) -> None:
        self._reporter = reporter
        self._calls = JittedCalls()
        self._work = JittedWork(share, ArrayImpl.block_until_ready, memory.on_cores)
        self.turns = CallTurns(turns, ArrayImpl.block_until_ready)
        self._returned: dict[int, list[weakref.ref[Any]]] = {}
        """Arrays that a function returned at its last call, kept while its calls are looked at."""
        self._known: set[int] = set()
        self._lock = threading.RLock()
        """A reentrant lock: a function may be collected at any moment, also while a call is counted."""
        self._within = threading.local()
        self.ran = False

    def guarded(self, report: Callable[..., None], *what: Any) -> bool:
        """Run `report`. Whether it succeeded; an error goes to the reporter."""
        try:
            report(*what)
        except Exception as error:
            self._reporter.failed(error)
            return False
        return True

    # ---- jitted calls ----

    def after_calls(self) -> None:
        """Install the post hook. JAX's own hook, which `jax.debug_nans` sets and removes, is called after ours."""
        state = api._post_hook_state
        api._post_hook_state = _BesideOurs(state, self._called)
        state.set_global(_both(self._called, state.get_global()))

    def slow_calls(self) -> None:
        run = pjit._run_python_pjit

        @functools.wraps(run)
        def ran(p: Any, args_flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
            found = run(p, args_flat, fun, args, kwargs)
            if core.trace_state_clean():
                self._called(fun, args, kwargs, found[0])
            return found

        pjit._run_python_pjit = ran

    def _called(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.ran = True
        self.guarded(self._work.called, result)
        if not _is_internal(function):
            self.guarded(self._call, getattr(function, "_fun", function), args, kwargs, result)
        self.guarded(self._work.stop)
        self.turns.ask()

    def _call(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        with self._lock:
            identity = id(function)
            if self._calls.looks_at(identity):
                self._watch(function, identity)
                sizes = self._sizes(identity, (args, kwargs), result)
            else:
                sizes = (0, 0)
                self._returned.pop(identity, None)
            count = self._calls.called(identity, *sizes)
        if count:
            self._reporter.jit_called(count)
            self.turns.batch_ended(result)

    def _watch(self, function: Any, identity: int) -> None:
        if identity not in self._known:
            self._known.add(identity)
            with suppress(TypeError):  # an object of the script that takes no finalizer
                weakref.finalize(function, self._gone, identity).atexit = False

    def _gone(self, identity: int) -> None:
        with self._lock:
            self._known.discard(identity)
            self._returned.pop(identity, None)
            self._calls.gone(identity)

    def _sizes(self, identity: int, arguments: Any, result: Any) -> tuple[int, int]:
        """Bytes of its last result among the arguments; bytes that the function returns now. No array is kept alive."""
        before = {id(array) for known in self._returned.get(identity, ()) if (array := known()) is not None}
        taken = sum(_bytes(leaf) for leaf in jax.tree.leaves(arguments) if id(leaf) in before)
        arrays = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, ArrayImpl)]
        self._returned[identity] = [weakref.ref(array) for array in arrays]
        return taken, sum(map(_bytes, arrays))

    # ---- waiting for the device ----

    def waits(self) -> None:
        ArrayImpl._value = property(self._timed(ArrayImpl._value.fget))
        ArrayImpl.block_until_ready = self._timed(ArrayImpl.block_until_ready)
        ArrayImpl.item = self._timed(ArrayImpl.item)
        api.xc.batched_block_until_ready = self._timed(api.xc.batched_block_until_ready)

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*args: Any, **kwargs: Any) -> Any:
            with self._waiting():
                return wait(*args, **kwargs)

        return functools.update_wrapper(waited, wait, ("__name__", "__doc__"))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Time a wait; only the outermost wait of a thread counts."""
        if getattr(self._within, "wait", False):
            yield
            return
        self._within.wait, began_s = True, self._reporter.now_s()
        self.guarded(self._work.waits, True)
        try:
            yield
        finally:
            self._within.wait = False
            self.guarded(self._work.waits, False)
            self.guarded(self._reporter.device_waited, self._reporter.now_s() - began_s)

    def device_bytes(self) -> int:
        """Highest use of memory of the first device, in bytes; 0 when not known, as on a CPU. Asked before the script
        ran anything, it would start JAX's devices before the script could choose them."""
        figures = jax.local_devices()[0].memory_stats() if self.ran else None
        return int((figures or {}).get("peak_bytes_in_use", 0))


class _BesideOurs:
    """JAX's state of the post hook, changed so that our hook is called beside whatever hook is set there."""

    def __init__(self, state: Any, ours: Hook) -> None:
        self._state, self._ours = state, ours

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def set_global(self, theirs: Hook | None) -> None:
        self._state.set_global(_both(self._ours, theirs))

    def set_local(self, theirs: Hook | None) -> None:
        self._state.set_local(_both(self._ours, theirs))


def _both(ours: Hook, theirs: Hook | None) -> Hook:
    if theirs is None:
        return ours

    def both(function: Any, args: Any, kwargs: Any, result: Any) -> None:
        ours(function, args, kwargs, result)
        theirs(function, args, kwargs, result)

    return both


def _is_internal(function: Any) -> bool:
    """Whether the function is JAX's own, such as an operation of jax.numpy. What `pmap` runs is the script's."""
    module = getattr(function, "__module__", None)
    return isinstance(module, str) and module.startswith("jax.") and module != "jax._src.pmap"


def _bytes(array: Any) -> int:
    """Bytes of an array; 0 when its elements have no size, such as keys of random numbers."""
    try:
        return int(array.nbytes)
    except (AttributeError, TypeError, RuntimeError):
        return 0
