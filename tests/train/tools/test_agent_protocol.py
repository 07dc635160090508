"""Tests of the names that trainers and agents share."""

import json
from fnmatch import fnmatch
from pathlib import Path

from train.tools import agent_protocol
from train.tools.agent_protocol import StandbyRequest
from train.tools.records import decode, encode


def test_file_names_match_the_patterns_by_which_they_are_found() -> None:
    assert agent_protocol.failure_file(3) == "failed-3.json"
    assert fnmatch(agent_protocol.failure_file(127), agent_protocol.FAILURE_FILE_PATTERN)
    assert agent_protocol.checkpoint_file(123) == "step-00000123.pt"
    assert fnmatch(agent_protocol.checkpoint_file(123), agent_protocol.CHECKPOINT_PATTERN)
    names = [agent_protocol.checkpoint_file(step) for step in (9, 10, 99_999_999)]
    assert sorted(names) == names, "the newest checkpoint is the last by name"


def test_folders_of_an_attempt() -> None:
    assert agent_protocol.checkpoint_folder(Path("/s"), 7) == Path("/s/checkpoints/000007")
    assert agent_protocol.metrics_file(Path("/s/2"), 7) == Path("/s/2/metrics/000007.jsonl")


def test_standby_request_survives_its_line_of_json() -> None:
    request = StandbyRequest(argv=("recipe.json", "--exact"), environment={"RANK": "3"}, log="/w/rank-3.log")
    assert decode(StandbyRequest, json.loads(json.dumps(encode(request)))) == request
