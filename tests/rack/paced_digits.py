"""The script `examples/digits.py`, whose steps take as long as it was told until a file is there, and no time then: a
job that keeps running while a test looks at it, and makes the steps that it would make otherwise.

    python paced_digits.py FILE [arguments of digits.py]
"""

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


def paced(hurry: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", DIGITS)
    assert spec is not None
    assert spec.loader is not None
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)

    def sleep(seconds: float) -> None:
        if not hurry.exists():
            time.sleep(seconds)

    digits.time = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)  # type: ignore[attr-defined]
    return digits


if __name__ == "__main__":
    paced(Path(sys.argv[1])).main(sys.argv[2:])
