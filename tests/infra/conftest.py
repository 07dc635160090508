"""Fixtures with a simulated EC2 in this process."""

from support.aws_gang import bed
from support.simcloud.in_process import front, front_of_session

__all__ = ["bed", "front", "front_of_session"]
