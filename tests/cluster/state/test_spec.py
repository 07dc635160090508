"""Tests of the job specification as JSON."""

import json
from typing import Any

from support.specs import changed_spec

from cluster.state.spec import JobSpec

Fixture = Any


def test_job_spec_json_round_trip_is_equal(hand_made: Fixture) -> None:
    full = changed_spec(
        hand_made().spec, generate_data=True, procs=3, gpus=8, max_steps=7, max_hours=0.5, scale=0.25, spares=2,
        save_seconds=1.5, skip_bad=True, workers=0, git_commit="abc", created=1.25, target="top5=93",
    )  # fmt: skip
    assert JobSpec.from_json(json.loads(json.dumps(full.to_json()))) == full


def test_job_spec_from_json_ignores_unknown_and_defaults_missing_keys(hand_made: Fixture) -> None:
    spec = hand_made().spec
    value = {**spec.to_json(), "of a later version": 1}
    value["train"] = {**value["train"], "of a later version": 1}
    del value["train"]["workers"], value["train"]["scale"], value["procs"]
    assert JobSpec.from_json(value) == spec
