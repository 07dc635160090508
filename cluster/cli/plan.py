"""`imgnet-cluster plan`: the schedule of a recipe, and what it would take and cost on machines that nobody has yet."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import BadInput

from .options import output_option, print_json, schedule_options

if TYPE_CHECKING:
    from cluster.backends.machine_types import MachineType
    from cluster.planning.candidates import Candidate
    from cluster.planning.plan import Plan
    from train.forecast import Constants
    from train.recipe.schema import Recipe


def parse_machine_counts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return whole numbers above 0 that have commas between them, in ascending order. Fails as click's types do."""
    if value is None:
        return None
    try:
        found = sorted({int(one) for one in value.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise click.BadParameter(f"{value!r} is not a number of machines, nor several such as 1,2,4,8")
    return tuple(found)


def select_recipes(recipe: str, only: tuple[str, ...]) -> list[Any]:
    """Return the recipes of a file, those named if any are. Raises `BadInput`."""
    from cluster.jobs import submit
    from train.recipe.files import RecipeError
    from train.recipe.files import select_recipes as choose

    try:
        return choose(submit.load_recipes(recipe), only)
    except RecipeError as error:
        raise BadInput(str(error)) from error


def make_plan(recipe: Any, recipe_file: str, options: dict[str, Any], backend: str = "plan") -> Any:
    """Return what a launch would do. Raises `ClusterError`."""
    from cluster.jobs import submit

    return submit.plan(recipe, recipe_file=recipe_file, backend=backend, **options)


@click.command()
@click.argument("recipe")
@click.option(
    "--machines",
    metavar="N,N",
    callback=parse_machine_counts,
    help="How many machines, or several numbers such as 1,2,4,8.",
)
@schedule_options
@click.option(
    "--type", "types", multiple=True, metavar="TYPE", help="EC2 types, several with commas: a forecast on each."
)
@click.option("--epochs", type=click.IntRange(1), help="Forecast the first N.")
@click.option(
    "--trainer", type=click.Choice(["ours", "imagenet18"]), default="ours", show_default=True,
    help="Whose constants; imagenet18 is the trainer of 2018.",
)  # fmt: skip
@click.option("--from", "job", metavar="JOB", help="Take the constants that JOB measured instead of presets.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="PNG", help="Draw minutes and dollars over machines.")
@click.option("--cheapest", is_flag=True, help="Choose the cheapest row, and show how to launch it.")
@click.option("--fastest", is_flag=True, help="Choose the fastest.")
@click.option("--within", metavar="30min|40$", help="Choose the cheapest within a time, the fastest within a price.")
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
    **options: Any,
) -> None:
    """Show what RECIPE would do: its rows with global batch, rate and steps. Starts nothing.

    On several --machines, or with --type: minutes, dollars, what takes them, and where more machines stop being worth
    it, for each. Prices are on demand, as shipped; nobody is asked.
    """
    from cluster.planning import choose as planning_choose

    if cheapest + fastest + bool(within) > 1:
        raise BadInput("--cheapest, --fastest and --within all choose; say one")
    how = "cheapest" if cheapest else "fastest" if fastest else None
    if measured_job and trainer != "ours":
        raise BadInput("--from and --trainer both say whose constants; say one")
    most = planning_choose.parse_budget(within) if within else None
    if (how or within) and (epochs or trainer != "ours"):
        what = "--epochs forecasts a part of what" if epochs else f"--trainer {trainer} is not what"
        raise BadInput(f"{what} a launch would train; to choose one leave it out")
    recipes = select_recipes(recipe, only)
    names = tuple(one for some in types for one in some.split(",") if one)
    asked = bool(
        names or epochs or measured_job or plot or how or within or trainer != "ours" or len(machines or ()) > 1
    )
    shown: list[dict[str, Any]] = []
    for one in recipes:
        if not asked:
            shown += _show_single_plan(one, recipe, machines, options, output)
            continue
        found, notes = _forecast_rows(one, recipe, machines, names, epochs, trainer, measured_job, options)
        if how and len(found) == 1:
            raise BadInput(f"--{how}: there is one row; say several, such as --machines 1,2,4,8")
        chosen = planning_choose.choose(found, how or "within", most) if how or within else None
        mine = only or ((one.name,) if len(recipes) > 1 else ())
        more = {"only": mine, **{name: value for name, value in options.items() if (name, value) != ("scale", 1.0)}}
        command = planning_choose.launch_command(chosen, recipe, more) if chosen else ""
        if plot:
            _draw_forecast(plot, f"{one.name}, its first {epochs} epochs" if epochs else one.name, found)
        shown += [_row_json(row) | _choice_json(row, chosen, command) for row in found]
        if output == "table":
            _print_forecast(found, notes, chosen, command, plot)
    if output == "json":
        print_json(shown[0] if len(shown) == 1 else shown)


def _show_single_plan(
    recipe: "Recipe", recipe_file: str, machines: tuple[int, ...] | None, options: dict[str, Any], output: str
) -> list[dict[str, Any]]:
    """The plan as it is, and its forecast on the first of the recipe's types that there is."""
    from cluster.display import forecast as display_forecast
    from cluster.display import plan as display_plan
    from cluster.planning import candidates
    from train.forecast import DEFAULT_CONSTANTS

    one: Plan = make_plan(recipe, recipe_file, {**options, "machines": machines[0] if machines else None})
    kind, row = candidates.first_rentable_type(recipe.types), None
    if kind and one.spec.procs == kind.gpus:
        (row,) = candidates.make_candidates(lambda count, procs: one, [kind], [one.spec.machines], DEFAULT_CONSTANTS)
    if output == "table":
        display_plan.show_plan(one)
        if row:
            display_forecast.show_forecast_line(row)
    return [_row_json(row) if row else _plan_json(one)]


def _forecast_rows(
    recipe: "Recipe", recipe_file: str, machines: tuple[int, ...] | None, type_names: tuple[str, ...], epochs: int | None,
    trainer: str, measured_job: str | None, options: dict[str, Any],
) -> tuple[list["Candidate"], list[str]]:  # fmt: skip
    """Return the rows of a forecast, and what a person should know of them. Raises `ClusterError`."""
    from cluster.jobs import billing, store
    from cluster.planning import calibration, candidates
    from train.forecast import TRAINER_CONSTANTS

    ran = store.find(measured_job) if measured_job else None
    constants = calibration.measured_constants(ran.name, ran.result) if ran else TRAINER_CONSTANTS[trainer]
    if ran and ran.spec.recipe.model.name != recipe.model.name:
        raise BadInput(
            f"--from {ran.name}: it trained {ran.spec.recipe.model.name}, whose seconds say nothing of "
            f"{recipe.model.name}; leave --from out"
        )
    card = calibration.job_machine_type(ran.spec, ran.result or {}, billing.last_rented_type(ran)) if ran else None
    kinds: list[MachineType] = [candidates.get_machine_type(one) for one in dict.fromkeys(type_names)]
    if not kinds:
        first = card or candidates.first_rentable_type(recipe.types)
        if first is None:
            raise BadInput(f"{recipe.name}: names no type of machine that is known; say one: --type p4d.24xlarge")
        kinds = [first]
    found, notes = list["Candidate"](), list[str]()
    if ran and {*(machines or (recipe.machines,))} != {ran.spec.machines}:
        notes.append(f"{ran.name} ran on {ran.spec.machines}: that others send more between them is left out")
    for kind in kinds:
        own: Constants = constants
        if card:
            own, note = calibration.constants_for_type(constants, card, kind)
            notes += [note] if note else []

        def make(count: int, procs: int) -> "Plan":
            part = candidates.truncate_recipe(recipe, count, epochs)
            more = {**options, "machines": count, "procs": options.get("procs") or procs}
            made: Plan = make_plan(part, recipe_file, more)
            return replace(made, spec=replace(made.spec, backend="plan"))

        found += candidates.make_candidates(make, [kind], machines or (recipe.machines,), own)
        notes += [f"{kind.name}: {kind.retired_reason}; for comparison only"] if kind.retired_reason else []
    return found, notes


def _plan_json(job_plan: "Plan") -> dict[str, Any]:
    return {
        "recipe": job_plan.spec.recipe.name,
        "machines": job_plan.spec.machines,
        "gpus": job_plan.spec.schedule_gpus,
        "images": job_plan.schedule.images,
        "phases": job_plan.schedule.table(),
        "steps": job_plan.schedule.steps,
        "notes": list(job_plan.notes),
    }


def _row_json(row: "Candidate") -> dict[str, Any]:
    return {**_plan_json(row.plan), **row.to_json()}


def _choice_json(row: "Candidate", chosen: "Candidate | None", launch_command: str) -> dict[str, Any]:
    return {} if chosen is None else {"chosen": row is chosen, **({"launch": launch_command} if row is chosen else {})}


def _draw_forecast(path: Path, title: str, forecast_rows: "list[Candidate]") -> None:
    from cluster.planning import candidates
    from cluster.plots import forecast

    minutes, dollars = dict[str, list[tuple[float, float]]](), dict[str, list[tuple[float, float]]]()
    for kind, some in candidates.group_by_type(forecast_rows).items():
        minutes[kind] = [(one.machines, one.minutes) for one in some if one.minutes is not None]
        costs = [(one.machines, one.dollars(one.minutes)) for one in some]
        dollars[kind] = [(count, cost) for count, cost in costs if cost is not None]
    if not any(minutes.values()):
        raise BadInput("--plot: there is no forecast that could be drawn")
    forecast.draw_forecast(path, f"{title}: the forecast, with boot and set-up", minutes, dollars)


def _print_forecast(
    forecast_rows: "list[Candidate]",
    notes: list[str],
    chosen: "Candidate | None",
    launch_command: str,
    plot: Path | None,
) -> None:
    from cluster.display import forecast as display_forecast
    from cluster.display import plan as display_plan

    if len(forecast_rows) == 1:
        display_plan.show_plan(forecast_rows[0].plan)
        display_forecast.show_phase_forecasts(forecast_rows[0])
    else:
        display_forecast.show_candidates(forecast_rows)
    for note in notes:
        click.echo(f"note: {note}")
    if plot:
        click.echo(f"drawn: {plot}")
    if chosen:
        display_forecast.show_choice(chosen, launch_command)
