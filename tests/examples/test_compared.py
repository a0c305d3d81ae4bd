"""examples/elastic: `--check` accepts what one process finds, and nothing else."""

import runpy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.covey.plain_processes import ROOT


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # a script sets them, too

    def check(name: str, found: Any) -> None:
        script = runpy.run_path(str(ROOT / "examples" / "elastic" / f"{name}.py"))
        script["check"].__globals__["reference"] = lambda *options: np.ones((3, 4))
        script["check"](found, *([None] if name != "mlr" else [4, None]))

    return check


@pytest.mark.parametrize("name", ["lasso", "lda", "mlr", "nmf"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1.001])
def test_a_result_that_is_not_the_references_is_refused(checks: Callable[..., None], name: str, wrong: float) -> None:
    checks(name, np.ones((3, 4)))
    found = np.ones((3, 4))
    found[1, 2] = wrong
    with pytest.raises(SystemExit):
        checks(name, found)
