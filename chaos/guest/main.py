"""`make rdma`: the tests of the byte path once more, with pages over RDMA (SoftRoCE), and of tensors over RDMA, in the
emulated guest.

    python -m chaos.guest.main            all of it
    python -m chaos.guest.main TEST...    these tests of pytest
    python -m chaos.guest.main --run 'COMMAND'

Exit status: that of the tests; 2 when the guest cannot be made or run here, and why.
"""

import argparse
import shlex
import sys

from chaos.guest.boot import run
from chaos.guest.image import NoGuest, made

TESTS = (
    "tests/plugins/memory/test_volume.py",
    "tests/plugins/memory/test_slabd.py",
    "tests/guest/one_sided_faults.py",
    "tests/guest/tensors_by_rdma.py",
)
WITHIN_S = 2400.0


def main() -> None:
    parser = argparse.ArgumentParser("chaos.guest.main", description="Tests over RDMA in an emulated guest.")
    parser.add_argument("--run", default="", help="a shell command instead of tests")
    parser.add_argument("--within", type=float, default=WITHIN_S, help="seconds (%(default)g)")
    parser.add_argument("-x", dest="first", action="store_true", help="end with the first test that fails")
    parser.add_argument("tests", nargs="*", help="arguments of pytest")
    options = parser.parse_args()
    tests = " ".join(map(shlex.quote, [*(options.tests or TESTS), *(["-x"] if options.first else [])]))
    script = options.run or f"COVEY_TEST_RDMA=1 python3 -m pytest -p no:cacheprovider -vv --color=no {tests}"
    try:
        code = run(made(), f"set -e\nrdma link\n{script}\n", options.within)
    except NoGuest as why:
        print(f"rdma: {why}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code)


if __name__ == "__main__":
    main()
