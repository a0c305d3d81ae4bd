"""A process of an elastic job for tests, as an agent starts it: SCRIPT ENVIRONMENT ARGUMENTS.."""

import atexit
import json
import os
import runpy
import sys
from pathlib import Path


def main(script: str, environ: str, *words: str) -> None:
    os.environ.update(json.loads(environ))
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)  # an interpreter with PyTorch takes a second to free what it has


if __name__ == "__main__":
    main(*sys.argv[1:])
