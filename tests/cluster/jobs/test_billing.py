"""What a job has cost, from hand-made journals: what of it was for losses, and that it is asked for first."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.cli import cloud
from cluster.errors import ClusterError
from cluster.jobs import billing, store

Fixture = Any
SECOND = 3600.0  # dollars an hour: one a second


def rent(run: Any, *machines: tuple[str, float, float], price: float | None = SECOND) -> None:
    """Let these machines have been there from then till then."""
    place = {"type": "p5.48xlarge", "market": "on-demand", "zone": "us-east-1a", "price": price}
    request: dict[str, Any] = {"BlockDeviceMappings": [], "NetworkInterfaces": []}
    lines: list[dict[str, Any]] = []
    for number, (id, launched, ended) in enumerate(machines, 1):
        lines += [
            {"what": "ask", "number": number, "place": place, "names": ["0"], "request": request},
            {"what": "granted", "number": number, "machines": [{"id": id, "name": "0", "launched": launched}]},
            {"what": "gone", "id": id, "name": "0", "ended": ended, "why": "Client.UserInitiatedShutdown"},
        ]
    (run.folders.run / "cloud.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def trained(run: Any, attempt: int, *steps: tuple[int, float], epoch: float) -> None:
    rows = [{"kind": "train", "step": step, "images": step, "time": at} for step, at in steps]
    rows.append({"kind": "epoch", "step": steps[-1][0], "images": steps[-1][0], "time": epoch, "top5": 50.0})
    path = run.folders.run / "metrics" / f"{attempt:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_losses_cost_what_was_spent_in_them_whatever_was_in_between(hand_made: Fixture) -> None:
    run = hand_made(backend="aws", cloud={})
    run.attempt(1, "0.a", reason="start", launch="evening")
    trained(run, 1, (1, 100.0), (20, 500.0), epoch=500.0)
    run.attempt(2, "0.b", reason="lost", launch="evening", resume="checkpoints/000002/resume-00000016-abcd.pt")
    trained(run, 2, (17, 560.0), (30, 900.0), epoch=900.0)
    run.attempt(3, "0.c", reason="start", launch="morning", resume="checkpoints/000003/resume-00000030-abcd.pt")
    trained(run, 3, (31, 90_100.0), (40, 90_500.0), epoch=90_500.0)
    rent(run, ("i-1", 0.0, 1000.0), ("i-2", 90_000.0, 91_000.0))
    found = billing.cost_report(run.job)
    assert found["dollars"] == pytest.approx(2000.0)
    assert (found["wasted"], found["wasted_seconds"]) == (pytest.approx(460.0), 460.0)
    assert found["per_epoch"] == pytest.approx((900.0 + 500.0) / 3)  # nights bill nothing
    assert billing.last_rented_type(run.job) == "p5.48xlarge" and billing.machines_without_price(run.job) == []


def test_machines_without_a_price_are_named(hand_made: Fixture) -> None:
    run = hand_made(backend="aws", cloud={})
    rent(run, ("i-1", 0.0, 1000.0), price=None)
    assert billing.machines_without_price(run.job) == ["i-1"]
    here = hand_made("job-2")
    assert billing.machines_without_price(here.job) == [] and billing.last_rented_type(here.job) == ""


def test_what_a_job_costs_is_asked_for_before_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machines may have gone while nobody looked after it: they would bill for ever."""
    asked: list[str] = []
    job = SimpleNamespace(spec=SimpleNamespace(backend="local"), refresh=lambda: asked.append("refresh"), name="job-1",
                          backend=SimpleNamespace(DESCRIPTION="this computer"))  # fmt: skip
    monkeypatch.setattr(store, "find", lambda name: job)
    with pytest.raises(ClusterError, match="job-1 ran on this computer"):
        cloud.cost.callback("job-1", None, "table")  # type: ignore[misc]
    assert asked == ["refresh"]
