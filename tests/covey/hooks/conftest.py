"""Fixtures of the tests of `covey.hooks`."""

from collections.abc import Iterator
from typing import Any

import pytest

from covey.hooks.limits.sharing import ShareControl


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread of a test outlives it: simulated racks of other tests allow none."""
    made: list[ShareControl] = []
    init = ShareControl.__init__

    def remembered(self: ShareControl, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(ShareControl, "__init__", remembered)
    yield
    for each in made:
        each.close()
