"""`make docs`: API pages of what a training script imports and of what a plugin is made of, in docs/api/."""

import sys
from pathlib import Path

import pdoc

import covey

MODULES = (
    "covey",
    "covey.job.client",
    "covey.core.errors",
    "covey.remote",
    "covey.tensors.numbers.moments",
    "covey.job.tensors",
    "covey.tensors.numbers.updates",
    "plugins.base",
)
FOLDER = Path(__file__).parent.parent / "docs/api"


def write(folder: Path) -> None:
    """A page for each module. What `covey` imports at its first use is imported now: pdoc looks at what is there."""
    vars(covey).update({name: getattr(covey, name) for name in covey.__all__})
    pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
