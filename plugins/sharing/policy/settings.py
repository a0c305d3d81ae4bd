"""Section `[sharing]` of agent.toml."""

import msgspec

from covey.core.units import parse_size
from plugins.sharing.policy.interference import TOLERANCE


class SharingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[sharing]: one guaranteed job and opportunistic ones on a GPU, where `[scheduler] beside` lets them."""

    tolerance: float = TOLERANCE
    """How much slower a guaranteed job may get because of the others, as a share of its mini-batch. AntMan (§3.2) asks
    for consistency with running alone and names no number."""
    reserve: str = "256 MiB"
    """Memory of each GPU that no job gets: what drivers and libraries take beside the tensors of a job."""

    def __post_init__(self) -> None:
        if not 0.001 <= self.tolerance <= 1:
            raise ValueError(f"tolerance = {self.tolerance}: expected a share from 0.001 to 1, such as 0.05")
        parse_size(self.reserve)

    @property
    def reserve_bytes(self) -> int:
        return parse_size(self.reserve)
