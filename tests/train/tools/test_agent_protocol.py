"""Tests of the names that trainers and agents share."""

from fnmatch import fnmatch

from train.tools import agent_protocol


def test_file_names_match_the_patterns_by_which_they_are_found() -> None:
    assert agent_protocol.failure_file(3) == "failed-3.json"
    assert fnmatch(agent_protocol.failure_file(127), agent_protocol.FAILURE_FILE_PATTERN)
    assert agent_protocol.checkpoint_file(123) == "step-00000123.pt"
    assert fnmatch(agent_protocol.checkpoint_file(123), agent_protocol.CHECKPOINT_PATTERN)
    names = [agent_protocol.checkpoint_file(step) for step in (9, 10, 99_999_999)]
    assert sorted(names) == names, "the newest checkpoint is the last by name"
