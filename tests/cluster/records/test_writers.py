"""A run written down as DAWNBench and MLPerf have it, from a made-up run folder; and a typed-over number is found."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.backends import registry
from cluster.cli import record
from cluster.errors import ClusterError
from cluster.planning.resolve import plan
from cluster.records import check, run_data, writers
from cluster.state import attempts
from cluster.state import result as state_result
from train.recipe import Data, Model, Phase, Recipe
from train.recipe.schedule import Epoch, Schedule
from train.recipe.target import Target, target_outcome
from train.tools import filesystem

Fixture = Any
BEGUN, PRICE = 1_700_000_000.0, 2.5
IMAGES, VAL, STEP = 1000, 50, 2.0  # seconds of a step
SAVED, DIED, PAUSE = 68, 72, 15.0  # the step of the last save, the last one before the loss, seconds until the next
RECIPE = Recipe(
    name="paper",
    data=Data(name="drawn", root="nowhere", train=IMAGES, val=VAL),
    model=Model(name="resnet18"),
    gpus=1,
    phases=[
        Phase(epochs=(0, 2), size=64, batch=16, lr=(0.1, 0.4)),
        Phase(epochs=(2, 4), size=96, batch=32, lr=(0.2, 0.02), rect_val=True, validate="last"),
    ],
)
PLAN = Schedule(RECIPE, IMAGES, 2)
ACCURACIES = {1: (20.0, 50.0), 2: (40.0, 72.0), 4: (60.0, 94.0)}
ASK = {
    "region": "r", "zone": "r-1a", "type": "p4d.24xlarge", "market": "spot", "price": PRICE
}  # fmt: skip
REQUEST = {"BlockDeviceMappings": [], "NetworkInterfaces": []}


class Paper:
    """What trainers write, on a clock that only goes on when something is done."""

    def __init__(self) -> None:
        self.now = BEGUN
        self.lines: dict[int, list[dict[str, Any]]] = {}
        self.history: list[dict[str, Any]] = []

    def start(self, attempt: int, step: int, seconds: float) -> None:
        self.now += seconds
        self.lines[attempt] = []
        more = {"begun": BEGUN, "train_images": IMAGES, "val_images": VAL, "world": 2, "gpus": 2, "device": "cuda"}
        more |= {"processor": "NVIDIA A100", "precision": "bfloat16", "versions": {"torch": "2", "imgnet-cluster": "1"}}
        self.line(attempt, "start", step, **more)

    def line(self, attempt: int, kind: str, step: int, **values: Any) -> None:
        said = {"kind": kind, "attempt": attempt, "time": self.now, "step": step, "images": step, **values}
        self.lines[attempt].append(said)

    def steps(self, attempt: int, epoch: Epoch, first: int, last: int) -> None:
        """Train so many steps of an epoch; a line after the first, after each tenth, and after the last."""
        for step in range(first, last):
            self.now += STEP
            if step in (first, last - 1) or step % 10 == 0:
                speed = {
                    "sizes/lr": epoch.lr_at(step),
                    "times/images_per_second": epoch.scheduled_phase.global_batch / STEP,
                }
                self.line(attempt, "train", epoch.first_step + step + 1, epoch=epoch.number + 1, **speed)

    def end(self, attempt: int, epoch: Epoch) -> None:
        """Validate where the recipe says so, and write the epoch's row."""
        number = epoch.number + 1
        top1, top5 = ACCURACIES.get(number, (None, None))
        val = 0.5 if top1 is None else 5.0
        self.now += val
        seconds = epoch.steps * STEP
        row = {
            "epoch": number, "size": epoch.scheduled_phase.phase.size, "global_batch": epoch.scheduled_phase.global_batch, "steps": epoch.steps,
            "lr": epoch.lr_at(epoch.steps - 1), "train_seconds": seconds, "val_seconds": val, "train_images": IMAGES,
            "images_per_second": IMAGES / seconds, "train_loss": 1.0, "train_top1": 10.0, "train_top5": 50.0,
            "top1": top1, "top5": top5, "top1_square": top1, "top5_square": top5, "val_loss": top1 and 2.0,
            "view": None if top1 is None else "rect" if epoch.scheduled_phase.phase.rect_val else "square",
            "val_images": None if top1 is None else VAL, "seconds": seconds + val, "at": self.now,
            "clock": self.now - BEGUN,
        }  # fmt: skip
        self.history.append(row)
        self.line(attempt, "epoch", epoch.first_step + epoch.steps, **row)
        self.now += 0.2  # it is saved

    def all(self, lost: bool = True) -> "Paper":
        """Four epochs; in the third a machine is lost, and steps are done again."""
        one, two, three, four = PLAN.epochs
        self.start(1, 0, 20.0)
        for epoch in (one, two):
            self.steps(1, epoch, 0, epoch.steps)
            self.end(1, epoch)
        begin = three.first_step
        if lost:
            self.steps(1, three, 0, SAVED - begin)
            self.steps(1, three, SAVED - begin, DIED - begin)
            self.start(2, SAVED, PAUSE)
            self.steps(2, three, SAVED - begin, three.steps)
        else:
            self.steps(1, three, 0, three.steps)
        last = 2 if lost else 1
        self.end(last, three)
        self.steps(last, four, 0, four.steps)
        self.end(last, four)
        return self

    def result(self, target: str) -> dict[str, Any]:
        """The trainers' result.json."""
        last = self.history[-1]
        return {
            "recipe": "paper", "state": "done", "top1": last["top1"], "top5": last["top5"], "epochs": self.history,
            "images_per_second": 1.0, "goodput": 0.9, "steps": PLAN.steps, "seconds": {"training": 1.0},
            "clock": {"begun": BEGUN, "seconds": last["clock"]}, "schedule": PLAN.table(), "train_images": IMAGES,
            "target": target_outcome(Target.parse(target), self.history),
        }  # fmt: skip


