"""What a person sees of rented machines: what a launch would rent, what there is, what it costs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

LABEL_WIDTH = 14


def format_dollars(value: float | None, digits: int = 2) -> str:
    """Return a price, or that nobody knows it."""
    return "unknown price" if value is None else f"${value:,.{digits}f}"


def format_hours(hours: float) -> str:
    """Return a time in hours, or minutes when it is short."""
    minutes = 60 * hours
    return f"{hours:.3g} hours" if hours >= 2 else f"{minutes:.{int(minutes < 10)}f} minutes"


def print_field(name: str, text: str) -> None:
    """Print a name and what it is."""
    print(f"  {name:{LABEL_WIDTH}} {text}")


def show_rental_plan(table: Mapping[str, Any]) -> None:
    """Print what a launch would rent, the price first."""
    rate, minutes = table["dollars_per_hour"], table["minutes"]
    run = "unknown: nobody has measured this model on this card"
    if minutes is not None:
        cost = "" if table["dollars"] is None else f", {format_dollars(table['dollars'])}"
        run = f"about {format_hours(minutes / 60)}{cost}, with boot and set-up (a forecast from presets)"
    per_hour = "unknown price" if rate is None else f"{format_dollars(rate)} an hour"
    each = "" if table["gpus"] == "none" else f" ({table['gpus']} each)"
    print(f"rents {table['machines']} x {table['type']}{each}, {table['market']}: {per_hour}")
    print_field("the run", run)
    most = "" if table["max_dollars"] is None else f", {format_dollars(table['max_dollars'])} at most"
    print_field(
        "limits",
        f"{format_hours(table['max_hours'])}{most}; {table['late'] / 60:.0f} minutes later the machines cut their power",
    )
    print_field("zones, in order", ", ".join(table["zones"]))
    if table["then"]:
        print_field("and then", ", ".join(table["then"]))
    print_field("ssh", f"from {table['ssh_from']} alone")
    for one in table["makes"]:
        print_field("makes", one)


def show_aws_requests(requests: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Print calls of AWS as they would be sent."""
    for name, words in requests:
        print(f"{name}\n{json.dumps(words, indent=1)}")


def show_cost(cost: Mapping[str, Any]) -> None:
    """Print what a job has cost, a row for each machine, and what that bought."""
    from . import tables

    columns = ("machine", "id", "type", "market", "zone", "hours", "price/h", "dollars", "ended")
    tables.print_table(
        columns,
        [
            (
                one["name"], one["id"], one["type"], one["market"], one["zone"], f"{one['seconds'] / 3600:.3f}",
                format_dollars(one["price"], 4), format_dollars(one["all"] if one["dollars"] is not None else None, 4),
                one["why"] if one["ended"] else "still there",
            )
            for one in cost["machines"]
        ],
    )  # fmt: skip
    parts = f"machines {format_dollars(cost['machine_dollars'], 4)}, disks {format_dollars(cost['disk_dollars'], 4)}"
    print(
        f"{format_dollars(cost['dollars'], 4)} in all: {parts}, addresses {format_dollars(cost['address_dollars'], 4)}"
    )
    for name, text in (("per_epoch", "an epoch"), ("to_target", "until the target"), ("wasted", "for losses")):
        if cost.get(name) is not None:
            print(f"{format_dollars(cost[name], 4)} {text}")
    if cost.get("wasted_seconds"):
        print(f"{cost['wasted_seconds'] / 60:.1f} minutes in which nothing new was trained, after losses")
    if cost["unknown"]:
        print(f"not in it: {', '.join(cost['unknown'])}, whose price nobody knew")
    if cost["running"]:
        print(f"{cost['running']} of them still bill")
    if cost["machines"]:
        print("the shared file system is not in it: it is the stack's, until down --stack --delete-data")


def show_offers(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what EC2 offers, a row for each type and zone."""
    from . import tables

    columns = ("type", "zone", "GPUs", "GB each", "EFA", "Gbit/s", "spot/h", "on demand/h", "minutes", "dollars")
    tables.print_table(
        columns,
        [
            (
                one["type"], one["zone"], f"{one['gpus']} x {one['gpu']}", one["gpu_gb"], one["efa"], one["gbit"],
                format_dollars(one["spot"]), format_dollars(one["on_demand"]) + ("*" if one["on_demand_shipped"] else ""),
                "" if one["minutes"] is None else f"{one['minutes']:.0f}",
                "" if one["dollars"] is None else format_dollars(one["dollars"]),
            )
            for one in rows
        ],
    )  # fmt: skip
    if rows and rows[0]["minutes"] is not None:
        print(f"minutes and dollars are for {rows[0]['machines']} machines, with boot and set-up")
    if any(one["on_demand_shipped"] for one in rows):
        print("* as of July 2026, shipped with the program: the price list could not be asked")


def show_findings(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what is in order and what is not, with the next thing to type."""
    for one in rows:
        print(f"{one['level']:8} {one['what']}")
        if one["type_next"]:
            print(f"{'':8} {one['type_next']}")


def show_rented_machines(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what is rented, a row for each job, as the tags of its machines say it."""
    from . import tables

    columns = ("job", "uid", "machines", "state", "type", "market", "zone", "since", "expires", "owner")
    tables.print_table(columns, [[one[name] for name in columns] for one in rows])
