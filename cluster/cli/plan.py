"""`imgnet-cluster plan`: the schedule of a recipe, and a forecast of time and price on machines not yet rented."""

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from cluster.errors import BadInput

from .options import (
    GroupedCommand,
    NumberList,
    flag,
    given_options,
    grouped_option,
    launch_options,
    only_option,
    output_option,
    print_json,
)

if TYPE_CHECKING:
    from cluster.jobs.job import Job
    from cluster.planning.forecasts import Candidate
    from cluster.planning.launch_options import LaunchOptions
    from train.recipe.schema import Recipe


@click.command(cls=GroupedCommand)
@click.argument("recipe")
@grouped_option(
    "Machines",
    "--machines",
    metavar="N,N",
    type=NumberList(1, 10_000, "1,2,4,8"),
    help="Number of machines, or a list such as 1,2,4,8.  [default: as the recipe says]",
)
@flag("Machines", "--local", help="Plan a job on this computer: its GPUs, else its processors.")
@launch_options("procs", "data", "val_fraction", "seed", "set", "scale", "max_steps", "keep_batch")
@only_option
@launch_options(
    types="EC2 instance type, or a comma-separated list, for a forecast on each.  [default: the recipe's first type]"
)
@grouped_option(
    "Forecast",
    "--from",
    "measured_job",
    metavar="JOB",
    help="Use the speeds that JOB measured, instead of the preset ones.",
)
@output_option
def plan(
    recipe: str,
    machines: tuple[int, ...] | None,
    local: bool,
    types: tuple[str, ...],
    measured_job: str | None,
    output: str,
    only: tuple[str, ...],
    **options: object,
) -> None:
    """Show the schedule of RECIPE and a forecast; start nothing.

    For each phase: global batch, learning rate and steps. With several --machines, or with --type, also for each
    combination: minutes, dollars, and where the time goes. Prices are the on-demand prices shipped with this program;
    AWS is not contacted.
    """
    from cluster.display import plan as display_plan
    from cluster.jobs import store
    from cluster.planning import resolve
    from cluster.planning.launch_options import make_launch_options

    planned_options = make_launch_options("local" if local else "plan", **given_options(options))
    recipes = resolve.load_recipes(recipe, only)
    job = store.find(measured_job) if measured_job else None
    if local and (types or machines):
        raise BadInput("--local plans for this computer as one machine; leave out --type and --machines")
    type_names = [name for names in types for name in names.split(",") if name]
    rows: list[dict[str, object]] = []
    for selected_recipe in recipes:
        counts = sorted(machines or (1 if local else selected_recipe.machines,))
        candidates, notes = _make_candidates(selected_recipe, recipe, type_names, counts, job, planned_options, local)
        rows += [candidate.to_json() for candidate in candidates]
        if output == "table":
            display_plan.show_forecasts(candidates, notes)
    if output == "json":
        print_json(rows[0] if len(rows) == 1 else rows)


def _make_candidates(
    recipe: "Recipe",
    recipe_file: str,
    type_names: list[str],
    machine_counts: list[int],
    job: "Job | None",
    options: "LaunchOptions",
    local: bool,
) -> "tuple[list[Candidate], list[str]]":
    """Return a candidate for each type and number of machines, and notes on them.

    `job` has measured the speeds. Without types: with `local` this computer, else the type of the job or the recipe.
    """
    from cluster.planning import forecasts, resolve
    from train.forecast import DEFAULT_CONSTANTS

    machine_types = [forecasts.get_machine_type(name) for name in dict.fromkeys(type_names)]
    notes: list[str] = []
    constants, job_type = DEFAULT_CONSTANTS, None
    if local:  # nothing has to boot, be set up or fetch images
        constants = replace(constants, boot_seconds=0.0, setup_seconds=0.0, fetch_bytes_per_second=0.0)
    if job:
        constants = forecasts.measured_constants(job.name, job.result)
        if job.spec.recipe.model.name != recipe.model.name:
            raise BadInput(
                f"--from {job.name}: it trained {job.spec.recipe.model.name}, so its measured speeds do not hold for "
                f"{recipe.model.name}; leave --from out"
            )
        rented = job.backend.job_cost().machines
        job_type = forecasts.job_machine_type(job.spec, job.result, rented[-1].type if rented else "")
        if set(machine_counts) != {job.spec.machines}:
            measured_on = f"{job.spec.machines} machine{'s' * (job.spec.machines > 1)}"
            notes.append(f"{job.name} ran on {measured_on}; slower communication among more machines is not included")
    if not machine_types:
        own_type = None if local and job and job.spec.cloud else job_type
        default_type = forecasts.this_computer() if local else forecasts.default_machine_type(recipe)
        machine_types = [own_type or default_type]
    rows: list[Candidate] = []
    for machine_type in machine_types:
        type_constants = constants
        if job_type:
            type_constants, note = forecasts.constants_for_type(constants, job_type, machine_type)
            notes += [note] if note else []
        for count in machine_counts:
            sized_options = replace(options, machines=count, procs=options.procs or machine_type.gpus)
            plan = resolve.plan(recipe, sized_options, recipe_file=recipe_file)
            rows.append(forecasts.make_candidate(plan, machine_type, type_constants))
        if machine_type.retired_reason:
            notes.append(f"{machine_type.name}: {machine_type.retired_reason}; for comparison only")
    if any(machine_type.on_demand_price for machine_type in machine_types):
        notes.append(
            "dollars are of the machines alone; with disks, addresses and traffic: imgnet-cluster launch --dry-run"
        )
    return rows, notes