def made(hand_made: Fixture, backend: str = "local", done: bool = True, target: str = "top5=93", **more: Any) -> Any:
    """A run folder of that backend whose job is over."""
    cloud = {"places": [ASK]} if backend == "aws" else None
    run = hand_made(
        recipe=RECIPE, procs=2, schedule_gpus=2, machines=2, uid="job-1-abc", created=BEGUN - 100.0, backend=backend,
        cloud=cloud, target=target, **more,
    )  # fmt: skip
    paper = Paper().all()
    run.attempt(1, "0.a", "1.b", time=BEGUN)
    run.attempt(2, "0.a", "1.c", time=BEGUN, resume=f"checkpoints/000002/resume-{SAVED:08d}-abcd.pt", reason="lost")
    for folder in (run.folders.path, run.folders.shared):
        (folder / "metrics").mkdir(exist_ok=True)
        for number, rows in paper.lines.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"metrics/{number:06d}.jsonl").write_text(text)
    if backend == "aws":
        journal(run.folders.path)
    run.says("done" if done else "failed", ended=True)
    if done:
        run.shared("result.json", json.dumps(paper.result(target)))
    state_result.write_result(run.folders, run.spec, registry.get_backend(backend))
    return run.job


def journal(run: Path) -> None:
    """Two machines, of which the second was replaced by another after the loss."""
    first = [{"id": f"i-{name}", "name": name, "launched": BEGUN - 90} for name in ("0", "1")]
    lines = [
        {"what": "ask", "number": 1, "place": ASK, "names": ["0", "1"], "request": REQUEST},
        {"what": "granted", "number": 1, "machines": first},
        {"what": "gone", "id": "i-1", "name": "1", "ended": BEGUN + 170, "why": "taken"},
        {"what": "ask", "number": 2, "place": ASK, "names": ["1"], "request": REQUEST},
        {"what": "granted", "number": 2, "machines": [{"id": "i-2", "name": "1", "launched": BEGUN + 175}]},
        {"what": "gone", "id": "i-0", "name": "0", "ended": BEGUN + 300, "why": "done"},
        {"what": "gone", "id": "i-2", "name": "1", "ended": BEGUN + 300, "why": "done"},
    ]  # fmt: skip
    (run / "cloud.jsonl").write_text("".join(json.dumps({"time": BEGUN - 95, **line}) + "\n" for line in lines))


@pytest.fixture
def facts(hand_made: Fixture) -> dict[str, Any]:
    """What a rented job ran."""
    return run_data.collect_run_data(made(hand_made, "aws"))


def wrong(**how: Any) -> list[str]:
    return list(check.find_problems(**how))


def written(entry: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(entry)))


# --- what is written ------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_validated_epoch_with_hours_from_the_start_of_loading(facts: Any) -> None:
    lines = writers.render_tsv(facts).splitlines()
    assert lines[0] == "epoch\thours\ttop1Accuracy\ttop5Accuracy"
    rows = [line.split("\t") for line in lines[1:]]
    assert [(row[0], float(row[2]), float(row[3])) for row in rows] == [("1", 20, 50), ("2", 40, 72), ("4", 60, 94)]
    seconds = 20 + 32 * STEP + 5.0  # loading and the rest before the first step, 32 steps, validation
    assert float(rows[0][1]) == pytest.approx(seconds / 3600, abs=1e-6)


def test_the_json_has_dawnbench_s_fields_hardware_and_price_from_what_was_rented(facts: Any) -> None:
    entry = writers.dawnbench_entry(
        facts, author="Ann", email="ann@example.org", code_url="https://example.org/x", log_filename="x.log"
    )
    assert tuple(entry) == writers.ENTRY_FIELDS
    assert (entry["author"], entry["authorEmail"], entry["codeURL"]) == (
        "Ann",
        "ann@example.org",
        "https://example.org/x",
    )
    assert (entry["model"], entry["timestamp"], entry["logFilename"]) == ("resnet18", "2023-11-14", "x.log")
    assert entry["hardware"] == "2 x p4d.24xlarge (8 x A100), AWS r-1a spot; 2 GPUs on NVIDIA A100"
    assert entry["framework"] == "imgnet-cluster 1, PyTorch 2" and entry["costPerHour"] == 2 * PRICE
    misc = entry["misc"]
    assert misc["cost"]["dollars"] == pytest.approx(misc["hours"] * 2 * PRICE)
    assert misc["cost"]["billed"] == pytest.approx((390 + 260 + 125) * PRICE / 3600)
    assert (misc["seconds_to_loading"], misc["seconds_to_first_step"]) == (100.0, 20.0)


def test_the_schedule_is_the_one_that_was_executed_also_over_a_loss(facts: Any) -> None:
    first, second = writers.dawnbench_entry(facts)["misc"]["schedule"]
    assert (first["start"], first["end"], first["steps"], first["global_batch"]) == (0, 2, 64, 32)
    assert (second["start"], second["end"], second["steps"], second["global_batch"]) == (2, 4, 32, 64)
    assert first["lr"] == pytest.approx([0.2, 0.8]) and second["lr"] == pytest.approx([0.4, 0.04])
    assert first["lr_per_256"] == pytest.approx([1.6, 6.4]) and (second["shape"], second["rect_val"]) == (
        "linear",
        True,
    )
    rows = writers.dawnbench_entry(facts)["misc"]["epochs"]
    assert [(row["epoch"], row["attempt"], row["step"]) for row in rows] == [
        (1, 1, 32),
        (2, 1, 64),
        (3, 2, 80),
        (4, 2, 96),
    ]
    (_, again) = writers.dawnbench_entry(facts)["misc"]["attempts"]
    assert again["seconds_lost"] == pytest.approx((DIED - SAVED) * STEP + PAUSE + STEP)
    assert (again["machines"], again["processes"], again["reason"]) == (["0", "1"], 2, "lost")


