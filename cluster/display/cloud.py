"""Prints rented machines: what a launch would rent, what is rented, what it costs, and what EC2 offers."""

import json
from collections.abc import Mapping, Sequence

from cluster.backends.rentals import LaunchFinding, OfferRow, RentalSummary, RentedJob
from cluster.jobs.billing import CostReport

from .tables import print_table

LABEL_WIDTH = 14


def format_dollars(value: float | None, digits: int = 2) -> str:
    """Return a price as text, "unknown price" for None."""
    return "unknown price" if value is None else f"${value:,.{digits}f}"


def format_hours(hours: float) -> str:
    """Return a duration as text: in hours from two hours on, else in minutes."""
    if hours >= 2:
        return f"{hours:.3g} hours"
    minutes = 60 * hours
    return f"{minutes:.1f} minutes" if minutes < 10 else f"{minutes:.0f} minutes"


def print_field(name: str, text: str) -> None:
    """Print a label and its text, indented."""
    print(f"  {name:{LABEL_WIDTH}} {text}")


def show_rental_plan(summary: RentalSummary) -> None:
    """Print what a launch would rent, the price first."""
    rate = summary.dollars_per_hour
    per_hour = "unknown price" if rate is None else f"{format_dollars(rate)} an hour"
    gpus = "" if summary.gpus == "none" else f" ({summary.gpus} each)"
    print(f"rents {summary.machines} x {summary.type}{gpus}, {summary.market}: {per_hour}")

    if summary.minutes is None:
        run = "unknown: there are no measurements of this model on this GPU"
    else:
        cost = "" if summary.dollars is None else f", {format_dollars(summary.dollars)}"
        run = f"about {format_hours(summary.minutes / 60)}{cost}, with boot and set-up (a forecast from presets)"
    print_field("the run", run)
    poweroff = f"the machines power off {summary.poweroff_grace / 60:.0f} minutes later"
    print_field("limits", f"{format_hours(summary.max_hours)}; {poweroff}")
    if summary.max_dollars is not None:
        counted = "--max-price-total" if summary.is_dollar_limit_set else "at the dearest of the places below"
        dollars = format_dollars(summary.max_dollars)
        print_field("at most", f"{dollars} until power-off, with disks and addresses ({counted})")
    print_field("zones, in order", ", ".join(summary.zones))
    if summary.other_choices:
        print_field("and then", ", ".join(summary.other_choices))
    print_field("ssh", f"from {summary.ssh_address} only")
    for part in summary.missing_stack_parts:
        print_field("creates", part)


def show_aws_requests(requests: Sequence[tuple[str, Mapping[str, object]]]) -> None:
    """Print AWS requests, as (action, arguments), in the form in which they would be sent."""
    for action, arguments in requests:
        print(f"{action}\n{json.dumps(arguments, indent=1)}")


def show_cost(report: CostReport) -> None:
    """Print what a job has cost: a row for each machine, sums, and costs per result."""
    if not report.is_billed:
        return print(f"{report.job} runs on {report.backend}: nothing is rented, so it costs nothing")
    cost = report.cost
    columns = ("machine", "id", "type", "market", "zone", "hours", "price/h", "dollars", "ended")
    rows = [
        (
            machine.name,
            machine.id,
            machine.type,
            machine.market,
            machine.zone,
            f"{machine.seconds / 3600:.3f}",
            format_dollars(machine.price, 4),
            format_dollars(machine.total_dollars if machine.dollars is not None else None, 4),
            machine.why if machine.ended else "still running",
        )
        for machine in cost.machines
    ]
    print_table(columns, rows)
    print(
        f"{format_dollars(cost.dollars, 4)} in all: machines {format_dollars(cost.machine_dollars, 4)}, "
        f"disks {format_dollars(cost.disk_dollars, 4)}, addresses {format_dollars(cost.address_dollars, 4)}"
        + (f", NAT gateway without traffic {format_dollars(cost.nat_dollars, 4)}" if cost.nat_dollars else "")
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
    if cost.running:
        print(f"{cost.running} machines are still billed")
    if cost.machines:
        print("not included: the stack's shared file system, which is billed until down --stack --delete-data")


def show_offers(rows: Sequence[OfferRow]) -> None:
    """Print what EC2 offers, a row for each instance type and zone."""
    columns = ("type", "zone", "GPUs", "GB each", "EFA", "Gbit/s", "spot/h", "on demand/h", "minutes", "dollars")
    cells = [
        (
            row.type,
            row.zone,
            f"{row.gpus} x {row.gpu}",
            row.gpu_gb,
            row.efa,
            row.gbit,
            format_dollars(row.spot),
            format_dollars(row.on_demand) + ("*" if row.on_demand_shipped else ""),
            "" if row.minutes is None else f"{row.minutes:.0f}",
            "" if row.dollars is None else format_dollars(row.dollars),
        )
        for row in rows
    ]
    print_table(columns, cells)
    if rows and rows[0].minutes is not None:
        print(f"minutes and dollars are for {rows[0].machines} machines, with boot and set-up")
    if any(row.on_demand_shipped for row in rows):
        print("* price of July 2026 that ships with the program, because AWS's price list could not be read")


def show_findings(findings: Sequence[LaunchFinding]) -> None:
    """Print the findings of a check, good and bad, each with the command to type next."""
    for finding in findings:
        print(f"{finding.level:8} {finding.what}")
        if finding.type_next:
            print(f"{'':8} {finding.type_next}")


def show_rented_machines(rows: Sequence[RentedJob]) -> None:
    """Print what is rented, a row for each job, from the tags of its machines."""
    columns = ("job", "uid", "machines", "state", "type", "market", "zone", "since", "expires", "owner")
    print_table(columns, [[getattr(row, column) for column in columns] for row in rows])
