"""A Block's state that the earlier aggregator brings, as the next one sees it."""


class ComingCopy:
    def __init__(self, parts: int) -> None:
        self.version: int | None = None
        """Version that is brought; None: not announced yet."""
        self.parts_left = parts

    @property
    def is_whole(self) -> bool:
        return not self.parts_left

    def may_still_be(self, version: int) -> bool:
        """Is a copy of this version worth waiting for: may it come, and is it not complete yet?"""
        return self.version is None or (self.version == version and not self.is_whole)