def test_steps_beyond_the_save_that_was_gone_on_from_do_not_count(hand_made: Fixture) -> None:
    job = made(hand_made)
    lines = run_data.effective_metrics(job, {one.number: one for one in attempts.history(job.run_folder.shared)})
    steps = [(row["attempt"], row["step"]) for row in lines if row["kind"] == "train"]
    assert max(step for attempt, step in steps if attempt == 1) == SAVED
    assert min(step for attempt, step in steps if attempt == 2) == SAVED + 1


def test_what_nobody_knows_is_null_on_machines_of_one_s_own(hand_made: Fixture) -> None:
    entry = writers.dawnbench_entry(run_data.collect_run_data(made(hand_made)))
    assert entry["author"] is entry["authorEmail"] is entry["codeURL"] is entry["logFilename"] is None
    assert entry["costPerHour"] is None and entry["misc"]["cost"] == {"dollars": None, "billed": None}
    assert entry["hardware"] == "2 machines; 2 GPUs on NVIDIA A100"
    assert wrong(entry=written(entry)) == []


def test_a_machine_of_unknown_price_leaves_the_price_unknown(hand_made: Fixture) -> None:
    job = made(hand_made, "aws")
    path = job.path / "cloud.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first.replace(f'"price": {PRICE}', '"price": null'), *others, ""]))
    entry = writers.dawnbench_entry(run_data.collect_run_data(job))
    assert entry["costPerHour"] is None and entry["misc"]["cost"] == {"dollars": None, "billed": None}
    assert wrong(entry=written(entry)) == []


def test_the_log_is_mlperf_s_with_the_times_of_the_run(facts: Any) -> None:
    said = [json.loads(line.removeprefix(":::MLLOG ")) for line in writers.render_mlperf_log(facts).splitlines()]
    keys = [one["key"] for one in said]
    assert keys[0] == "run_start" and keys[-1] == "run_stop" and said[-1]["metadata"] == {"status": "success"}
    assert (said[0]["time_ms"], said[-1]["time_ms"]) == (1000 * BEGUN, round(1000 * facts["epochs"][-1]["at"]))
    settings = {one["key"]: one["value"] for one in said if one["time_ms"] == said[0]["time_ms"]}
    assert (settings["global_batch_size"], settings["opt_name"], settings["seed"]) == (32, "sgd", 0)
    assert settings["sgd_opt_base_learning_rate"] == pytest.approx(0.8) and settings["sgd_opt_momentum"] == 0.9
    assert settings["train_samples"] == IMAGES and settings["eval_samples"] == VAL
    hits = [(one["metadata"]["epoch_num"], one["value"]) for one in said if one["key"] == "eval_accuracy"]
    assert hits == [(1, 0.2), (2, 0.4), (4, 0.6)]
    assert keys.count("epoch_start") == keys.count("epoch_stop") == 4 and keys.count("global_batch_size") == 2
    begin = next(one["time_ms"] for one in said if one["key"] == "epoch_start")
    assert begin == pytest.approx(1000 * (BEGUN + 20), abs=1)


def test_a_run_that_missed_its_target_was_aborted(hand_made: Fixture) -> None:
    assert '"status": "aborted"' in writers.render_mlperf_log(
        run_data.collect_run_data(made(hand_made, target="top5=99"))
    )


def test_a_lost_line_is_taken_from_the_trainers_history_and_its_rates_are_not_known(hand_made: Fixture) -> None:
    job = made(hand_made)
    path = job.path / "metrics/000001.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] != 64]
    path.write_text("\n".join(kept) + "\n")
    facts = run_data.collect_run_data(job)
    assert [row["epoch"] for row in facts["epochs"]] == [1, 2, 3, 4]
    assert facts["epochs"][1]["last_lr"] is None and facts["epochs"][1]["trained_at"] is None
    assert (
        wrong(
            table=writers.render_tsv(facts),
            entry=written(writers.dawnbench_entry(facts)),
            log=writers.render_mlperf_log(facts),
            run_data=facts,
        )
        == []
    )


@pytest.mark.parametrize(
    "name, kept",
    [
        ("sgd", ("momentum", "nesterov", "norm_decay", "bias_decay")),
        ("lars", ("momentum", "nesterov", "trust")),
        ("lamb", ("betas", "eps")),
        ("adamw", ("betas", "eps", "norm_decay", "bias_decay")),
        ("theirs.optim:build", ("momentum", "nesterov", "betas", "eps", "trust", "norm_decay", "bias_decay")),
    ],
)
def test_of_an_optimizer_stands_there_what_it_uses_and_the_schedule_is_made_again_of_it(
    facts: Any, name: str, kept: tuple[str, ...]
) -> None:
    facts["recipe"]["optim"]["name"] = name
    entry = written(writers.dawnbench_entry(facts))
    always = {"name", "weight_decay", "loss", "label_smoothing", "scaling"}
    assert entry["misc"]["optimizer"].keys() == entry["misc"]["recipe"]["optim"].keys() == always | {*kept}
    assert wrong(table=writers.render_tsv(facts), entry=entry, log=writers.render_mlperf_log(facts), run_data=facts) == []
    assert wrong(entry=entry, log=writers.render_mlperf_log(facts)) == []


