"""What a job's traffic is expected to cost, with the assumptions in words. Part of a rental plan.

Losses are not expected: each one adds a read of the checkpoint by every machine. What the machines measure later
replaces these figures in `cost` and in the price limit.
"""

from dataclasses import replace
from pathlib import Path

from cluster.agent.traffic import METADATA_BYTES, MIN_DATA_BYTES
from cluster.backends.planner import checkpoint_bytes
from cluster.state.spec import NETWORK_HEARTBEAT_SECONDS, JobSpec
from infra.aws import prices
from infra.aws.launch_request import Internet
from infra.costs import GB, NO_TRAFFIC, Traffic, TrafficForecast
from train.forecast import Forecast
from train.forecast.hardware import fetch_bytes, has_known_images, read_bytes
from train.recipe.schedule import Schedule, scaled_image_count

from .images import SHARED_FOLDER

MIN_SAVE_SECONDS = 1.0  # between two saves, however short an epoch is: the next one waits until the last is written
STATUS_BYTES = 2500  # of a machine's status with the log lines of a heartbeat, as they come to this computer
METADATA_REQUESTS = 6  # to read a status that changes once a heartbeat: the agents look twice; open, attributes, close
PACKAGES_BYTES = 0.5 * GB  # of the EFS client and of Python packages without PyTorch, assumed
TORCH_BYTES = 3 * GB
OBJECT_BYTES = 128e6  # read by a request: a shard of 256 MB takes two, HEAD and GET


def expect_traffic(
    spec: JobSpec,
    schedule: Schedule | None,
    internet: Internet,
    run_forecast: Forecast | None,
    installs_torch: bool,
    steps_done: int = 0,
    far_region: str = "",
    has_s3_endpoint: bool = True,
) -> tuple[TrafficForecast, tuple[str, ...]]:
    """Return what the traffic of a job is expected to cost, and lines for the user: assumptions, and what saves money.

    `far_region` is that of a bucket with the images from which the machines are in another one, or may be. Without
    `has_s3_endpoint`, images from S3 take the way to the internet. Without a forecast of the job's time, epochs count
    as once. The dollars an hour are those of the whole run, and the sum in the lines is that of the rest after
    `steps_done` steps.
    """
    machines = len(spec.machine_names)
    uses_nat = internet in (Internet.NAT, Internet.PRIVATE)
    hours = run_forecast.minutes / 60 if run_forecast else None
    save_bytes = checkpoint_bytes(schedule.recipe) if schedule else None
    per_hour = _heartbeat_traffic(machines).scaled(3600 / NETWORK_HEARTBEAT_SECONDS)
    once = Traffic(
        home_bytes=save_bytes or 0, internet_bytes=round(machines * (TORCH_BYTES if installs_torch else PACKAGES_BYTES))
    )
    lines = [f"heartbeats of {machines} machines, {_dollars(per_hour)} an hour" if machines > 1 else ""]
    if save_bytes is None:
        lines.append(f"checkpoints: their size is unknown, each GB written costs ${prices.EFS_PER_GB_WRITTEN:g}")
    else:
        save_seconds = max(spec.train.save_seconds, MIN_SAVE_SECONDS)
        epochs_per_hour = len(schedule.epochs) / hours if hours and schedule else 0.0
        saves_per_hour = min(3600 / MIN_SAVE_SECONDS, 3600 / save_seconds + epochs_per_hour)
        saves = Traffic(shared_written_bytes=round(save_bytes * saves_per_hour))
        per_hour += saves
        lines.append(
            f"checkpoints of {save_bytes / 1e6:.0f} MB every {save_seconds:g} s and epoch, {_dollars(saves)} an hour"
        )
    if uses_nat:
        lines.append(f"{once.internet_bytes / GB:.3g} GB of packages through the NAT gateway")
    image_traffic, is_once, image_line = (
        _image_traffic(spec, schedule, uses_nat, far_region, has_s3_endpoint) if schedule else (NO_TRAFFIC, True, "")
    )
    if is_once or not hours:
        once += image_traffic
    else:
        per_hour += image_traffic.scaled(1 / hours)
    lines.append(image_line)
    forecast = TrafficForecast(
        # The last, begun hour of a NAT gateway costs as much as a whole one.
        dollars_once=prices.traffic_dollars(once, uses_nat) + (internet is Internet.NAT) * prices.NAT_PER_HOUR,
        dollars_per_hour=prices.traffic_dollars(per_hour, uses_nat),
    )
    rest_hours = run_forecast.of_steps(steps_done).minutes / 60 if run_forecast else None
    return forecast, (_summary(forecast, rest_hours), *filter(None, lines))


