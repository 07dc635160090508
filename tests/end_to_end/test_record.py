"""A run that ends at its target, killed on the way and resumed, and its record; by the installed command."""

import json
import os
from typing import Any


def test_a_job_ends_at_its_target_after_a_kill_and_its_record_adds_up(place: Any) -> None:
    """Twenty images of ten classes: half of them are hit by five guesses from the start, 60 % are learnt soon."""
    job = place.launch(400, "--procs", "2", "--save-seconds", "0", "--target", "top5=60")
    place.wait_for(lambda: list((job.folders.shared / "checkpoints/000001").glob("step-*.pt")))
    os.kill(place.agent(), 9)
    place.wait_for(lambda: not place.pids("-m train "), 10)
    assert place.cli("status", "--exit-code").code == 100
    resumed = place.cli("resume", "job-1")
    assert resumed.code == 0 and "top-5 of 60 % reached in epoch " in resumed.out, resumed
    result = job.result
    told, rows = result["target"], result["epochs"]
    assert (result["state"], result["attempts"], told["reached"]) == ("done", 2, True)
    assert told["epoch"] == len(rows) < 400 and rows[-1]["top5"] >= 60
    assert all(row["top5"] < 60 for row in rows[:-1])
    first, second = (json.loads((job.run / f"metrics/00000{one}.jsonl").read_text().splitlines()[0]) for one in (1, 2))
    assert first["begun"] == second["begun"] == result["clock"]["begun"] < first["time"] < second["time"]
    lost = second["time"] - first["time"]
    assert told["seconds"] > lost and told["seconds_all"] > told["seconds"] and told["dollars"] is None
    assert {row["term"] for row in result["against"]} >= {"steps", "all"}
    (line,) = [line for line in place.cli("status").out.splitlines() if line.startswith("target ")]
    assert "reached in epoch" in line

    written = place.cli("record", "-o", "mine", "--author", "Ann")
    assert written.code == 0, written
    table = [line.split("\t") for line in (place.path / "mine.tsv").read_text().splitlines()]
    assert len(table) == len(rows) + 1 and abs(3600 * float(table[-1][1]) - told["seconds"]) < 0.01
    for words in (("mine.tsv",), ("mine.log", "job-1")):
        checked = place.cli("record", "--check", *words)
        assert checked.code == 0, checked
    table[-1][3] = "99.0000"
    (place.path / "mine.tsv").write_text("".join("\t".join(row) + "\n" for row in table))
    bad = place.cli("record", "--check", "mine.tsv")
    assert bad.code == 1 and f"row {len(rows)} (epoch {len(rows)}): top5 99" in bad.err
    assert place.cli("resume", "job-1").code == 1, "it is done"
