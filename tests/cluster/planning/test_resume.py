"""The plan of a resume: changed options, the rest of the schedule, and refused options."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.aws_journal import launch_request, request_granted, write_journal
from support.known import known
from support.sandbox import Sandbox
from support.specs import TINY
from support.train_records import epoch_line, make_epoch, make_result, step_line

from cluster.backends import catalog
from cluster.backends.local import LocalBackend
from cluster.backends.planner import MachinePlanner, MachineRequest
from cluster.backends.slurm.backend import read_options
from cluster.cli.app import cli
from cluster.display.plan import rental_question, show_resume_plan
from cluster.errors import BadInput, ClusterError
from cluster.jobs import submit
from cluster.jobs.job import Job
from cluster.machines import trained_files
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resume import plan_resume
from cluster.state.result import write_result
from cluster.state.run_folder import Run, RunFolder
from cluster.state.spec import JobSpec
from cluster.state.states import JobState
from infra.aws.launch_request import Place
from train.recipe import Command, Data, Model, Phase, Recipe
from train.tools.records import decode, encode
from train.tools.text_files import json_roundtrip, to_json_bytes

RECIPE = Recipe(
    name="small",
    data=Data(name="images", root="/data", train=6400, val=100),
    model=Model(name="resnet50"),
    gpus=8,
    types=("p4d.24xlarge",),
    phases=[Phase(epochs=(0, 2), size=128, batch=32, lr=0.1), Phase(epochs=(2, 6), size=224, batch=32, lr=0.01)],
)
STEPS = 25 * 6  # on one machine


def make_run(folder: Path, backend: str, **options: Any) -> Run:
    """Return the run of a job that was planned offline."""
    plan = submit.plan(RECIPE, make_launch_options(backend, **options), offline=True)
    spec = replace(plan.spec, name="job-1", uid="job-1-00000000")
    job_folder = RunFolder(folder / spec.name)
    job_folder.shared.mkdir(parents=True)
    job_folder.write_spec(spec)
    run = Run.read(job_folder.path)
    assert plain(run.spec) == plain(spec), "job.json has all that the plan has"
    return run


def plain(spec: JobSpec) -> Any:
    return json_roundtrip(spec.to_json())


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    open_planner: Callable[[str, MachineRequest], MachinePlanner] = catalog.open_planner
    monkeypatch.setattr(catalog, "open_planner", lambda name, ask: open_planner(name, replace(ask, is_offline=True)))


def test_changed_options_are_shown_and_stored(tmp_path: Path) -> None:
    run = make_run(tmp_path, "slurm", partition="gpu", time_limit="4:00:00")
    unchanged = plan_resume(run, 10, 0.0)
    assert plain(unchanged.spec) == plain(run.spec) and not unchanged.changes
    assert (unchanged.steps_done, unchanged.recipe_schedule.steps) == (10, STEPS)
    plan = plan_resume(run, 10, 0.0, partition="big", max_hours=3.0, machines=2, save_seconds=60.0, in_place="on")
    assert set(plan.changes) == {
        "--partition: gpu -> big", "--max-hours: default -> 3", "--machines: 1 -> 2", "--save-seconds: 30 -> 60",
        "--in-place: auto -> on",
    }  # fmt: skip
    settings = read_options(plan.spec)
    assert (settings.partition, settings.time_limit) == ("big", "4:00:00")
    assert (plan.spec.machines, plan.spec.max_hours, plan.spec.train.save_seconds) == (2, 3.0, 60.0)
    again = plan_resume(Run(plan.spec, run.folder), 20, 0.0, partition="huge")
    assert again.changes == ("--partition: big -> huge",) and again.spec.machines == 2


def test_schedule_stays_the_same_on_other_machines(tmp_path: Path) -> None:
    run = make_run(tmp_path, "slurm")
    for machines, note in ((2, "8 of 16 processes are idle"), (1, "")):
        plan = plan_resume(run, 0, 0.0, machines=machines)
        assert plan.recipe_schedule.steps == STEPS and plan.spec.schedule_gpus == 8 and note in " ".join(plan.notes)
    assert plan_resume(run, 0, 0.0, gpus_per_node=4).spec.procs == 4, "the number of processes follows the machines"
    fixed = make_run(tmp_path / "fixed", "slurm", procs=2)
    assert plan_resume(fixed, 0, 0.0, gpus_per_node=4).spec.procs == 2, "unless it was asked for"


@pytest.mark.parametrize(("options", "message"), [
    ({"data": "/other"}, "^--data: a resume cannot change it; start a new job: imgnet-cluster launch$"),
    ({"types": ("p4d.24xlarge",)}, "^--type: only for machines rented from AWS, not for --slurm$"),
    ({"min_machines": 2}, "^--min-machines 2: the job has fewer machines, 1; lower it, or pass more --machines$"),
    ({"machines": 2, "spares": 10_000}, r"^10002 machines \(--machines plus --spares\) are too many"),
    ({"max_hours": 0.0}, "^Invalid value for '--max-hours': 0.0 is not in the range"),
    ({"lurk": 1}, "^a launch has no option 'lurk'"),
    ({"lr": 0.1}, r"^--lr is the learning rate of added epochs: give --epochs \+N with it$"),
    ({"epochs": "6", "lr": 0.1}, "^--lr is the learning rate of added epochs: there are none"),
])  # fmt: skip
def test_options_that_a_resume_does_not_have_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        plan_resume(make_run(tmp_path, "slurm"), 10, 0.0, **options)


def test_rest_of_a_rented_job_has_time_price_and_limits(
    tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "aws", market="on-demand", max_hours=3.0)
    whole, rest = (plan_resume(run, steps, 0.0).rental_plan for steps in (0, 125))
    assert whole and rest
    assert whole.minutes and rest.minutes and 1 < rest.minutes < whole.minutes
    assert rest.dollars_per_hour and rest.dollars == pytest.approx(rest.dollars_per_hour * rest.minutes / 60)

    plan = plan_resume(run, 125, 7.5, max_dollars=20.0, machines=2)
    assert set(plan.changes) == {"--max-price-total: default -> 20", "--machines: 1 -> 2"}
    assert plan.spec.rental_facts.max_dollars == 20.0 and plan.spec.forecast == run.spec.forecast
    assert rental_question([plan]) == "rent 2 machines for at most $12.50 at today's prices, and for a minute at least?"
    show_resume_plan(plan)
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "the rest about ", "spent before $7.50", "at most $12.50 until power-off", "changed: --machines: 1 -> 2",
        f"job-1 was trained until step 125 of {STEPS}", " 2-6 224 ",
    ):  # fmt: skip
        assert part in shown, (part, shown)
    assert " 0-2 128 " not in shown, "the first phase is done"
    with pytest.raises(BadInput, match=r"^--max-price-total 5: job-1 has cost \$7.50 already; to continue: "):
        plan_resume(run, 125, 7.5, max_dollars=5.0)
    extended = replace(run, spec=replace(run.spec, cloud={**(run.spec.cloud or {}), "max_dollars": 30.0}))
    kept = plan_resume(extended, 125, 7.5)
    assert kept.spec.rental_facts.max_dollars == 30.0 and not kept.changes, "`extend` has set another limit"


def test_rest_of_a_rented_job_is_forecast_from_what_it_has_measured(
    tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "aws", market="on-demand")
    metrics = run.folder.path / "metrics/000001.jsonl"
    metrics.parent.mkdir()
    steps = [step_line(step, times__step_ms=10_000.0, sizes__image=128.0, sizes__batch=32.0) for step in (5, 9)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
    rental = known(plan_resume(run, 9, 0.0, rented_type="p4d.24xlarge").rental_plan)
    expected = 41 * 10 + 4 * 250 * (224 / 128) ** 2
    assert rental.forecast_source == "job-1" and 60 * known(rental.minutes) == pytest.approx(expected, rel=0.1)
    epoch = epoch_line(25, size=128, global_batch=256, steps=25, train_images=6400, where={"steps": 250.0})
    metrics.write_text(json.dumps(epoch) + "\n")
    plans = [plan_resume(run, 25, 0.0, rented_type=type) for type in ("", "p5.48xlarge", "p4d.24xlarge")]
    others, same = plans[:2], plans[2]
    assert [known(plan.rental_plan).forecast_source for plan in others] == ["presets", "presets"]
    rental = known(same.rental_plan)
    # 10 s a step at 128 pixels: one epoch of 25 steps, and four of images with three times the pixels.
    expected = 250 + 4 * 250 * (224 / 128) ** 2
    assert rental.forecast_source == "job-1" and 60 * known(rental.minutes) == pytest.approx(expected, rel=0.1)
    show_resume_plan(same)
    shown = " ".join(capsys.readouterr().out.split())
    assert "(from what job-1 has measured; boot and set-up from presets)" in shown
    both = plan_resume(run, 25, 0.0, rented_type="p4d.24xlarge", types=("p4d.24xlarge", "p5.48xlarge")).rental_plan
    (other,) = [line for label, line in known(both).facts if label == "then"]
    assert "p5.48xlarge" in other and "minutes" not in other, "presets cannot be compared with measurements"
    assert same.spec.forecast == run.spec.forecast, "it compares the whole job with its launch"


def test_what_a_new_market_contradicts_is_dropped(tmp_path: Path, offline: None) -> None:
    run = make_run(tmp_path, "aws", spares=1, late_spares=True)
    plan = plan_resume(run, 10, 0.0, market="on-demand")
    assert set(plan.changes) == {"market: spot -> on-demand", "--late-spares: yes -> no"}
    options = make_launch_options("aws", reservation="cr-0123456789abcdef0").backend_options
    changed: Any = options.changed({"types": ("p4d.24xlarge",)})
    assert (changed.reservation, changed.types) == (None, ("p4d.24xlarge",))


def test_region_of_the_checkpoints_stays(tmp_path: Path, offline: None) -> None:
    run = make_run(tmp_path, "aws", market="on-demand", regions=("us-west-2", "us-east-1"))
    place = (run.spec.cloud or {})["places"][-1]
    assert place["region"] == "us-east-1"
    events = launch_request(1, decode(Place, place), ["0"]), request_granted(1, ("i-1", "0", 0.0))
    write_journal(run.folder.path / "cloud.jsonl", *events)
    plan = plan_resume(run, 10, 0.0)
    assert {place["region"] for place in (plan.spec.cloud or {})["places"]} == {"us-east-1"}
    with pytest.raises(ClusterError, match=r"^--region eu-west-1: the checkpoints of job-1 are in .* us-east-1; leave"):
        plan_resume(run, 10, 0.0, regions=("eu-west-1",))


def test_job_resumes_with_the_plan_or_stays_as_it_was(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = hand_made()
    write_end(made.job)
    monkeypatch.setattr(LocalBackend, "check", lambda *arguments: None)

    def fail(backend: LocalBackend) -> None:
        assert backend.run.spec.machines == 2
        raise ClusterError("no tmux")

    monkeypatch.setattr(LocalBackend, "launch", fail)
    job = made.job
    plan = job.plan_resume(machines=2, max_hours=1.0)
    with pytest.raises(ClusterError, match="no tmux"):
        job.resume(plan)
    assert plain(made.job.spec) == plain(made.spec) and made.job.state == JobState.STOPPED
    monkeypatch.setattr(LocalBackend, "launch", lambda backend: None)
    monkeypatch.setattr("cluster.jobs.job.PROCESS_START_SECONDS", 0.0)
    job.resume(plan)
    assert plain(made.job.spec) == plain(plan.spec) and made.job.spec.max_hours == 1.0


def test_resume_of_a_job_that_is_not_rented_shows_what_is_left(sandbox: Any, hand_made: Any) -> None:
    data = sandbox.path / "drawn"
    write_end(hand_made(data=str(data), copies="").job)
    missing = sandbox.cli("resume", "--dry-run", "job-1")  # what a resume checks, its dry run checks, too
    assert missing.code == 1 and missing.err.startswith(f"error: {data}: there is no such data folder"), missing
    for folder in ("train/cat", "val/cat"):
        (data / folder).mkdir(parents=True)
    shown = sandbox.cli("resume", "--dry-run", "--max-hours", "2", "job-1")
    assert shown.code == 0 and "would resume job-1; nothing was started" in shown.out, shown
    assert "changed: --max-hours: default -> 2" in shown.out
    assert "job-1 has saved no step; it starts again from step 0 of 16" in shown.out


def test_ctrl_c_during_a_resume_says_whether_the_job_may_go_on(
    sandbox: Any, hand_made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(sandbox.path)
    monkeypatch.setattr(LocalBackend, "check", lambda *arguments: None)
    write_end(hand_made().job)
    for owner, method, message in (
        (Job, "claim_machines", "interrupted; nothing was started\n"),
        (LocalBackend, "launch", "interrupted; job-1 may go on; to stop: imgnet-cluster stop job-1\n"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, interrupt)
            ran = CliRunner().invoke(cli, ["resume", "job-1"])
        assert ran.exit_code == 130 and message in ran.output, ran.output


def trained_run(hand_made: Any, epochs: int = 2, **changes: Any) -> Any:
    """Return a job of two epochs that ended after `epochs` of them."""
    made = hand_made(**changes)
    lines = [epoch_line(8 * number, images=60 * number, epoch=number, top1=9.0, top5=50.0) for number in (1, 2)]
    made.write_attempt(1, "0.a")
    made.write_metrics(1, *lines[:epochs])
    made.copy_logs()
    if epochs:
        made.write_checkpoint(1, 8 * epochs)
    rows = [make_epoch(epoch=number, top1=9.0, top5=50.0) for number in range(1, epochs + 1)]
    made.write_shared("result.json", to_json_bytes(encode(make_result(*rows, steps=8 * epochs))))
    made.write_shared("network/classes.json", "{}")
    write_result(made.job.run, made.job.backend)
    trained_files.link_network(made.run_folder.shared, made.run_folder.path)
    assert made.job.state == JobState.DONE
    return made


TO_ZERO = replace(TINY, phases=[replace(TINY.phases[0], lr=(0.1, 0.0), shape="cosine")])
COMMAND = Command(argv=("true",), name="mine")


@pytest.mark.parametrize(("options", "changes", "message"), [
    (("--epochs", "+0"), {}, "'+0' is neither +N, for N more epochs, nor a total such as 30"),
    (("--epochs", "-3"), {}, "'-3' is neither"),
    (("--epochs", "2"), {}, "--epochs 2: job-1 has done 2 of 2 epochs, and its schedule can only become longer: "
     "give +N, or a total of 3 or more"),
    (("--epochs", "+1", "--lr", "0"), {}, "0.0 is not in the range x>0"),
    (("--epochs", "+1"), {"recipe": TO_ZERO}, "ends at a learning rate of 0; give another: --lr LR"),
    (("--epochs", "+1"), {"max_steps": 4}, "job-1 has --max-steps, which distributes its steps over all phases"),
    (("--epochs", "+1"), {"recipe": COMMAND}, "job-1 runs a command of your own, whose epochs this"),
    (("--epochs", "+1"), {"target": "top5=40"}, "job-1 has reached its target top5=40 in epoch 1, where training "
     "ends; give a higher one, or none: --target ''"),
])  # fmt: skip
def test_epochs_that_cannot_be_added_are_refused_in_one_line(
    sandbox: Sandbox, hand_made: Any, options: Any, changes: Any, message: str
) -> None:
    made = trained_run(hand_made, **changes)
    before = tree(sandbox.path / "runs")
    refused = sandbox.cli("resume", "job-1", *options)
    assert refused.code == 2 and message in refused.err and "Traceback" not in refused.err, refused
    assert tree(sandbox.path / "runs") == before and made.job.state == JobState.DONE


def test_epochs_are_not_added_without_checkpoints_or_while_the_job_runs(sandbox: Sandbox, hand_made: Any) -> None:
    made = trained_run(hand_made)
    shutil.rmtree(made.run_folder.shared / "checkpoints")
    gone = sandbox.cli("resume", "job-1", "--epochs", "+1")
    assert (gone.code, gone.err.count("\n")) == (2, 1) and "--epochs +1: the checkpoints of job-1 are gone" in gone.err
    made.run_folder.result_path.unlink()
    made.write_status("training", phase="running")
    with made.hold_agent_lock():
        running = sandbox.cli("resume", "job-1", "--epochs", "+1")
    assert running.code == 2 and running.err.startswith("error: --epochs: job-1 is running; it can get more of them")


def test_job_that_ended_before_its_schedule_can_train_the_rest_of_it(hand_made: Any) -> None:
    made = trained_run(hand_made, epochs=1, recipe=replace(TINY, patience=1))
    (rest, longer) = (made.job.plan_resume(epochs=epochs) for epochs in ("2", "+2"))
    assert (rest.spec.recipe, rest.changes, rest.notes) == (made.spec.recipe, (), ())
    assert longer.spec.recipe.epochs == 4 and longer.changes == ("--epochs: 2 -> 4",)
    assert rest.spec.train.extended_at == longer.spec.train.extended_at == 1


def test_added_epochs_are_planned_and_priced_like_the_rest_of_a_job(
    tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "aws", market="on-demand")
    plan = plan_resume(run, STEPS, 0.0, rented_type="p4d.24xlarge", epochs="+10", target="top5=99")
    assert plan.rental_plan and plan.rental_plan.minutes and plan.rental_plan.dollars
    assert plan.changes == ("--epochs: 6 -> 16", "--target: default -> top5=99")
    assert plan.spec.forecast is None, "it was about the job of before"
    show_resume_plan(plan)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"trained until step {STEPS} of {25 * 16}" in shown and " 6-16 224 " in shown and " 2-6 " not in shown
    assert "epochs 7 to 16 train as the last phase does, at a constant learning rate of 0.01" in shown


def test_job_gets_its_epochs_or_stays_as_it_was(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained_run(hand_made)
    path = made.run_folder.path
    before, spec = tree(path), plain(made.job.spec)
    kept = {path / "network-2/classes.json", path / "machine/shared/result-2.json"}
    monkeypatch.setattr(LocalBackend, "check", lambda *arguments: None)
    monkeypatch.setattr("cluster.jobs.job.PROCESS_START_SECONDS", 0.0)

    def launch(backend: LocalBackend) -> None:
        assert all(file.exists() for file in kept) and not (path / "network").exists()
        assert not (backend.run.folder.shared / "result.json").exists(), "the agents would take it for the end"
        if is_broken:
            raise ClusterError("no tmux")

    monkeypatch.setattr(LocalBackend, "launch", launch)
    is_broken = True
    plan = made.job.plan_resume(epochs="+2")
    with pytest.raises(ClusterError, match="no tmux"):
        made.job.resume(plan)
    assert made.job.state == JobState.DONE and plain(made.job.spec) == spec
    assert before <= tree(path) and not any(file.exists() for file in kept)
    is_broken = False
    made.job.resume(plan)
    assert made.job.spec.recipe.epochs == 4 and not made.job.has_ended


def tree(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")}


def write_end(job: Job) -> None:
    """Let a job end, as if somebody had stopped it."""
    write_result(job.run, job.backend, end_reason="stopped", end_state=JobState.STOPPED)
