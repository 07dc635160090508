"""Prints rented machines: what a launch would rent, what is rented, what it costs, and what EC2 offers."""

from collections.abc import Sequence

from cluster.backends.rentals import OfferRow, RentalLimit, RentalPlan, RentedJob
from cluster.jobs.billing import CostReport
from cluster.report.tables import cost_table
from infra.offers import CapacityBlockRow, LaunchFinding
from train.metrics.text import hours_text, three_digits

from .tables import print_table, print_wrapped

LABEL_WIDTH = 14


def format_dollars(value: float | None, digits: int = 2) -> str:
    """Return a price as text, "unknown price" for None."""
    return "unknown price" if value is None else f"${value:,.{digits}f}"


def format_hours(hours: float) -> str:
    """Return a duration as text: in hours from two hours on, else in minutes."""
    if hours >= 2:
        return hours_text(hours)
    return f"{three_digits(60 * hours)} minutes"


def print_field(name: str, text: str) -> None:
    """Print a label and its text, indented."""
    print_wrapped(f"  {name:{LABEL_WIDTH}} {text}", LABEL_WIDTH + 3)


def show_rental_plan(rental: RentalPlan) -> None:
    """Print what a launch or a resume would rent, the price first. On a narrow terminal no number is cut."""
    rate, minutes = rental.dollars_per_hour, rental.minutes
    on_demand_rate = rental.on_demand_dollars_per_hour
    per_hour = "unknown price" if rate is None else f"{format_dollars(rate)} an hour"
    if on_demand_rate is not None:
        per_hour += f" (on demand {format_dollars(on_demand_rate)} an hour, us-east-1, 2026)"
    gpus = "" if rental.gpus == "none" else f" ({rental.gpus} each)"
    print_wrapped(f"rents {rental.machines} x {rental.type}{gpus}, {rental.market}: {per_hour}")
    if rental.spares:
        print_field("spares", rental.spares)

    if minutes is None:
        run = "unknown: there are no measurements of this model on this GPU"
    else:
        cost = "" if rental.dollars is None else f", {format_dollars(rental.dollars)}"
        if on_demand_rate is not None:
            cost = f", on demand {format_dollars(on_demand_rate * minutes / 60)}"
        source = rental.forecast_source
        measured = source if source == "presets" else f"what {source} has measured; boot and set-up from presets"
        run = f"about {format_hours(minutes / 60)} with set-up{cost} (from {measured})"
    print_field("the run" if rental.spent_dollars is None else "the rest", run)
    if rental.spent_dollars is not None:
        print_field("spent before", format_dollars(rental.spent_dollars))
    poweroff = f"the machines power off {three_digits(rental.poweroff_grace / 60)} minutes later"
    print_field("limits", f"{format_hours(rental.max_hours)}; {poweroff}")
    if rental.max_dollars is not None:
        counted = "at the dearest of the places below"
        ceiling = rental.ceiling_dollars
        until = ""
        if on_demand_rate is None and ceiling is not None:
            until = f" at today's prices, {format_dollars(ceiling)} if spot prices rise to on demand,"
        if rental.is_dollar_limit_set:
            counted = "--max-price-total"
            if on_demand_rate is not None and minutes and on_demand_rate * minutes / 60 > rental.max_dollars:
                counted += "; too little for the whole run at on-demand prices"
        elif on_demand_rate is not None:
            counted = "at on-demand prices of us-east-1, 2026"
        dollars = format_dollars(rental.max_dollars)
        print_field(
            "at most", f"{dollars}{until} until power-off, with disks, addresses and expected traffic ({counted})"
        )
    for number, line in enumerate(rental.traffic):
        print_field("" if number else "traffic", line)
    for label, fact in rental.facts:
        print_field(label, fact)


def extension_question(job_name: str, before: RentalLimit, after: RentalLimit) -> str:
    """Return the question that the user answers before the limit of a job is raised."""
    cost = "at an unknown price" if after.dollars is None else f"for at most {format_dollars(after.dollars)} in all"
    return f"let {job_name} run for {format_hours(after.hours)} instead of {format_hours(before.hours)}, {cost}?"


