"""Tests of the training rules: one for each rule, with its formula and source, against an independent reference.

`tests/support/mutations.py` breaks each rule once and checks that its test fails.
"""

from support.forked_ranks import in_group

__all__ = ["in_group"]
