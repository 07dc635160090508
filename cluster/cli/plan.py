"""`imgnet-cluster plan`: the schedule of a recipe, and a forecast of time and price on machines not yet rented."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.errors import BadInput

from .options import (
    GroupedCommand,
    GroupedOption,
    dataclass_options,
    deferred_options,
    given_options,
    grouped_option,
    only_option,
    output_option,
    print_json,
)

if TYPE_CHECKING:
    from cluster.backends.machine_types import MachineType
    from cluster.planning.candidates import Candidate
    from cluster.planning.launch_options import LaunchOptions
    from cluster.planning.plan import Plan
    from train.recipe.schema import Recipe


def parse_machine_counts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return the numbers of a comma-separated list in ascending order, without duplicates.

    Raises `click.BadParameter` when one is not a whole number above 0.
    """
    if value is None:
        return None
    try:
        counts = sorted({int(number) for number in value.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise click.BadParameter(f"{value!r} is not a number of machines, nor a list such as 1,2,4,8")
    return tuple(counts)


def select_recipes(recipe: str, only: tuple[str, ...]) -> "list[Recipe]":
    """Return the recipes of a file, or those named by `--only`. Raises `BadInput`."""
    from cluster.planning.resolve import load_recipes
    from train.recipe.files import RecipeError
    from train.recipe.files import select_recipes as select_by_name

    try:
        return select_by_name(load_recipes(recipe), only)
    except RecipeError as error:
        raise BadInput(str(error)) from error


def make_plan(recipe: "Recipe", recipe_file: str, options: "LaunchOptions", offline: bool = False) -> "Plan":
    """Return what a launch would do. Raises `ClusterError`."""
    from cluster.planning.resolve import plan as resolve_plan

    return resolve_plan(recipe, options, recipe_file=recipe_file, offline=offline)


def shared_options() -> list[GroupedOption]:
    """Return the options that a plan and a launch have."""
    from cluster.planning.launch_options import LaunchOptions

    names = ("procs", "data", "val_fraction", "seed", "scale", "max_steps", "keep_batch")
    return dataclass_options(LaunchOptions, *names, is_configurable=True)


@click.command(cls=GroupedCommand)
@click.argument("recipe")
@grouped_option(
    "Machines",
    "--machines",
    metavar="N,N",
    callback=parse_machine_counts,
    help="Number of machines, or a list such as 1,2,4,8.  [default: as the recipe says]",
)
@deferred_options(shared_options)
@only_option
@grouped_option(
    "AWS",
    "--type",
    "types",
    multiple=True,
    metavar="TYPE",
    config_name="types",
    help="EC2 instance type, or a comma-separated list, for a forecast on each.  [default: the recipe's first type]",
)
@grouped_option(
    "Forecast",
    "--cheapest",
    is_flag=True,
    help="Choose the cheapest combination of type and number of machines, and print its launch command.",
)
@grouped_option("Forecast", "--fastest", is_flag=True, help="Choose the fastest combination.")
@grouped_option(
    "Forecast",
    "--within",
    metavar="30min|40$",
    help="Choose the cheapest combination within a time, or the fastest within a price.",
)
@grouped_option(
    "Forecast", "--epochs", metavar="N", type=click.IntRange(1), help="Forecast only this many epochs, the first ones."
)
@grouped_option(
    "Forecast",
    "--from",
    "measured_job",
    metavar="JOB",
    help="Use the speeds that JOB measured, instead of the preset ones.",
)
@grouped_option(
    "Forecast",
    "--trainer",
    type=click.Choice(["ours", "imagenet18"]),
    default="ours",
    show_default=True,
    help="Trainer whose preset speeds are used: this project's (ours), or that of the project imagenet18 (2018).",
)
@grouped_option(
    "Output",
    "--plot",
    type=click.Path(path_type=Path),
    metavar="PNG",
    help="Plot minutes and dollars against the number of machines.",
)
@output_option
def plan(
    recipe: str,
    machines: tuple[int, ...] | None,
    types: tuple[str, ...],
    epochs: int | None,
    trainer: str,
    measured_job: str | None,
    plot: Path | None,
    cheapest: bool,
    fastest: bool,
    within: str | None,
    output: str,
    only: tuple[str, ...],
    **options: object,
) -> None:
    """Show the schedule of RECIPE and a forecast; start nothing.

    For each phase: global batch, learning rate and steps. With several --machines, or with --type, also for each
    combination: minutes, dollars, where the time goes, and the number of machines beyond which more of them save little
    time. Prices are the on-demand prices shipped with this program; AWS is not contacted.
    """
    from cluster.planning import choose as planning_choose
    from cluster.planning.launch_options import make_launch_options

    if cheapest + fastest + bool(within) > 1:
        raise BadInput("--cheapest, --fastest and --within are mutually exclusive")
    criterion = "cheapest" if cheapest else "fastest" if fastest else "within" if within else None
    if measured_job and trainer != "ours":
        raise BadInput("--from and --trainer are mutually exclusive")
    budget = planning_choose.parse_budget(within) if within else None
    if criterion and (epochs or trainer != "ours"):
        option = "--epochs" if epochs else "--trainer"
        reason = "it forecasts only a part of the run" if epochs else "a launch uses this project's own trainer"
        raise BadInput(f"{option} cannot be combined with --{criterion}: {reason}; leave {option} out")
    keywords = given_options(options)
    launch_options = make_launch_options("plan", **keywords)
    recipes = select_recipes(recipe, only)
    type_names = tuple(name for names in types for name in names.split(",") if name)
    needs_forecast = bool(
        type_names or epochs or measured_job or plot or criterion or trainer != "ours" or len(machines or ()) > 1
    )
    rows: list[dict[str, object]] = []
    for selected_recipe in recipes:
        if not needs_forecast:
            rows.append(_show_single_plan(selected_recipe, recipe, machines, launch_options, output))
            continue
        candidates, notes = _forecast_candidates(
            selected_recipe, recipe, machines, type_names, epochs, trainer, measured_job, launch_options
        )
        if criterion in ("cheapest", "fastest") and len(candidates) == 1:
            raise BadInput(f"--{criterion}: there is one row only; ask for several, such as --machines 1,2,4,8")
        chosen = planning_choose.choose(candidates, criterion, budget) if criterion else None
        only_names = only or ((selected_recipe.name,) if len(recipes) > 1 else ())
        command = planning_choose.launch_command(chosen, recipe, {"only": only_names, **keywords}) if chosen else ""
        if plot:
            name = selected_recipe.name
            _draw_forecast(plot, f"{name}, its first {epochs} epochs" if epochs else name, candidates)
        rows += [_candidate_json(candidate) | _choice_json(candidate, chosen, command) for candidate in candidates]
        if output == "table":
            _print_forecast(candidates, notes, chosen, command, plot)
    if output == "json":
        print_json(rows[0] if len(rows) == 1 else rows)


def _show_single_plan(
    recipe: "Recipe", recipe_file: str, machines: tuple[int, ...] | None, options: "LaunchOptions", output: str
) -> dict[str, object]:
    """Show a plan with its forecast on the recipe's first type that can be rented. Returns the plan for JSON."""
    from cluster.display import forecast as display_forecast
    from cluster.display import plan as display_plan
    from cluster.planning import candidates
    from train.forecast import DEFAULT_CONSTANTS

    job_plan = make_plan(recipe, recipe_file, replace(options, machines=machines[0] if machines else None))
    machine_type = candidates.first_rentable_type(recipe.types)
    candidate = None
    if machine_type and job_plan.spec.procs == machine_type.gpus:
        (candidate,) = candidates.make_candidates(
            lambda count, procs: job_plan, [machine_type], [job_plan.spec.machines], DEFAULT_CONSTANTS
        )
    if output == "table":
        display_plan.show_plan(job_plan)
        if candidate:
            display_forecast.show_forecast_line(candidate)
    return _candidate_json(candidate) if candidate else _plan_json(job_plan)


def _forecast_candidates(
    recipe: "Recipe",
    recipe_file: str,
    machines: tuple[int, ...] | None,
    type_names: tuple[str, ...],
    epochs: int | None,
    trainer: str,
    measured_job: str | None,
    options: "LaunchOptions",
) -> "tuple[list[Candidate], list[str]]":
    """Return a candidate for each type and number of machines, and the notes on them. Raises `ClusterError`."""
    from cluster.jobs import billing, store
    from cluster.planning import calibration
    from cluster.planning import candidates as planning_candidates
    from train.forecast import TRAINER_CONSTANTS

    job = store.find(measured_job) if measured_job else None
    constants = calibration.measured_constants(job.name, job.result) if job else TRAINER_CONSTANTS[trainer]
    if job and job.spec.recipe.model.name != recipe.model.name:
        raise BadInput(
            f"--from {job.name}: it trained {job.spec.recipe.model.name}, so its measured speeds do not hold for "
            f"{recipe.model.name}; leave --from out"
        )
    job_type = None
    if job:
        job_type = calibration.job_machine_type(job.spec, job.result, billing.last_rented_type(job))
    machine_types: list[MachineType] = [
        planning_candidates.get_machine_type(name) for name in dict.fromkeys(type_names)
    ]
    if not machine_types:
        default_type = job_type or planning_candidates.first_rentable_type(recipe.types)
        if default_type is None:
            raise BadInput(f"{recipe.name}: names no known machine type; pass one, such as --type p4d.24xlarge")
        machine_types = [default_type]
    machine_counts = machines or (recipe.machines,)
    candidates: list[Candidate] = []
    notes: list[str] = []
    if job and set(machine_counts) != {job.spec.machines}:
        measured_on = f"{job.spec.machines} machine{'s' * (job.spec.machines > 1)}"
        notes.append(f"{job.name} ran on {measured_on}; slower communication among more machines is not included")

    def plan_candidate(count: int, procs: int) -> "Plan":
        candidate_options = replace(options, machines=count, procs=options.procs or procs)
        truncated_recipe = planning_candidates.truncate_recipe(recipe, count, epochs)
        candidate_plan = make_plan(truncated_recipe, recipe_file, candidate_options)
        return replace(candidate_plan, spec=replace(candidate_plan.spec, backend="plan"))

    for machine_type in machine_types:
        type_constants = constants
        if job_type:
            type_constants, note = calibration.constants_for_type(constants, job_type, machine_type)
            if note:
                notes.append(note)
        candidates += planning_candidates.make_candidates(
            plan_candidate, [machine_type], machine_counts, type_constants
        )
        if machine_type.retired_reason:
            notes.append(f"{machine_type.name}: {machine_type.retired_reason}; for comparison only")
    if any(machine_type.on_demand_price for machine_type in machine_types):
        notes.append(
            "dollars are of the machines alone; with disks, addresses and traffic: imgnet-cluster launch --dry-run"
        )
    return candidates, notes


def _plan_json(job_plan: "Plan") -> dict[str, object]:
    from train.tools.records import encode

    return {
        "recipe": job_plan.spec.recipe.name,
        "machines": job_plan.spec.machines,
        "gpus": job_plan.spec.schedule_gpus,
        "images": job_plan.recipe_schedule.images,
        "phases": encode(job_plan.recipe_schedule.table()),
        "steps": job_plan.recipe_schedule.steps,
        "notes": list(job_plan.notes),
    }


def _candidate_json(candidate: "Candidate") -> dict[str, object]:
    return {**_plan_json(candidate.plan), **candidate.to_json()}


def _choice_json(candidate: "Candidate", chosen: "Candidate | None", launch_command: str) -> dict[str, object]:
    """Return the fields that say whether a candidate is the chosen one; none when nothing was to be chosen."""
    if chosen is None:
        return {}
    return {"chosen": True, "launch": launch_command} if candidate is chosen else {"chosen": False}


def _draw_forecast(path: Path, title: str, candidates: "list[Candidate]") -> None:
    """Plot minutes and dollars against the number of machines, a curve for each type. Raises `BadInput`."""
    from cluster.planning.candidates import group_by_type
    from cluster.plots import forecast

    minutes: dict[str, list[tuple[float, float]]] = {}
    dollars: dict[str, list[tuple[float, float]]] = {}
    for type_name, type_candidates in group_by_type(candidates).items():
        minutes[type_name] = [
            (candidate.machines, candidate.minutes) for candidate in type_candidates if candidate.minutes is not None
        ]
        prices = [(candidate.machines, candidate.dollars(candidate.minutes)) for candidate in type_candidates]
        dollars[type_name] = [(count, price) for count, price in prices if price is not None]
    if not any(minutes.values()):
        raise BadInput("--plot: there is no forecast to plot; pass a known --type")
    forecast.draw_forecast(path, f"{title}: forecast with boot and set-up", minutes, dollars)


def _print_forecast(
    candidates: "list[Candidate]",
    notes: list[str],
    chosen: "Candidate | None",
    launch_command: str,
    plot: Path | None,
) -> None:
    from cluster.display import forecast as display_forecast
    from cluster.display import plan as display_plan
    from cluster.display.tables import print_wrapped

    if len(candidates) == 1:
        display_plan.show_plan(candidates[0].plan)
        display_forecast.show_phase_forecasts(candidates[0])
    else:
        display_forecast.show_candidates(candidates)
    for note in notes:
        print_wrapped(f"note: {note}", len("note: "))
    if plot:
        click.echo(f"plot: {plot}")
    if chosen:
        display_forecast.show_choice(chosen, launch_command)