def show_cost(report: CostReport) -> None:
    """Print what a job has cost: a row for each machine, sums, and costs per result."""
    if not report.is_billed:
        return print(f"{report.job} runs on {report.backend}: nothing is rented, so it costs nothing")
    cost = report.cost
    print_table(cost_table(cost).rows, optional=("id", "market", "price/h", "zone"))
    print_wrapped(
        f"{format_dollars(cost.dollars, 4)} in all: machines {format_dollars(cost.machine_dollars, 4)}, "
        f"disks {format_dollars(cost.disk_dollars, 4)}, addresses {format_dollars(cost.address_dollars, 4)}"
        + (f", NAT gateway {format_dollars(cost.nat_dollars, 4)}" if cost.nat_dollars else "")
        + f", traffic {format_dollars(cost.traffic_dollars, 4)}"
        + (f", before its adoption {format_dollars(cost.earlier_dollars, 4)}" if cost.earlier_dollars else "")
    )
    if cost.stored_gb:
        price = f"{format_dollars(cost.stored_dollars_per_month)} a month until they are deleted, in no sum here"
        print_wrapped(f"the job's files in the shared file system: {cost.stored_gb:,.2f} GB, {price}")
    if cost.traffic:
        print_table(
            {
                "traffic": row.name,
                "amount": f"{row.amount:,.3f} {row.unit}",
                "price": f"${row.price:g}",
                "dollars": format_dollars(row.dollars, 4),
            }
            for row in cost.traffic
        )
    dollars_by_label = {
        "per epoch": report.per_epoch,
        "until the target": report.to_target,
        "lost by recoveries": report.wasted,
    }
    for label, dollars in dollars_by_label.items():
        if dollars is not None:
            print(f"{format_dollars(dollars, 4)} {label}")
    if report.wasted_seconds:
        print(f"{report.wasted_seconds / 60:.1f} minutes were lost by recoveries: pauses and repeated steps")
    if cost.unknown:
        print(f"not included: {', '.join(cost.unknown)}, whose price is unknown")
    if report.warning:
        print_wrapped(f"not included: all since the job was adopted. {report.warning}")
    elif report.rented_now:
        print_wrapped(report.rented_now)
    if cost.machines:
        print_wrapped(
            "not included: the data in the stack's shared file system, which is billed until down --stack --delete-data"
        )


def show_offers(rows: Sequence[OfferRow]) -> None:
    """Print what EC2 offers, a row for each instance type and zone."""
    cells = [
        {
            "type": row.type,
            "zone": row.zone,
            "GPUs": f"{row.gpus} x {row.gpu}" if row.gpus else "none",
            "GB each": row.gpu_gb or "",
            "EFA": row.efa,
            "Gbit/s": row.gbit,
            "spot/hour": format_dollars(row.spot),
            "on demand/hour": format_dollars(row.on_demand) + ("*" if row.on_demand_shipped else ""),
            "minutes": "" if row.minutes is None else f"{row.minutes:.0f}",
            "the run": "" if row.dollars is None else format_dollars(row.dollars),
        }
        for row in rows
    ]
    print_table(cells, optional=("GB each", "EFA", "Gbit/s", "GPUs", "minutes"))
    if rows and rows[0].minutes is not None:
        print(f"minutes and the run's price are for {rows[0].machines} machines, with boot and set-up")
    if any(row.on_demand_shipped for row in rows):
        print("* price of July 2026 that ships with the program, because AWS's price list could not be read")


def show_capacity_blocks(rows: Sequence[CapacityBlockRow]) -> None:
    """Print the capacity blocks that can be bought, and the command that buys the first."""
    if not rows:
        return print("EC2 offers no such capacity blocks here now; try another: --region, --machines, --hours")
    print_table(
        {
            "type": row.type,
            "zone": row.zone,
            "GPUs": f"{row.gpus} x {row.gpu}",
            "machines": row.machines,
            "start": row.start,
            "end": row.end,
            "hours": f"{row.hours:.1f}",
            "price": _format_fee(row.fee, row.currency),
            "per machine and hour": _format_fee(row.fee / row.machines / row.hours, row.currency),
            "offering": row.offering,
        }
        for row in rows
    )
    print("hours: until EC2 ends the machines, 30 minutes before the end of the block")
    price = _format_fee(rows[0].fee, rows[0].currency)
    print(f"nothing was bought; the first block costs {price}, paid at once, and cannot be cancelled")
    print("to buy it (another one by its offering):")
    print(f"  {rows[0].buy}")
    print("then, with the ID of the reservation that this prints: imgnet-cluster launch --reservation cr-... RECIPE")


def _format_fee(fee: float, currency: str) -> str:
    return format_dollars(fee) if currency == "USD" else f"{fee:,.2f} {currency}"


def show_findings(findings: Sequence[LaunchFinding]) -> None:
    """Print the findings of a check, good and bad, each with the command to type next."""
    for finding in findings:
        print(f"{finding.level:8} {finding.what}")
        if finding.type_next:
            print(f"{'':8} {finding.type_next}")


def show_rented_machines(rows: Sequence[RentedJob], place: str) -> None:
    """Print what is rented in the regions of `place`, a row for each job, from the tags of its machines."""
    if not rows:
        return print_wrapped(f"nothing is rented in {place}")
    columns = ("job", "uid", "machines", "state", "type", "market", "zone", "since", "expires", "owner")
    cells = [{column: getattr(row, column) for column in columns} for row in rows]
    print_table(cells, optional=("uid", "zone", "since", "owner", "market", "type"))
