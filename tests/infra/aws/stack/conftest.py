"""Fixtures with an empty AWS (moto) for tests of the stack."""

from support.aws_stack import account, aws, home, work

__all__ = ["account", "aws", "home", "work"]
