"""Call a function once a module was imported. Standard library only: `site/sitecustomize.py` runs this file by its
path, in any Python of a job, before anything else is imported."""

import sys
from typing import Any, Callable, Dict, Optional  # noqa: UP035 - also for older ones than ours


class ImportWatch:
    """A finder that finds nothing by itself: it lets the others find the modules that are watched, and calls back when
    one was executed. An error of a callback is passed to `failed`, and never to the code that imports."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._wanted: Dict[str, Callable[[Any], None]] = {}  # noqa: UP006
        self._failed = failed
        self._looking = False

    def when_imported(self, name: str, callback: Callable[[Any], None]) -> None:
        """Call `callback(module)` once the module is imported; at once if it already is."""
        if name in sys.modules:
            self._call(callback, sys.modules[name])
            return
        self._wanted[name] = callback
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[Any]:  # noqa: UP045
        if name not in self._wanted or self._looking:
            return None
        self._looking = True
        try:
            spec = self._found_by_others(name, path, target)
        finally:
            self._looking = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        spec.loader = _Loader(spec.loader, lambda module: self._executed(name, module))
        return spec

    def _executed(self, name: str, module: Any) -> None:
        """The module was executed. Not called when its import failed half way: it may be imported again."""
        callback = self._wanted.pop(name, None)
        if not self._wanted and self in sys.meta_path:
            sys.meta_path.remove(self)
        if callback is not None:
            self._call(callback, module)

    def _found_by_others(self, name: str, path: Any, target: Any) -> Any:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                return spec
        return None

    def _call(self, callback: Callable[[Any], None], module: Any) -> None:
        try:
            callback(module)
        except Exception as error:
            self._failed(error)


class _Loader:
    """The loader that was found, with a call after it."""

    def __init__(self, loader: Any, after: Callable[[Any], None]) -> None:
        self._loader, self._after = loader, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        spec = getattr(module, "__spec__", None)
        if spec is not None:
            spec.loader = self._loader  # from here on this wrapper is invisible
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._after(module)
