"""`make test`, after a few of its tests failed: each once more with the machine to itself.

Five processes test on two cores, beside racks of real programs; what fails there and passes alone is a test, or a
promise, with too little patience for a busy machine. It is named, so that somebody looks; what fails twice fails.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

MOST = 3
"""If more failed, the machine is not the reason."""
GROUP = re.compile(r"@[^]@/:]*$")
"""What pytest-xdist adds to the id of a test of a group."""
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def to_run_again(failed: Path) -> list[str]:
    """Ids of tests; none when there are none, or too many."""
    told = json.loads(failed.read_text()) if failed.is_file() else ()
    found = sorted({GROUP.sub("", id) for id in told})
    return found if len(found) <= MOST else []


def main() -> int:
    ids = to_run_again(FAILED)
    if not ids:
        return 1
    print("\nfailed beside others, once more alone:", *ids, sep="\n  ", flush=True)
    if subprocess.run([sys.executable, "-m", "pytest", *ids], check=False).returncode:
        return 1
    print("passed alone; look at why it failed beside others (above):", *ids, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