def _heartbeat_traffic(machines: int) -> Traffic:
    """Return the traffic of one heartbeat: each machine writes its status and reads the statuses of all machines."""
    looks = machines * machines
    return Traffic(
        shared_written_bytes=machines * MIN_DATA_BYTES,
        shared_read_bytes=looks * (MIN_DATA_BYTES + METADATA_REQUESTS * METADATA_BYTES),
        home_bytes=machines * STATUS_BYTES,
    )


def _image_traffic(
    spec: JobSpec, schedule: Schedule, uses_nat: bool, far_region: str, has_s3_endpoint: bool
) -> tuple[Traffic, bool, str]:
    """Return what reading the images moves in the run, whether that is before training, and a line for the user."""
    machines = len(spec.machine_names)
    if "://" in spec.data_source:
        files = Traffic(object_reads=round(machines * fetch_bytes(schedule) / OBJECT_BYTES))
        if not far_region and (has_s3_endpoint or not uses_nat):
            return files, True, "images from S3, free but for the requests"
        return _paid_image_traffic(files, machines * fetch_bytes(schedule), schedule, uses_nat, far_region)
    is_fetched = bool(spec.data_source)
    if spec.generate_data or not Path(spec.data_source or spec.train.data).is_relative_to(SHARED_FOLDER):
        return NO_TRAFFIC, True, ""
    once_bytes = fetch_bytes(schedule)
    val_images = scaled_image_count(schedule.recipe.data.val, spec.train.scale)
    total_bytes = machines * once_bytes if is_fetched else read_bytes(schedule, val_images)
    manner = f"each of {machines} machines fetches them once" if is_fetched else "read anew in each epoch"
    if not has_known_images(schedule):
        price = f"their size is unknown, each GB read costs ${prices.EFS_PER_GB_READ:g}; from S3 it is free"
        return NO_TRAFFIC, True, f"images from the shared folder, {manner}: {price} (imgnet-cluster data put)"
    traffic = Traffic(shared_read_bytes=round(total_bytes))
    requests = Traffic(object_reads=round(machines * once_bytes / OBJECT_BYTES))
    storage_dollars = once_bytes / GB * prices.S3_PER_GB_MONTH
    price = f"at most {total_bytes / GB:,.0f} GB, {_dollars(traffic)}"
    s3_price = f"{_dollars(requests)}, and ${storage_dollars:,.2f} a month to store them"
    line = f"images from the shared folder, {manner}: {price}; from S3 {s3_price} (imgnet-cluster data put)"
    return traffic, is_fetched, line


def _paid_image_traffic(
    files: Traffic, total_bytes: float, schedule: Schedule, uses_nat: bool, far_region: str
) -> tuple[Traffic, bool, str]:
    """Return what fetching all images moves where no endpoint for S3 leads to the bucket, as to another region."""
    gb_dollars = bool(far_region) * prices.BETWEEN_REGIONS_PER_GB + uses_nat * prices.NAT_PER_GB
    way = f"in {far_region}, another region" if far_region else "without an S3 gateway endpoint,"
    way += " through the NAT gateway" if uses_nat else ""
    if not has_known_images(schedule):
        return files, True, f"images from S3 {way}: each GB costs ${gb_dollars:g}, not counted here"
    far_bytes = round(total_bytes) if far_region else 0
    traffic = replace(files, internet_bytes=round(total_bytes), between_regions_bytes=far_bytes)
    price = f"{total_bytes / GB:,.0f} GB, ${total_bytes / GB * gb_dollars:,.2f}"
    return traffic, True, f"images from S3 {way}: {price}"


def _summary(forecast: TrafficForecast, hours: float | None) -> str:
    """Return the first line: what all traffic is expected to cost."""
    terms = (f"${forecast.dollars_per_hour:,.2f} an hour", f"${forecast.dollars_once:,.2f} once")
    parts = ", and ".join(term for term in terms if not term.startswith("$0.00 ")) or "$0.00"
    if hours is None:
        return f"about {parts}"
    return f"about ${forecast.dollars_once + forecast.dollars_per_hour * hours:,.2f} in all: {parts}"


def _dollars(traffic: Traffic) -> str:
    return f"${prices.traffic_dollars(traffic, uses_nat=False):,.2f}"
