"""Fixtures with a simulated EC2 in this process."""

from support.simcloud.in_process import front, front_of_session

__all__ = ["front", "front_of_session"]
