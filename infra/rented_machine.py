"""A rented machine, as far as more than its cloud has to know it. Each cloud adds fields of its own."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RentedMachine:
    """One machine of a job. Unknown strings are ""."""

    id: str  # the cloud's name for it
    name: str  # the machine's number in its job
    private_ip: str
    public_ip: str
    expires: str = ""  # when it powers itself off at the latest
    type: str = ""
    market: str = ""
    zone: str = ""
    placement_group: str = ""
    boots_slowly: bool = False  # a whole computer, whose firmware takes minutes
    launch_index: int = 0  # its number in the request that brought it, as the cloud counts
    end_reason: str = ""  # as the cloud writes it, "" while the machine lives

    @property
    def is_billed(self) -> bool:
        """Whether the machine costs money now."""
        return not self.end_reason
