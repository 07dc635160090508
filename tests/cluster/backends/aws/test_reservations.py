"""A launch into reserved machines, planned with the simulated EC2: type, zone, price, limits, refusals, offers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.aws_journal import launch_request, request_granted, write_journal
from support.simcloud.http_server import AwsFrontend
from support.specs import TINY

from cluster.backends.aws.renting import instances as rented_instances
from cluster.backends.aws.renting.adoption import AwsAdoption, adopted_options
from cluster.backends.aws.renting.instances import JobInstances
from cluster.backends.aws.terms.rental_spec import RentalSpec
from cluster.backends.planner import Plan
from cluster.backends.rentals import RentalPlan
from cluster.cli.app import cli
from cluster.errors import ClusterError
from cluster.jobs import submit
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resume import plan_resume
from cluster.state.run_folder import Run, RunFolder
from infra.aws.journal_events import LaunchStarted
from infra.errors import NoMachines

ZONE, TYPE = "us-east-1b", "p5.48xlarge"
HOUR = 3600.0
GROUP = "arn:aws:resource-groups:us-east-1:123456789012:group/mine"
RECIPE = replace(TINY, gpus=8, types=("p4d.24xlarge", "g5.48xlarge"))  # others than the reserved one


def reserve_block(front: AwsFrontend, count: int = 4, hours: float = 24.0, **details: Any) -> str:
    end = front.sim.now() + hours * HOUR
    return front.sim.reserve(TYPE, ZONE, count, **{"is_block": True, "end": end, **details})


def make_plan(reservation: str, *, offline: bool = False, **options: Any) -> Plan:
    launch_options = make_launch_options(backend="aws", reservation=reservation, **{"machines": 2, **options})
    return submit.plan(RECIPE, launch_options, offline=offline)


def rental_of(plan: Plan) -> tuple[RentalPlan, RentalSpec]:
    """Return what the user is shown, and what the job may rent."""
    assert plan.rental_plan
    return plan.rental_plan, RentalSpec.from_json(plan.spec.cloud)


def test_plan_of_a_capacity_block_has_its_type_zone_price_and_end(front: AwsFrontend) -> None:
    id = reserve_block(front)
    plan = make_plan(id)
    rental, rental_spec = rental_of(plan)
    (place,) = rental_spec.places
    assert (place.type, place.zone, place.market, place.price) == (TYPE, ZONE, "capacity-block", 0.0)
    assert not rental_spec.use_placement_group and "(EC2 places those of the res" in dict(rental.facts)["placement"]
    assert rental.max_hours * HOUR + rental.poweroff_grace == pytest.approx(23.5 * HOUR, abs=60)
    assert rental.poweroff_grace == 900 and plan.spec.max_hours is None
    (note,) = [note for note in plan.notes if note.startswith(id)]
    assert "4 of 4 machines are free" in note and "was paid for when it was bought" in note
    assert "30 minutes before the block ends" in note
    (request,) = [arguments for action, arguments in rental.requests]
    assert request["CapacityReservationSpecification"] == {"CapacityReservationTarget": {"CapacityReservationId": id}}
    assert front.count("RunInstances") == front.count("PurchaseCapacityBlock") == 0


def test_plan_of_a_reservation_on_demand_has_its_price_its_placement_group_and_no_end(front: AwsFrontend) -> None:
    id = front.sim.reserve(TYPE, ZONE, 4, end=front.sim.now() + HOUR)
    plan = make_plan(id)
    rental, rental_spec = rental_of(plan)
    (place,) = rental_spec.places
    assert (place.market, place.price, place.closing_time) == ("on-demand", 55.04, None)
    assert not rental_spec.use_placement_group and rental.max_hours == 2.0
    limited = [rental_of(make_plan(id, max_dollars=dollars))[0] for dollars in (100.0, 1000.0)]
    assert [each.is_dollar_limit_set for each in limited] == [True, False], "of 1000 dollars two hours take 250"
    assert any("cost the on-demand price, whether they are used or not" in note for note in plan.notes)
    assert rental_of(make_plan(id, market="on-demand"))[1].places == (place,)
    plan = make_plan(front.sim.reserve(TYPE, ZONE, 4, placement_group="theirs"))
    (request,) = [arguments for action, arguments in rental_of(plan)[0].requests]
    assert request["Placement"] == {"GroupName": "theirs"}


def test_plan_of_a_group_is_in_the_region_of_the_group(front: AwsFrontend) -> None:
    group = GROUP.replace("us-east-1", "us-west-2")
    for _ in range(2):
        front.sim.reserve(TYPE, "us-west-2a", 1, groups=[group])
    (place,) = rental_of(make_plan(group))[1].places
    assert (place.region, place.zone, place.reservation) == ("us-west-2", "us-west-2a", group)


@pytest.mark.parametrize(("options", "message"), [
    ({"machines": 3, "spares": 2}, "{id}: 4 of its 4 machines are free, and the job needs 5; pass --machines 4"),
    ({"types": ["p4d.24xlarge"]}, "{id}: it has machines of type p5.48xlarge, not p4d.24xlarge"),
    ({"zones": ("us-east-1a",)}, "{id}: it is in us-east-1b"),
    ({"regions": ("us-west-2",)}, "{id}: this account has no such reservation in us-west-2"),
    ({"spares": 1, "late_spares": True}, "--late-spares needs spot machines, and --reservation has none"),
    ({"market": "on-demand"}, "{id}: its machines are of the market capacity-block; leave out --on-demand"),
    ({"max_dollars": 0.001}, "--max-price-total 0.001: the machines need 240 s to boot"),
    ({"offline": True}, "--reservation {id}: only AWS knows its type and zone"),
    ({"reservation": GROUP, "regions": ("us-west-2",)}, GROUP),
    ({"total": 0}, "{id}: 0 of its 0 machines are free, and the job needs 2; wait until others end"),
])  # fmt: skip
def test_launch_that_the_reservation_does_not_fit_is_one_line_and_rents_nothing(
    front: AwsFrontend, options: dict[str, Any], message: str
) -> None:
    options = dict(options)
    id = reserve_block(front, options.pop("total", 4))
    with pytest.raises(ClusterError) as caught:
        make_plan(options.pop("reservation", id), **options)
    assert str(caught.value).startswith(message.format(id=id)) and "\n" not in str(caught.value)
    assert front.count("RunInstances") == front.count("PurchaseCapacityBlock") == 0


def job_instances(hand_made: Any, plan: Plan) -> JobInstances:
    run = hand_made(machines=2, backend="aws", cloud=plan.spec.cloud)
    return JobInstances(run.spec, run.run_folder)


def test_supervisor_looks_at_the_reservation_again_before_it_rents(front: AwsFrontend, hand_made: Any) -> None:
    id = reserve_block(front)
    job = job_instances(hand_made, make_plan(id))
    reservation = front.sim.reservations[id]
    assert reservation.end is not None and job.closing_time == pytest.approx(reservation.end - 0.5 * HOUR)
    reservation.end += 24 * HOUR  # extended
    (place,) = (job._refresh_reservation(place) for place in job.rental_spec.places)
    assert place.closing_time == pytest.approx(reservation.end - 0.5 * HOUR)
    reservation.state = "payment-failed"
    with pytest.raises(NoMachines, match="it is payment-failed"):
        job.rent_all()
    assert front.count("RunInstances") == 0


@pytest.mark.parametrize("group", ["", GROUP])
def test_machines_of_a_reservation_on_demand_are_rented_in_no_group_of_ours_and_adopted_with_it(
    front: AwsFrontend, hand_made: Any, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """EC2 may have reserved them anywhere in the zone. The other computer rents lost ones where they were."""
    id = group or front.sim.reserve(TYPE, ZONE, 3)
    if group:
        front.sim.reserve(TYPE, ZONE, 3, groups=[group])
    monkeypatch.setattr(rented_instances, "ACQUIRE_TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr(JobInstances, "ensure_reachable", lambda self, machines: machines)
    job = job_instances(hand_made, make_plan(id))
    machines = job.rent_all()
    assert {machine.placement_group for machine in machines.values()} == {""}
    adoption: Any = AwsAdoption.__new__(AwsAdoption)
    adoption.account, adoption.instances, adoption.terms = job.account, machines, job.terms(front.sim.now())
    adoption.uid, adoption.address, adoption.stack = job.spec.uid, "127.0.0.1/32", job.stack
    adopted = adoption._rental_spec()
    assert [place.reservation for place in adopted.places] == [id] and adopted_options(adopted).reservation == id


@pytest.mark.parametrize("is_reserved", [False, True])
def test_resume_out_of_a_block_that_has_ended_has_the_limit_of_its_new_machines(
    front: AwsFrontend, tmp_path: Path, is_reserved: bool
) -> None:
    plan = make_plan(reserve_block(front))
    spec, folder = replace(plan.spec, name="job-1", uid="job-1-00000000"), RunFolder(tmp_path / "job-1")
    folder.shared.mkdir(parents=True)
    (place,) = rental_of(plan)[1].places
    start = front.sim.now() - 9 * HOUR
    request = launch_request(1, replace(place, closing_time=front.sim.now() - HOUR), spec.machine_names, start)
    granted = request_granted(1, *((f"i-{name}", name, start) for name in spec.machine_names), time=start)
    write_journal(folder.journal_path, request, granted, LaunchStarted(time=front.sim.now(), launch_id="second"))
    where = {"reservation": front.sim.reserve(TYPE, ZONE, 2)} if is_reserved else {"market": "on-demand"}
    resumed = plan_resume(Run(spec, folder), 0, 0.0, **where)
    folder.write_spec(resumed.spec)
    assert JobInstances(resumed.spec, folder).compute_limits(None) == (2.0, 900.0)


def test_offers_lists_capacity_blocks_and_the_command_that_buys_one(front: AwsFrontend) -> None:
    arguments = ["offers", "--capacity-blocks", "--gpu", "h100", "--machines", "4", "--hours", "6"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert TYPE in result.output and "p4d.24xlarge" not in result.output and "8 x H100" in result.output
    assert "aws ec2 purchase-capacity-block --region us-east-1 --capacity-block-offering-id cb-" in result.output
    assert "; the first block costs $" in result.output and "launch --reservation cr-" in result.output
    assert front.count("PurchaseCapacityBlock") == 0


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--hours", "6"], "--capacity-blocks"), (["--capacity-blocks", "--recipe", "recipes/quickstart.py"], "--recipe"),
])  # fmt: skip
def test_offers_options_that_do_not_fit_are_refused(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(cli, ["offers", *arguments])
    assert result.exit_code == 2 and reason in result.output.splitlines()[-1]
