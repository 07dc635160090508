"""Prints a plan: schedule, machines, price, and the requests that a dry run shows."""

from collections.abc import Sequence

from cluster.backends.catalog import UNKNOWN_MACHINES
from cluster.planning.plan import Plan
from train.metrics.text import describe_training, format_lr_range
from train.recipe.schedule import PhaseRow

from . import cloud
from .tables import print_table

# How a phase validates, appended to its validation shape: after each epoch, the last one, near the target, or never.
VALIDATION_SUFFIXES = {"each": "", "last": ", last", "near": ", near", "never": ", never"}


def show_plan(plan: Plan) -> None:
    """Print what a launch would do: first the rental with its price, then the schedule and notes."""
    if plan.rental_plan:
        cloud.show_rental_plan(plan.rental_plan.summary(plan.spec))
    print(_summary_line(plan))
    print(describe_training(plan.spec.recipe))
    show_schedule(plan.schedule.table())
    print(f"{plan.schedule.steps} steps over {plan.schedule.images} images")
    for note in plan.notes:
        print(f"note: {note}")


def _summary_line(plan: Plan) -> str:
    """Return recipe, model, data set, machines, processes and price in one line."""
    spec = plan.spec
    has_several_machines = len(spec.machine_names) > 1
    machines = f"machines: {spec.machines}" + (f" and {spec.recovery.spares} spare" if spec.recovery.spares else "")
    if spec.is_one_computer:
        machines = f"{machines} on this computer" if has_several_machines else "this computer"
    processes = f"processes{' of each' if has_several_machines else ''}: {spec.procs}"
    own_price = "" if spec.backend == UNKNOWN_MACHINES else ", $0.00"
    price = ", price above" if plan.rental_plan else own_price
    training = f"{spec.recipe.name}: {spec.recipe.model.name} on {spec.recipe.data.name}"
    return f"{training}; {machines}, {processes}{price}"


def show_rental_requests(plan: Plan) -> None:
    """Print the AWS requests by which a launch would rent its machines; nothing if it rents none."""
    if plan.rental_plan:
        cloud.show_aws_requests(plan.rental_plan.preview_requests(plan.spec))


def show_schedule(rows: Sequence[PhaseRow]) -> None:
    """Print a schedule in the columns of a paper's table, a row for each phase."""
    columns = ("epochs", "size", "batch", "global", "rate", "rate/256", "steps", "copy", "scale", "val")
    cells = [
        (
            f"{row.start}-{row.end}",
            f"{row.size}{' rect' if row.rect_train else ''}",
            row.batch,
            row.global_batch,
            format_lr_range(row.lr, row.peak),
            format_lr_range(row.lr_per_256),
            row.steps,
            row.copy or "full",
            row.min_scale,
            ("rect" if row.rect_val else "square") + VALIDATION_SUFFIXES[row.validate],
        )
        for row in rows
    ]
    print_table(columns, cells)
