"""What the commands print: data on stdout, talk on stderr, JSON that is only JSON, colour for terminals only."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

Fixture = Any


def test_the_newest_job_is_meant_when_none_is_named(finished: Fixture) -> None:
    assert finished.cli("status").out == finished.cli("status", "job-1").out == finished.cli("status", "1").out
    assert finished.cli("status", "--exit-code").code == 0


def test_logs_are_the_bytes_that_the_trainer_wrote(finished: Fixture) -> None:
    logs = finished.path / "runs/job-1/logs"
    for rank in ("0", "1"):
        assert finished.cli("logs", "--rank", rank).out == (logs / f"000001/rank-{rank}.log").read_text()
    assert [json.loads(line)["state"] for line in finished.cli("logs", "--agent").out.splitlines()][-1] == "done"
    assert finished.cli("logs", "-f").code == 0


MEASURED = {"start", "end", "size", "batch", "global_batch", "lr", "steps", "copy", "min_scale", "rect_val"}


@pytest.mark.parametrize("machines, steps", [(1, 16405), (4, 4806), (8, 4224)])  # counted by hand from 2018's tables
def test_plan_as_json_has_the_rows_of_the_table_for_so_many_machines(
    finished: Fixture, machines: int, steps: int
) -> None:
    path = Path(__file__).resolve().parents[3] / "recipes/resnet50_18min.py"
    ran = finished.cli("plan", "-o", "json", "--machines", str(machines), str(path))
    assert ran.code == 0 and ran.err == ""
    plan = json.loads(ran.out)
    assert plan["steps"] == sum(row["steps"] for row in plan["phases"]) == steps
    assert all(row.keys() >= MEASURED and len(row["lr"]) == 2 for row in plan["phases"])
    assert all(row["global_batch"] == row["batch"] * 8 * machines for row in plan["phases"])
    assert [row["start"] for row in plan["phases"]] == [0, *(row["end"] for row in plan["phases"][:-1])]
    assert plan["phases"][0]["copy"] == 160 and plan["phases"][-1]["copy"] is None
    assert [row["rect_val"] for row in plan["phases"]][-1] and plan["notes"] == []


@pytest.mark.parametrize("words", [["ls"], ["status"], ["status", "job-1"]])
def test_json_is_all_that_stands_on_stdout(finished: Fixture, words: list[str]) -> None:
    ran = finished.cli(*words, "-o", "json")
    assert ran.code == 0 and ran.err == ""
    value = json.loads(ran.out)
    one = value[0] if words == ["ls"] else value
    assert (one["job"], one["state"], one["attempt"]) == ("job-1", "done", 1)
    if words != ["ls"]:
        assert one["result"]["top1"] == one["top1"]


def test_no_jobs_are_an_empty_list(place: Fixture) -> None:
    assert json.loads(place.cli("ls", "-o", "json").out) == []
    assert place.cli("ls").code == 0 and not (place.path / "runs").exists()


def test_off_a_terminal_there_is_no_colour_and_no_line_is_cut(finished: Fixture) -> None:
    for words in (["ls"], ["plan", finished.recipe(3)], ["status"]):
        ran = finished.cli(*words, env={"COLUMNS": "40"})
        assert ran.code == 0 and "\x1b" not in ran.out + ran.err and "…" not in ran.out
    assert "\x1b" not in finished.said()


def test_colour_is_for_terminals_and_no_color_is_respected(finished: Fixture, on_terminal: Fixture) -> None:
    green = "\x1b[32m"
    assert green in on_terminal("ls", cwd=finished.path)[1]
    shown = on_terminal("ls", cwd=finished.path, NO_COLOR="1")[1]
    assert "job-1" in shown and green not in shown


@pytest.mark.parametrize("words", [["ls"], ["ls", "-o", "json"], ["status"], ["logs"], ["plan", "tiny_3.py"], ["-h"]])
@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_has_gone_ends_the_command_without_a_word(
    finished: Fixture, words: list[str], buffered: bool
) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # what `| head -1` does, but at once
    env = finished.env if buffered else {**finished.env, "PYTHONUNBUFFERED": "1"}
    ran = subprocess.run(
        [finished.command, *words], stdout=writing, stderr=subprocess.PIPE, text=True, env=env, cwd=finished.path
    )
    os.close(writing)
    assert ran.stderr == "" and ran.returncode in (0, 1)


def test_a_table_that_cannot_be_written_is_one_line(finished: Fixture) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [finished.command, "plan", "tiny_3.py"], stdout=full, stderr=subprocess.PIPE, text=True, env=finished.env,
            cwd=finished.path,
        )  # fmt: skip
    assert ran.returncode == 1 and ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1


def test_a_damaged_job_is_warned_of_and_the_others_are_shown(place: Fixture, hand_made: Fixture) -> None:
    runs = hand_made("job-1").folders.run.parent
    (runs / "job-2").mkdir()
    (runs / "job-2/job.json").write_text('{"name": "job-2", "recipe"')
    ran = place.cli("ls", "-o", "json")
    assert ran.code == 0 and [one["job"] for one in json.loads(ran.out)] == ["job-1"]
    assert ran.err.startswith("warning: ") and ran.err.count("\n") == 1 and "job-2/job.json" in ran.err
    one = place.cli("status", "job-2")
    assert one.code == 1 and one.err.startswith("error: ") and one.err.count("\n") == 1 and "job-2/job.json" in one.err


def test_help_and_version_are_there_for_every_command(place: Fixture) -> None:
    said = place.cli("--help").out
    for command in ("plan", "launch", "ls", "status", "logs", "attach", "tensorboard", "stop", "resume", "data"):
        assert f"  {command} " in said
    assert place.cli("--version").out == "imgnet-cluster, version 0.1.0\n"
    assert "Exit code" in place.cli("launch", "-h").out


def test_data_check_counts_the_images_and_names_the_broken_ones(place: Fixture) -> None:
    few = ["data", "sample", "--train", "10", "--val", "10", "drawn"]
    assert place.cli(*few).code == 0
    good = place.cli("data", "check", "drawn", "-o", "json")
    counted = json.loads(good.out)
    assert good.code == 0 and (counted["train"], counted["val"], len(counted["classes"])) == (10, 10, 10)
    broken = next((place.path / "drawn/val/disc").iterdir())
    broken.write_bytes(broken.read_bytes()[:100])
    bad = place.cli("data", "check", "drawn", "-o", "json")
    assert bad.code == 1 and list(json.loads(bad.out)["bad"]) == [str(Path("drawn/val/disc") / broken.name)]
    talked = place.cli("data", "check", "drawn")
    assert talked.code == 1 and f"broken: drawn/val/disc/{broken.name}" in talked.err
    assert "10 + 9 images, 1 broken" in talked.out
