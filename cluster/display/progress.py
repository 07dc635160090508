"""Follows a running job in the terminal and prints how it ended."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cluster.jobs import billing
from cluster.jobs.job import Job
from train.metrics.text import epoch_header, epoch_line, format_duration
from train.recipe.target import describe_outcome

if TYPE_CHECKING:
    pass
from .status import show_machines, show_timeline
from .tables import STATE_EXIT_CODES, console


def follow(job: Job) -> int:
    """Show a job until it ends: a line for each epoch, and on a terminal a bar. Returns the exit code for its end."""
    from rich.progress import BarColumn, Progress, TextColumn

    out = console()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[right]}"), console=out, transient=True,
        disable=not out.is_terminal,
    )  # fmt: skip
    shown, doing, begun, met = 0, "", (0.0, 0), False
    with bar:
        task = bar.add_task(job.name, total=None, right="")
        while True:
            job.refresh()
            ended, status = job.has_ended, job.status()
            rows = job.metric_rows("epoch")
            if not met and status["doing"] == "training" and len(job.spec.machine_names) > 1:
                met = True
                show_machines(job.machine_details())
            for row in rows[shown:]:
                if shown == 0:
                    out.print(epoch_header())
                out.print(epoch_line(row))
                shown += 1
            if status["doing"] != doing and not ended:
                doing = status["doing"]
                if doing and not out.is_terminal and doing not in ("training", "validating", "done"):
                    out.print(f"{time.strftime('%H:%M:%S')} {doing}")
            step = status["step"] or 0
            if doing not in ("training", "validating"):
                begun = time.monotonic(), step
            right = _progress_text(status, *begun)
            bar.update(task, description=f"{job.name} {doing}", completed=step, total=status["steps"], right=right)
            if ended:
                break
            time.sleep(0.3)
    show_outcome(job)
    return STATE_EXIT_CODES[job.state]


def _progress_text(status: Mapping[str, Any], since: float, first_step: int) -> str:
    """What stands beside the bar: steps, speed, and the time left if all steps were like those since `first`."""
    if not status["steps"] or not status["images_per_second"]:
        return str(status["progress"]).rpartition(": ")[2]
    steps, epochs = f"{status['step']}/{status['steps']}", f"{status['epoch']}/{status['epochs']}"
    done, missing = status["step"] - first_step, status["steps"] - status["step"]
    left = f"  {format_duration((time.monotonic() - since) * missing / done)} left" if done > 0 else ""
    return f"step {steps}  epoch {epochs}  {status['images_per_second']:.0f} img/s{left}"


def show_outcome(job: Job) -> None:
    """Print how a job ended, and what to type next."""
    result = job.result or {}
    seconds = result["seconds"]
    print(f"{job.name} {result['state']}{': ' if result['reason'] else ''}{result['reason']}")
    if result["state"] == "done":
        print(
            f"top-1 {result['top1']:.2f} %  top-5 {result['top5']:.2f} %  training and validation "
            f"{seconds['training'] + seconds['validation']:.1f} s of {format_duration(seconds['total'])}  "
            f"{result['images_per_second']:.0f} img/s  goodput {100 * result['goodput']:.1f} %  "
            f"${result['dollars']:.2f}{_unpriced_note(billing.machines_without_price(job))}"
        )
    if result.get("target"):
        print(describe_outcome(result["target"]))
    if len(result.get("timeline", [])) > 1:
        show_timeline(result["timeline"])
    for name in result.get("did_not_answer", []):
        print(
            f"machine {name} did not answer at the end; look what is left there when it does: "
            f"imgnet-cluster ssh {job.name} --machine {name}"
        )
    if "ids_wrong" in result:
        print("; ".join(result["ids_wrong"]) or "every image was used exactly once in every epoch")
    print(f"  curves      imgnet-cluster tensorboard {job.name}")
    print(f"  report      imgnet-cluster report {job.name}")
    print(f"  log         imgnet-cluster logs {job.name}")
    if result["state"] != "done":
        print(f"  go on       imgnet-cluster resume {job.name}")
    print(f"  everything  {job.run_folder.result_path}")


def _unpriced_note(machines: Sequence[str]) -> str:
    return f" without {', '.join(machines)}, whose price nobody knew" if machines else ""


def print_next_commands(job: Job) -> None:
    """Print what to type while a job runs."""
    print(f"  look in     imgnet-cluster attach {job.name}        (Ctrl-b d leaves it running)")
    print(f"  follow      imgnet-cluster logs -f {job.name}")
    print(f"  curves      imgnet-cluster tensorboard {job.name}")
    print(f"  end it      imgnet-cluster stop {job.name}")
