"""The story `block_device` where it matters in which memory writes lie: requests of whole pages, of a few sizes that
come again and again, so that their memory does, over kernels that hold little. Lenders stop for longer than requests
are waited for, and read what was sent to them once they continue, after the volume gave it up and used its memory
again. By the seed the volume has a disk, is mirrored or has parity; its pages are sealed, or not."""

from chaos.nbd.user import Habits
from chaos.rackworld import SimRack
from chaos.stories.block_device import KINDS, PATH, Device, fall_silent, play_with

SECONDS = 40.0


def play(rack: SimRack) -> None:
    seed = rack.world.seed
    sizes = (32 << 10, 64 << 10)
    habits = Habits(PATH, SECONDS, connections=2, depth=4, pause_s=0.6, ends_s=30.0, sizes=sizes)
    kind, sealed = KINDS[seed % len(KINDS)], seed // len(KINDS) % 2 == 0
    play_with(rack, Device(kind, sealed, 16 << 10, 4096, habits, [fall_silent] * 4))
