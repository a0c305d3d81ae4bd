"""The job that `covey-rack run` and storms train: `examples/digits.py` of the checkout, or what the wheel brought."""

from importlib import metadata
from pathlib import Path

from cli.client import FAILED, AgentctlError

NAME = "examples/digits.py"


def example() -> Path:
    """AgentctlError when neither is there."""
    beside = Path(__file__).parents[2] / NAME
    if beside.exists():
        return beside
    for file in metadata.files("covey-agent") or ():
        if file.match(f"share/covey/{NAME}"):
            return Path(str(file.locate())).resolve()
    why = f"there is no {beside}, and the wheel brought none"
    raise AgentctlError(FAILED, "the example job is not installed", why, "install covey-agent anew, from its wheel")
