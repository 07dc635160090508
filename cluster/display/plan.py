"""Prints a plan: schedule, machines, price and the requests that a dry run would send."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cluster.planning.plan import Plan
from train.metrics.text import describe_training, format_lr_range

from . import cloud

if TYPE_CHECKING:
    pass
from .tables import print_table

VALIDATION_SUFFIXES = {"each": "", "last": ", last", "near": ", near", "never": ", never"}


def show_plan(plan: Plan) -> None:
    """Print what a launch would do: the price, the schedule, what the linear rule changed."""
    spec = plan.spec
    count = f"machines: {spec.machines}" + (f" and {spec.spares} to spare" if spec.spares else "")
    where = "this computer" if spec.backend == "local" and len(spec.machine_names) == 1 else count
    where += " of this computer" if spec.backend == "local" and len(spec.machine_names) > 1 else ""
    if plan.rental_plan:
        cloud.show_rental_plan(plan.rental_plan.summary(spec))
    price = ", $0.00" if spec.backend in ("local", "ssh") else ", price above" if plan.rental_plan else ""
    each = " of each" if len(spec.machine_names) > 1 else ""
    what = f"{spec.recipe.name}: {spec.recipe.model.name} on {spec.recipe.data.name}"
    print(f"{what}; {where}, processes{each}: {spec.procs}{price}")
    print(describe_training(spec.recipe))
    show_schedule(plan.schedule.table())
    print(f"{plan.schedule.steps} steps over {plan.schedule.images} images")
    for note in plan.notes:
        print(f"note: {note}")


def show_rental_requests(plan: Plan) -> None:
    """Print the exact requests by which a launch would rent machines; nothing where none are rented."""
    if plan.rental_plan:
        from cluster.backends.aws import plan as aws_plan

        cloud.show_aws_requests(aws_plan.preview_requests(plan.spec, plan.rental_plan))


def show_schedule(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a schedule's rows as a paper's table."""
    columns = ("epochs", "size", "batch", "global", "rate", "rate/256", "steps", "copy", "scale", "val")
    print_table(
        columns,
        [
            (
                f"{row['start']}-{row['end']}", f"{row['size']}{' rect' * row['rect_train']}", row["batch"],
                row["global_batch"], format_lr_range(row["lr"], row["peak"]),
                format_lr_range(row["lr_per_256"]), row["steps"], row["copy"] or "full", row["min_scale"],
                ("rect" if row["rect_val"] else "square") + VALIDATION_SUFFIXES[row["validate"]],
            )
            for row in rows
        ],
    )  # fmt: skip
