"""Fixtures with a simulated EC2 in this process."""

from support.simcloud.in_process import cloud, front, front_of_session

__all__ = ["cloud", "front", "front_of_session"]
