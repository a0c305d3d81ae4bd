"""What the kernel says of this host's memory."""


def available_bytes() -> int:
    """Memory of this host that could be had without swapping; 0 where the kernel does not say."""
    try:
        with open("/proc/meminfo") as file:
            rows = [line.split() for line in file]
    except OSError:
        return 0
    return next((int(row[1]) * 1024 for row in rows if row and row[0] == "MemAvailable:"), 0)
