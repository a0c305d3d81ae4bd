"""Whether a volume could be swap of this host, as far as that can be seen without a right to anything."""

import os
import stat

START = "next: systemctl enable --now covey-swap"


def lacks(helper: str, system: str = "/") -> str:
    """Answer `covey.ports.probes.Probes.swap_lacks`. `system`: where `sys` and `lib` are."""
    try:
        listens = stat.S_ISSOCK(os.stat(helper).st_mode)
    except PermissionError:
        return f"{helper} is not for this agent's user; next: covey-swapd --user NAME"
    except OSError:
        listens = False
    if not _has_nbd(system):
        release = os.uname().release
        return f"this kernel ({release}) has no NBD; next: install its module nbd"
    return "" if listens else f"no swap helper listens at {helper}; {START}"


def _has_nbd(system: str) -> bool:
    """Whether NBD is loaded or built in, or there to be loaded."""
    if os.path.exists(os.path.join(system, "sys/module/nbd")) or os.path.exists(os.path.join(system, "sys/block/nbd0")):
        return True
    here = os.path.join(system, "lib/modules", os.uname().release)
    for name in ("modules.dep", "modules.builtin"):
        try:
            with open(os.path.join(here, name), encoding="ascii", errors="replace") as lines:
                if any("/nbd.ko" in line.partition(":")[0] for line in lines):
                    return True
        except OSError:
            continue
    return False