# --- what became of a target ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["local", "aws"])
def test_the_result_says_seconds_and_dollars_to_the_target(hand_made: Fixture, backend: str) -> None:
    job = made(hand_made, backend)
    told, row = job.result["target"], job.result["epochs"][-1]
    assert (told["metric"], told["goal"], told["reached"], told["epoch"], told["best"]) == ("top5", 93.0, True, 4, 94.0)
    assert told["seconds"] == row["clock"] and told["minutes"] == row["clock"] / 60
    assert told["seconds_all"] == pytest.approx(row["clock"] + 100)
    spent = (row["clock"] + 90 + 260 + row["clock"] - 175) * PRICE / 3600
    assert told["dollars"] == (None if backend == "local" else pytest.approx(spent, abs=2 * PRICE / 3600))


def test_status_says_what_became_of_the_target(hand_made: Fixture, place: Any) -> None:
    made(hand_made)
    shown = place.cli("status", "job-1")
    assert "top-5 of 93 % reached in epoch 4, " in shown.out and shown.code == 0


def test_of_a_job_that_failed_the_rows_until_then_are_told(hand_made: Fixture) -> None:
    job = made(hand_made, done=False, target="top5=99")
    assert job.state == "failed" and job.result["target"]["reached"] is False
    assert job.result["target"]["best"] == 94.0
    facts = run_data.collect_run_data(job)
    assert wrong(table=writers.render_tsv(facts), entry=written(writers.dawnbench_entry(facts)), run_data=facts) == []


def test_a_target_is_asked_for_at_the_launch_and_refused_in_one_line(place: Any) -> None:
    assert plan(RECIPE).spec.target == "" and plan(RECIPE, target="top5=93.0").spec.target == "top5=93"
    shown = place.cli("launch", "--local", "--dry-run", "--target", "93", place.recipe(1))
    assert shown.err == "error: '93' is no target; they look like top5=93 or top1=76.1, in percent\n"
    assert shown.code == 2


def test_while_it_runs_the_target_is_told_as_it_was_asked_for(hand_made: Fixture) -> None:
    run = hand_made(target="top5=93")
    run.says("training", step=8, steps=16)
    with run.agent_at_work():
        assert run.job.status()["target"] == "top5=93"
        with pytest.raises(ClusterError, match="job-1 is running; a record can only be made of a job that has ended"):
            run_data.collect_run_data(run.job)


# --- the check ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["local", "aws"])
def test_what_was_written_adds_up(hand_made: Fixture, backend: str) -> None:
    facts = run_data.collect_run_data(made(hand_made, backend))
    entry = written(writers.dawnbench_entry(facts, author="Ann"))
    assert wrong(table=writers.render_tsv(facts), entry=entry, log=writers.render_mlperf_log(facts), run_data=facts) == []


def cell(row: int, column: int, text: str) -> Callable[[str], str]:
    """Type over a cell of the TSV."""

    def typed(table: str) -> str:
        lines = [line.split("\t") for line in table.splitlines()]
        lines[row][column] = text
        return "\n".join("\t".join(line) for line in lines) + "\n"

    return typed


def without(place: int) -> Callable[[str], str]:
    return lambda table: "".join(line for n, line in enumerate(table.splitlines(keepends=True)) if n != place)


@pytest.mark.parametrize(
    "typed, said",
    [
        (cell(0, 1, "minutes"), ".*not the columns"),
        (cell(2, 0, "1"), "row 2 (epoch 1): comes after epoch 1"),
        (cell(2, 0, "2.5"), "row 2 (epoch 2.5): .* is not a whole number"),
        (cell(3, 1, "0.03"), "row 3 (epoch 4): 0.03 hours come after"),
        (cell(1, 1, "nan"), "row 1 (epoch 1)"),
        (cell(3, 2, "94.5"), "row 3 (epoch 4): top-1 94.5 and top-5 94.0"),
        (cell(3, 3, "104"), "row 3 (epoch 4): top-1"),
        (cell(2, 3, ""), "row 2: .* is not four numbers"),
        (lambda table: table.splitlines()[0], "there are no rows"),
    ],
)
def test_a_table_is_checked_by_itself(facts: Any, typed: Any, said: str) -> None:
    found = wrong(table=typed(writers.render_tsv(facts)))
    assert found and re.match(said.replace("(", r"\(").replace(")", r"\)"), found[0]), found


@pytest.mark.parametrize(
    "typed, said",
    [
        (cell(2, 0, "3"), "row 2 (epoch 3): the run validated epoch 2 there"),
        (cell(3, 1, "0.079"), "row 3 (epoch 4): 0.079 hours; the run says"),
        (cell(3, 2, "61"), "row 3 (epoch 4): top1 61; the run says 60"),
        (cell(3, 3, "94.002"), "row 3 (epoch 4): top5 94.002; the run says 94"),
        (without(2), "row 2 (epoch 4): the run validated epoch 2 there"),
        (without(3), "row 3: the run validated 3 epochs, the table has 2"),
    ],
)
@pytest.mark.parametrize("beside", ["json", "job"])
def test_a_number_typed_over_in_the_table_is_found_by_the_json_or_the_job(
    facts: Any, beside: str, typed: Any, said: str
) -> None:
    how = {"entry": written(writers.dawnbench_entry(facts))} if beside == "json" else {"run_data": facts}
    assert wrong(table=typed(writers.render_tsv(facts)), **how)[0].startswith(said)


