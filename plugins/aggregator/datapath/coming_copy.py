"""What the aggregator before brings of one Block, as the next one sees it."""


class ComingCopy:
    def __init__(self, parts: int) -> None:
        self.version: int | None = None
        """None: it has not said yet what it brings."""
        self.parts_left = parts

    @property
    def is_whole(self) -> bool:
        return not self.parts_left

    def may_still_be(self, version: int) -> bool:
        """Whether that is worth waiting for: it may come, and is not all there yet."""
        return self.version is None or (self.version == version and not self.is_whole)
