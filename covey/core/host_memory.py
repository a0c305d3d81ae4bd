"""How much memory this host has available, by the kernel."""


def available_bytes() -> int:
    """Bytes of memory that this host could use without swapping; 0 where the kernel does not say."""
    try:
        with open("/proc/meminfo") as file:
            rows = [line.split() for line in file]
    except OSError:
        return 0
    return next((int(row[1]) * 1024 for row in rows if row and row[0] == "MemAvailable:"), 0)