def at(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Type over what stands at a place such as misc.epochs.0.steps."""

    def typed(entry: dict[str, Any]) -> None:
        *way, last = [int(one) if one.isdigit() else one for one in path.split(".")]
        inside: Any = entry
        for one in way:
            inside = inside[one]
        inside[last] = value

    return typed


MUTATIONS = [
    ("misc.epochs.0.steps", 31, "epoch 1: 31 steps; 1000 images in batches of 32 are 32"),
    ("misc.epochs.2.step", 81, "epoch 3: ends at step 81"),
    ("misc.epochs.2.global_batch", 128, "epoch 3: 96 pixels and a batch of 128; the recipe has 96 and 64"),
    ("misc.epochs.2.size", 128, "epoch 3: 128 pixels"),
    ("misc.epochs.1.images", 999, "epoch 2: 999 images"),
    ("misc.epochs.1.epoch", 3, "epoch 3: is not epoch number 2"),
    ("misc.epochs.0.lr.0", 0.1, "epoch 1: the learning rate of its first step is 0.1; by the recipe it is 0.2"),
    ("misc.epochs.3.lr.1", 0.02, "epoch 4: the learning rate of its last step is 0.02; by the recipe it is 0.04"),
    ("misc.epochs.1.images_per_second", 17.0, "epoch 2: 17 images/s"),
    ("misc.epochs.1.train_seconds", 60.0, "epoch 2: "),
    ("misc.epochs.1.val_seconds", 60.0, "epoch 2: the clock says 69.2 s for 64.0 s of steps, 60.0 s of validation"),
    ("misc.epochs.1.seconds", 100.0, "epoch 2: the clock says 11.0 s"),
    ("misc.epochs.3.seconds", 200.0, "epoch 4: the clock says"),
    ("misc.epochs.3.seconds", 400.0, "epoch 4: the clock says"),
    ("misc.epochs.3.top5", 94.5, "epoch 4: top5 94.5 % of 50 images is not a whole number of images"),
    ("misc.epochs.3.top1", 96.0, "epoch 4: top-1 96.0 and top-5 94.0"),
    ("misc.epochs.3.top1_square", 99.0, "epoch 4: top-1 99.0 and top-5 94.0 of the square"),
    ("misc.epochs.3.top5_square", 101.0, "epoch 4: top-1 60.0 and top-5 101.0 of the square"),
    ("misc.epochs.3.top1_square", 59.0, "epoch 4: top1_square 59 % of 50 images is not a whole number"),
    ("misc.epochs.3.top5_square", None, "epoch 4: top-1 60.0 and top-5 None of the square"),
    ("misc.epochs.2.top1_square", 50.0, "epoch 3: "),
    ("misc.epochs.2.view", "rect", "epoch 3: view rect without a validation"),
    ("misc.epochs.3.view", "square", "epoch 4: view square; by the recipe it is rect"),
    ("misc.epochs.0.view", "rect", "epoch 1: view rect; by the recipe it is square"),
    ("misc.epochs.0.top1_square", 18.0, "epoch 1: top1 20 and top1_square 18 are of the same view"),
    ("misc.epochs.1.val_seconds", -0.2, "misc.epochs[1].val_seconds is -0.2; a time cannot be negative"),
    ("misc.seconds_to_loading", -100.0, "misc.seconds_to_loading is -100"),
    ("misc.attempts.1.seconds_lost", -1, "misc.attempts[1].seconds_lost is -1"),
    ("misc.recipe.phases.1.epochs.1", 10**30, "misc.recipe: 1000000000000000000000000000000 epochs; no run has more"),
    ("misc.epochs.3.val_images", 49, "epoch 4: validated on 49 images of 50"),
    ("misc.seconds_to_first_step", 1.0, "epoch 1: the clock says"),
    ("misc.schedule.0.lr", [0.1, 0.8], "misc.schedule does not agree with the epochs"),
    ("misc.schedule.1.steps", 33, "misc.schedule does not agree"),
    ("misc.optimizer.momentum", 0.95, "misc.optimizer is not the recipe's"),
    ("misc.seed", 1, "misc.seed is not the recipe's"),
    ("model", "resnet50", "model resnet50: the recipe has resnet18"),
    ("misc.hours", 0.05, "misc.hours 0.05: the last validated epoch ends at"),
    ("misc.cost.dollars", 0.3, "misc.cost.dollars 0.3: "),
    ("misc.cost.dollars", None, "costPerHour 5.0 and misc.cost.dollars None"),
    ("costPerHour", 2.5, "misc.cost.dollars "),
    ("misc.machines.0.price", 1.0, "costPerHour 5.0: the machines at work cost 3.5"),
    ("misc.target.epoch", 2, "misc.target: epoch 2 for top5 93; by the rows it is epoch 4"),
    ("misc.target.reached", False, "misc.target: epoch 4"),
    ("misc.target.seconds", 200.0, "misc.target: 200.00 s; epoch 4 ended at"),
    ("misc.target.minutes", 2.0, "misc.target: 2.0000 minutes"),
    ("misc.recipe.phases.0.lr", [0.1, 0.5], "epoch 1: the learning rate of its last step"),
    ("misc.gpus", 4, "epoch 1: 64 pixels and a batch of 32; the recipe has 64 and 64"),
    ("misc.images.train", 1200, "epoch 1: 32 steps; 1200 images in batches of 32 are 38"),
]


@pytest.mark.parametrize("path, value, said", MUTATIONS, ids=[f"{path}={value}" for path, value, _ in MUTATIONS])
def test_a_number_typed_over_in_the_json_is_found_without_the_job_and_with_it(
    facts: Any, path: str, value: Any, said: str
) -> None:
    entry = written(writers.dawnbench_entry(facts))
    at(path, value)(entry)
    found = wrong(entry=entry)
    assert found and found[0].startswith(said), found
    assert wrong(entry=entry, run_data=facts)


@pytest.mark.parametrize(
    "path, value, said",
    [
        ("hardware", "8 x H100", 'hardware is "8 x H100"; the run says "2 x p4d.24xlarge'),
        ("framework", "PyTorch 9", "framework is"),
        ("timestamp", "2030-01-01", 'timestamp is "2030-01-01"; the run says "2023-11-14"'),
        ("misc.precision", "float32", 'misc.precision is "float32"; the run says "bfloat16"'),
        ("misc.epochs.0.train_loss", 0.5, "misc.epochs[0].train_loss is 0.5; the run says 1.0"),
        ("misc.attempts.1.reason", "", 'misc.attempts[1].reason is ""; the run says "lost"'),
        ("misc.commit", "abc", 'misc.commit is "abc"'),
        ("misc.machines.1.market", "on-demand", "misc.machines[1].market"),
    ],
)
def test_what_only_the_job_can_know_is_found_with_it(facts: Any, path: str, value: Any, said: str) -> None:
    entry = written(writers.dawnbench_entry(facts))
    at(path, value)(entry)
    assert wrong(entry=entry) == [] and wrong(entry=entry, run_data=facts)[0].startswith(said)


def test_who_wrote_it_down_is_theirs_to_say_and_a_bill_may_go_on(facts: Any) -> None:
    entry = written(writers.dawnbench_entry(facts, author="Ann", code_url="https://example.org"))
    for path, value in (("logFilename", "x.log"), ("misc.cost.billed", 9.0), ("misc.machines.0.seconds", 1.0)):
        at(path, value)(entry)
    assert wrong(entry=entry, run_data=facts) == []


@pytest.mark.parametrize(
    "typed, said",
    [
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line"),
        (lambda lines: [*lines[:-2], lines[-1]], "line"),
        (lambda lines: lines[:-1], "line"),
        (lambda lines: [*lines[:3], "hello", *lines[3:]], "line 4: is not :::MLLOG"),
        (lambda lines: [one.replace('"value": 0.6', '"value": 0.95') for one in lines], "line"),
        (lambda lines: [one.replace('"value": 0.6', '"value": 0.61') for one in lines], "line"),
        (lambda lines: [one.replace("lars", "sgd").replace('"value": 0.9', '"value": 0.8') for one in lines], "line"),
    ],
)
def test_a_log_that_was_changed_is_found(facts: Any, typed: Any, said: str) -> None:
    lines = writers.render_mlperf_log(facts).splitlines()
    found = wrong(log="\n".join(typed(lines)) + "\n", run_data=facts)
    assert found and found[0].startswith(said), found


def test_a_log_is_checked_by_itself_for_order_and_ends(facts: Any) -> None:
    lines = writers.render_mlperf_log(facts).splitlines()
    assert wrong(log="\n".join(lines)) == []
    assert wrong(log="\n".join([lines[0], lines[-1], *lines[1:-1]]))[0].endswith("is earlier than the line above it")
    assert "run has a beginning and no end" in wrong(log="\n".join(lines[:-1]))[0]
    assert "ends an interval that has no beginning" in wrong(log="\n".join(lines[1:]))[0]


def heard(key: str, old: str, new: str) -> Callable[[str], str]:
    """Type over a part of the last line with that key."""

    def typed(log: str) -> str:
        lines = log.splitlines()
        place = max(n for n, line in enumerate(lines) if f'"key": "{key}"' in line)
        assert old in lines[place]
        lines[place] = lines[place].replace(old, new)
        return "\n".join(lines) + "\n"

    return typed


@pytest.mark.parametrize(
    "typed, said",
    [
        (heard("eval_accuracy", '"value": 0.6', '"value": 0.7'), "top1 0.7; the file beside it has 60.0000 % for epoch 4"),
        (heard("eval_accuracy", '"top5": 0.94', '"top5": 0.96'), "top5 0.96; the file beside it has 94.0000 % for epoch 4"),
        (heard("eval_accuracy", ', "top5": 0.94', ""), "top5 None"),
        (heard("eval_accuracy", '"epoch_num": 4', '"epoch_num": 3'), "epoch 3; the file beside it has epoch 4 there"),
        (heard("eval_accuracy", '"eval_accuracy"', '"eval_loss"'), "the log has 2 lines of it; the file beside it has 3 validated epochs"),
        (lambda log: log.replace(f'"time_ms": {1000 * BEGUN:.0f}', f'"time_ms": {1000 * BEGUN - 50:.0f}'), "s after"),
    ],
)
@pytest.mark.parametrize("beside", ["json", "tsv"])
def test_an_accuracy_typed_over_in_the_log_is_found_by_the_json_or_the_tsv(
    facts: Any, beside: str, typed: Any, said: str
) -> None:
    log = writers.render_mlperf_log(facts)
    how: Any = (
        {"entry": written(writers.dawnbench_entry(facts))} if beside == "json" else {"table": writers.render_tsv(facts)}
    )
    assert wrong(log=log, **how) == []
    found = wrong(log=typed(log), **how)
    assert found and found[0].startswith("the log, ") and said in found[0], found


@pytest.mark.parametrize(
    "typed, said",
    [
        (heard("seed", '"value": 0', '"value": 1'), "(seed): 1; the JSON says 0"),
        (heard("sgd_opt_momentum", "0.9", "0.8"), "(sgd_opt_momentum): 0.8; the JSON says 0.9"),
        (heard("train_samples", '"train_samples"', '"samples"'), "train_samples: is missing"),
        (heard("global_batch_size", '"value": 64', '"value": 128'), "(global_batch_size): 128; the JSON says 64"),
        (heard("run_stop", "success", "aborted"), "(run_stop): aborted; the JSON says success"),
    ],
)
def test_a_setting_typed_over_in_the_log_is_found_by_the_json(facts: Any, typed: Any, said: str) -> None:
    found = wrong(log=typed(writers.render_mlperf_log(facts)), entry=written(writers.dawnbench_entry(facts)))
    assert found and said in found[0], found


def test_a_day_that_is_not_the_log_s_is_found(facts: Any) -> None:
    entry = written(writers.dawnbench_entry(facts)) | {"timestamp": "2023-11-15"}
    assert (
        "on 2023-11-14; the timestamp of the JSON is 2023-11-15"
        in wrong(entry=entry, log=writers.render_mlperf_log(facts))[0]
    )


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[" * 100_000])
def test_a_number_that_json_does_not_know_is_refused_where_it_is_read(facts: Any, text: str) -> None:
    with pytest.raises(ValueError):
        check.parse_json(f'{{"misc": {{"hours": {text}}}}}')
    log = writers.render_mlperf_log(facts).splitlines()
    log[1] = f':::MLLOG {{"time_ms": {text}, "event_type": "POINT_IN_TIME", "key": "x", "value": 1, "metadata": {{}}}}'
    assert wrong(log="\n".join(log))[0].startswith("line 2: is not :::MLLOG and a JSON object")


def test_what_can_be_read_but_is_too_deep_to_be_compared_is_one_line(facts: Any) -> None:
    entry, deep = written(writers.dawnbench_entry(facts)), list[Any]()
    for _ in range(5000):
        deep = [deep]
    at("misc.processor", deep)(entry)
    with (
        pytest.raises(ClusterError, match=r"^mine: damaged \(RecursionError: "),
        record._damage_as_cluster_error("mine: damaged"),
    ):
        wrong(entry=entry)


# --- the run folder against itself ----------------------------------------------------------------------------------


def retyped(path: Path, old: str, new: str) -> None:
    """Type over the last place where that stands in a file."""
    before, found, after = path.read_text().rpartition(old)
    assert found
    path.write_text(before + new + after)


@pytest.mark.parametrize("name", ["metrics/000002.jsonl", "result.json"])
@pytest.mark.parametrize(
    "old, new, said",
    [
        ('"top1": 60.0', '"top1": 70.0', "epoch 4: top1 is"),
        ('"top5": 94.0', '"top5": 96.0', "epoch 4: top5 is"),
        ('"top1_square": 60.0', '"top1_square": 50.0', "epoch 4: top1_square is"),
        ('"top5_square": 94.0', '"top5_square": 90.0', "epoch 4: top5_square is"),
        ('"val_loss": 2.0', '"val_loss": 1.0', "epoch 4: val_loss is"),
        ('"train_loss": 1.0', '"train_loss": NaN', "epoch 4: train_loss is"),
        ('"view": "rect"', '"view": "square"', "epoch 4: view is"),
        ('"steps": 16', '"steps": 15', "epoch 4: steps is"),
        ('"seconds": 37.0', '"seconds": 36.0', "epoch 4: seconds is"),
        ('"lr": 0.04', '"lr": 0.03', "epoch 4: lr is"),
    ],
)
def test_an_epoch_that_the_run_folder_tells_in_two_ways_is_found(
    hand_made: Fixture, name: str, old: str, new: str, said: str
) -> None:
    job = made(hand_made)
    result = json.loads((job.path / "result.json").read_text())
    del result["target"]["best"]  # an accuracy too
    rows = result.pop("epochs")
    (job.path / "result.json").write_text(json.dumps({**result, "schedule": [], "epochs": rows}))
    assert list(check.check_metrics_against_result(run_data.collect_run_data(job))) == []
    retyped(job.path / name, old, new)
    facts = run_data.collect_run_data(job)
    found = wrong(run_data=facts)
    assert found and found[0].startswith(said) and "result.json says" in found[0], found


def test_a_result_without_an_epoch_of_the_metrics_or_with_another_end_is_found(hand_made: Fixture) -> None:
    job = made(hand_made)
    result = json.loads((job.path / "result.json").read_text())
    path = job.path / "result.json"
    path.write_text(json.dumps({**result, "top1": 61.0}))
    assert wrong(run_data=run_data.collect_run_data(job)) == ["result.json: top1 is 61.0; its epoch 4 has 60.0"]
    path.write_text(json.dumps({**result, "epochs": result["epochs"][:2], "top1": 40.0, "top5": 72.0}))
    assert (
        wrong(run_data=run_data.collect_run_data(job))[0] == "epoch 3: is in the metrics, but not in result.json"
    )


def test_of_a_run_folder_that_tells_two_things_nothing_is_written(hand_made: Fixture, place: Any) -> None:
    job = made(hand_made)
    retyped(job.path / "metrics/000002.jsonl", '"top1": 60.0', '"top1": 70.0')
    for words in (("job-1",), ("job-1", "-o", "mine"), ("--check", "job-1")):
        shown = place.cli("record", *words)
        assert shown.code == 1 and shown.out == "" and len(shown.err.splitlines()) == 1
        assert "job-1: epoch 4: top1 is 70.0 in the metrics; result.json says 60.0" in shown.err
    assert not list(place.path.glob("mine*"))


@pytest.mark.parametrize("name", ["result", "noted"])
def test_a_clock_that_says_two_things_in_the_run_folder_is_found(facts: Any, name: str) -> None:
    bent = copy.deepcopy(facts)
    if name == "result":
        bent["result_seconds"] += 2.0
    else:
        bent["epochs"][1]["noted_at"] += 2.0
    assert wrong(run_data=facts) == [] and len(wrong(run_data=bent)) == 1


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_all_three_and_finds_the_job_of_a_file(hand_made: Fixture, place: Any) -> None:
    made(hand_made)
    shown = place.cli("record", "job-1", "-o", "mine", "--author", "Ann")
    assert shown.code == 0 and shown.out.split("written: ")[1:] == ["mine.tsv\n", "mine.json\n", "mine.log\n"]
    entry = json.loads((place.path / "mine.json").read_text())
    assert (entry["author"], entry["logFilename"]) == ("Ann", "mine.log")
    assert place.cli("record").out == (place.path / "mine.tsv").read_text()
    for name in ("mine.tsv", "mine.json", "job-1"):
        checked = place.cli("record", "--check", name)
        assert checked.code == 0 and "add up" in checked.out and "as job-1 ran" in checked.out, checked
    assert place.cli("record", "--check", "mine.log", "job-1").code == 0
    text = (place.path / "mine.tsv").read_text()
    (place.path / "mine.tsv").write_text(text.replace("94.0000", "95.0000"))
    bad = place.cli("record", "--check", "mine.tsv")
    assert bad.code == 1 and bad.err == "error: mine.tsv: row 3 (epoch 4): top5 95; the run says 94.0000\n"
    (place.path / "alone.tsv").write_text(text)
    assert "cannot be checked without" in place.cli("record", "--check", "alone.tsv").out
    (place.path / "mine.json").write_text("{}")
    assert place.cli("record", "--check", "mine.json").err.startswith("error: mine.json: the fields version, author")


def test_of_a_job_with_nothing_to_record_there_is_one_clear_line(hand_made: Fixture, place: Any) -> None:
    run = hand_made()
    run.says("failed", reason="rank 1 was killed", ended=True)
    run.attempt(1, "0.a")
    shown = place.cli("record", "job-1")
    assert shown.code == 1 and shown.out == "" and len(shown.err.splitlines()) == 1
    assert "job-1 has validated no epoch, so there is nothing to record; it is failed: rank 1 was killed" in shown.err


def test_a_job_of_an_older_version_is_refused_in_one_line(hand_made: Fixture) -> None:
    job = made(hand_made)
    for path in (job.path / "metrics").iterdir():
        path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")
    with pytest.raises(ClusterError, match="older version, which did not note when loading began"):
        run_data.collect_run_data(job)


@pytest.mark.parametrize("words", [("--check", "job-1", "-o", "x"), ("--check", "nothing.tsv"), ("job-9",)])
def test_what_cannot_be_done_is_one_line(hand_made: Fixture, place: Any, words: tuple[str, ...]) -> None:
    made(hand_made)
    shown = place.cli("record", *words)
    assert shown.code in (1, 2, 102) and len(shown.err.splitlines()) == 1 and shown.err.startswith("error: ")


@pytest.mark.parametrize("words", [("-o", "."), ("-o", ""), ("-o", "/"), ("-o", ".."), ("--format", "json", "-o", "f")])
def test_a_name_that_no_file_can_have_is_wrong_usage_and_leaves_nothing_behind(
    hand_made: Fixture, place: Any, words: tuple[str, ...]
) -> None:
    made(hand_made)
    (place.path / "f").mkdir()
    before = {*place.path.iterdir(), *place.path.parent.iterdir()}
    shown = place.cli("record", "job-1", *words)
    assert shown.code == 2 and len(shown.err.splitlines()) == 1 and shown.err.startswith("error: -o "), shown
    assert {*place.path.iterdir(), *place.path.parent.iterdir()} == before


def test_a_file_that_cannot_take_a_name_is_removed_and_the_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        filesystem.write_atomic(tmp_path / "folder", b"x")
    assert caught.value.filename == str(tmp_path / "folder") and [*tmp_path.iterdir()] == [tmp_path / "folder"]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        filesystem.write_atomic(tmp_path / "file/name", b"x")
    assert caught.value.filename == str(tmp_path / "file/name")


def test_files_that_were_typed_over_are_one_line_each(hand_made: Fixture, place: Any) -> None:
    job = made(hand_made)
    assert place.cli("record", "job-1", "-o", "mine").code == 0
    shutil.rmtree(job.path)
    whole = place.cli("record", "--check", "mine.log")
    assert whole.code == 0 and "3 validated epochs, 96 steps in" in whole.out and "lines of the log\n" in whole.out
    text = (place.path / "mine.json").read_text()
    deep = text.replace('"author": null', f'"author": {"[" * 50_000}{"]" * 50_000}')
    for typed, said in (
        (re.sub('"hours": [0-9.]+', '"hours": NaN', text), "mine.json: is no JSON: NaN is not a finite number"),
        (text.replace(f'"train": {IMAGES}', '"train": Infinity'), "mine.json: is no JSON: Infinity is not a finite"),
        (text.replace(f'"train": {IMAGES}', f'"train": 1{"0" * 400}'), "is not a record that this program wrote, or damaged (Overflow"),
        (deep, "mine.json: is no JSON: it is nested too deep"),
    ):
        (place.path / "mine.json").write_text(typed)
        shown = place.cli("record", "--check", "mine.json")
        assert shown.code == 1 and len(shown.err.splitlines()) == 1 and said in shown.err, shown
    (place.path / "mine.json").write_text(text)
    retyped(place.path / "mine.log", '"value": 0.6', '"value": 0.7')
    shown = place.cli("record", "--check", "mine.json")
    assert shown.code == 1 and shown.err.startswith("error: mine.json: the log, line "), shown
    (place.path / "mine.log").rename(place.path / "alone.log")
    shown = place.cli("record", "--check", "alone.log")
    assert shown.code == 0 and "accuracies and rates cannot be checked without its JSON" in shown.out, shown
