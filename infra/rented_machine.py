"""A rented machine, as far as the controller of rented jobs has to know it. Each cloud adds fields of its own."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RentedMachine:
    """One machine of a job. Unknown strings are ""."""

    id: str  # the cloud's name for it
    name: str  # the machine's number in its job
    private_ip: str
    public_ip: str
    expires: str = ""  # when it powers itself off at the latest
