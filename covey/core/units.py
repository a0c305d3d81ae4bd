"""Sizes and durations: parse what a person writes, print what a person reads."""

import re

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

_SIZES = {"": 1, "b": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB, "t": TIB, "tib": TIB}
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")


def parse_size(text: str) -> int:
    """Bytes of `8 GiB`, `64MiB`, `4096`; K, M, G and T are powers of 1024. ValueError names what was expected."""
    found = _NUMBER.match(text)
    if not found or found[2].lower() not in _SIZES:
        raise ValueError(f"{text!r} is not a size: write a number and B, KiB, MiB, GiB or TiB, such as '64 MiB'")
    return round(float(found[1]) * _SIZES[found[2].lower()])


def format_size(size_bytes: float) -> str:
    """A size for people: `67108864` -> `64 MiB`; one decimal when it is not whole."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value == int(value) or unit == "B" else f"{value:.1f} {unit}"


def parse_seconds(text: str) -> float:
    """Seconds of `90`, `1.5s`, `10min`, `2h`, `1d`. ValueError names what was expected."""
    found = _NUMBER.match(text)
    if not found or found[2].lower() not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration: write a number and ms, s, min, h or d, such as '90s'")
    return float(found[1]) * _SECONDS[found[2].lower()]


def format_seconds(seconds: float) -> str:
    """A duration for people: `0.8 s`, `42 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size_s, name, next_s, next_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size_s:
            rest = whole % size_s // next_s
            return f"{whole // size_s} {name} {rest} {next_name}" if rest else f"{whole // size_s} {name}"
    return f"{whole} s"
