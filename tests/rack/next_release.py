"""A tree of the release after this one, which does not exist yet: a copy of this one that says more.

The structs of the files of GROWS have one more field, as a later release may add: messages between hosts (Raft's and
the envelope of all too), frames between an agent and its ranks, volumes, slabs, aggregator and supervisors, commands of
the log, jobs in it, and values that a host gossips of itself. Structs that others of their file extend have it by those
alone. Fixed layouts have none, nor have durable records, nor frames to the starter, which refuses what it does not
know. Hosts gossip one more value; and `agentctl quota TENANT 7` sets a quota in a way that came with that release
(`messages.releases`).
"""

import ast
import shutil
from pathlib import Path

from covey.core.version import RELEASE, VERSION, text_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "cli", "covey", "gossip", "plugins")
NEXT = (RELEASE[0], RELEASE[1] + 1)
NEXT_VERSION = f"{text_of(NEXT)}.0"
LATER = "    from_a_later_release: int = 7\n"
GROWS = (
    "agent/jobs/spares/frames.py",
    "agent/jobs/supervision.py",
    "agent/keyring/*.py",
    "agent/raft/messages.py",
    "agent/rpc/envelope.py",
    "covey/healing/state_pieces.py",
    "covey/job/blocks/block_wire.py",
    "covey/tensors/numbers/tensor_wire.py",
    "covey/wire/array_wire.py",
    "covey/wire/job.py",
    "covey/wire/sums.py",
    "covey/wire/swap_wire.py",
    "gossip/joining/messages.py",
    "gossip/membership/messages.py",
    "gossip/spread/messages.py",
    "plugins/*/messages.py",
    "plugins/*/messages/commands.py",
    "plugins/*/messages/spec.py",
    "plugins/*/messages/wire.py",
    "plugins/aggregator/datapath/lanes/wire.py",
    "plugins/gossiped.py",
    "plugins/memory/datapath/lending/slab_keeper.py",
    "plugins/memory/datapath/spill/spill_wire.py",
    "plugins/memory/datapath/wire/control.py",
)
STRUCTS = ("Struct", "Message", "Frame", "CommandBase")
"""The names of classes from which what is sent comes, here or in another file."""
CHANGED = {
    "covey/core/version.py": [(f'VERSION = "{VERSION}"', f'VERSION = "{NEXT_VERSION}"')],
    "plugins/scheduler/messages/commands.py": [
        (
            '    gpus: Count | None\n    """The quota in GPUs; None: not limited."""\n',
            '    gpus: Count | None\n    """The quota in GPUs; None: not limited."""\n'
            f'    lucky: Annotated[bool, Meta(extra={{"came_with": "{text_of(NEXT)}"}})] = False\n',
        )
    ],
    "plugins/scheduler/service/asked.py": [
        ('"tenant": tenant, "gpus": gpus}, QuotaSet', '"tenant": tenant, "gpus": gpus, "lucky": gpus == 7}, QuotaSet')
    ],
    "agent/host.py": [
        (
            "        await self.gossip.start()\n",
            '        self.gossip.spread("later", b"said by a later release")\n        await self.gossip.start()\n',
        )
    ],
}


def make(folder: Path) -> None:
    """Write the tree. AssertionError when a place that it changes is not there any more."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for name, changes in CHANGED.items():
        for before, after in changes:
            _replace(folder / name, before, after)
    for wheel in ("covey-agent", "covey-job"):
        about = folder / f"{wheel.replace('-', '_')}-{NEXT_VERSION}.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: {NEXT_VERSION}\n")
    for pattern in GROWS:
        assert sum([_grow(file) for file in folder.glob(pattern)]), f"messages are not where they were: {pattern}"


def _replace(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text, f"{file.name} has no {before!r}"
    file.write_text(text.replace(before, after))


def _grow(file: Path) -> int:
    """Add a field at the end of each struct from which no other one of its file comes; returns how many there were."""
    text = file.read_text()
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    bases = {
        base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for each in classes for base in each.bases
    }
    structs = set(STRUCTS)
    ends = []
    for each in classes:
        own = {base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in each.bases}
        if own & structs:
            structs.add(each.name)
            if each.name not in bases:
                ends.append(max(getattr(node, "end_lineno", 0) for node in each.body if not _is_method(node)))
    lines = text.splitlines(keepends=True)
    for end in sorted(ends, reverse=True):
        lines.insert(end, LATER)
    file.write_text("".join(lines))
    return len(ends)


def _is_method(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
