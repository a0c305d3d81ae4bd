"""The version of Covey, defined here only: the three wheels are built with it, and programs show it."""

VERSION = "0.1.0"

Release = tuple[int, int]
"""`MAJOR` and `MINOR` of a version: what hosts say to one another, and what the log holds, changes with them alone
(docs/compatibility.md)."""


def release_of(version: str) -> Release | None:
    """The release of a version such as `0.1.0` or `0.1`; None when the text is no version."""
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(number.isascii() and number.isdecimal() for number in numbers):
        return None
    return int(numbers[0]), int(numbers[1])


def text_of(release: Release) -> str:
    return f"{release[0]}.{release[1]}"


RELEASE = release_of(VERSION) or (0, 0)


def follow(one: Release, other: Release) -> bool:
    """Whether agents of these releases may be in one rack: they are alike, or one follows the other."""
    return one[0] == other[0] and abs(one[1] - other[1]) <= 1


def is_newer(release: str) -> bool:
    """Whether this release, such as 0.2, is newer than the one that runs here; a text that cannot be read is."""
    found = release_of(release)
    return bool(release) and (found is None or found > RELEASE)


def newest(one: str, other: str) -> str:
    """The newer of two releases, of which an empty one is the oldest."""
    return max(one, other, key=lambda release: release_of(release) or (0, 0))
