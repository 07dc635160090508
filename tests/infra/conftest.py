"""Fixtures with a simulated EC2 in this process, and with an empty AWS (moto) for tests of the stack."""

from support.aws_gang import bed
from support.aws_stack import account, aws, home, work
from support.simcloud.in_process import front, front_of_session

__all__ = ["account", "aws", "bed", "front", "front_of_session", "home", "work"]
