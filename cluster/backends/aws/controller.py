"""The supervisor's part of a job on AWS: rents the instances, sets them up, replaces lost ones and limits the cost.

Everything from the first ssh connection on is `Fleet`'s work, as for the user's own machines. This module adds what is
special about instances: they boot, EC2 interrupts them, replacements are rented, and the whole job moves to new
instances when too few are left.
"""

import contextlib
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import replace as replace_fields
from uuid import uuid4

from cluster.connectors.ssh import Unreachable
from cluster.errors import ClusterError, SetupFailed
from cluster.machines.fleet import Fleet
from cluster.state import attempts, supervisor_records
from cluster.state.run_folder import RunFolder, stop_reason
from cluster.state.spec import JobSpec
from cluster.state.states import MachineState
from cluster.state.status import machine_statuses, read_agent_status, read_setup_record
from infra.aws import tags
from infra.aws.client import get_public_address
from infra.aws.errors import CloudError, Interrupted, NoCredentials
from infra.aws.instances.gang import LaunchRefused, NoMachines
from infra.aws.instances.instances import Instance
from infra.aws.market import billing
from train.tools.agent_protocol import RESULT_FILE
from train.tools.filesystem import to_json_bytes, write_atomic

from . import final_checkpoint, ssh_access
from .boot import BootWaiter
from .instances import EndedExternally, JobInstances

logger = logging.getLogger(__name__)

EC2_POLL_SECONDS = 10.0  # between two DescribeInstances calls; one call covers all machines of the job
SETUP_ATTEMPTS = 3
REPEATED_WARNING_SECONDS = 60.0  # between two log lines of the same warning


class AwsController:
    """Manages the instances of one job. One object per supervisor process.

    Machines are named "0", "1", ...; a replacement instance takes over its predecessor's name.
    """

    def __init__(self, spec: JobSpec, run_folder: RunFolder) -> None:
        self.spec = spec
        self.run_folder = run_folder
        self.job_instances = JobInstances(spec, run_folder, self.log, self.get_stop_reason)
        self.fleet: Fleet | None = None  # None: no instances are rented, or they are not known yet
        self.live_instances: dict[str, Instance] = {}  # by machine name, as EC2 reported them last
        self.last_poll_time = 0.0  # monotonic seconds
        self.last_warning_time = 0.0  # monotonic seconds
        self.poll_future: Future[dict[str, Instance]] | None = None
        self.rental_futures: dict[str, Future[None]] = {}  # replacements that are being rented, by machine name
        self.last_refusal = ""  # why the last attempt to rent a replacement failed, "" if it did not
        self.hosts_lock = threading.Lock()
        self.boot_waiter = BootWaiter(self.job_instances, self.get_stop_reason)
        self.cost_meter = billing.CostMeter(self.job_instances.journal)

    def log(self, text: str) -> None:
        """Log a message, and show it as the current activity."""
        logger.info("%s", text)
        self.set_activity(text)

    def set_activity(self, activity: str) -> None:
        """Write the current activity to the run folder, where `status` reads it."""
        supervisor_records.write_activity(self.run_folder.path, activity)

    def get_stop_reason(self) -> str:
        """Return why nothing more is to be rented or waited for: a stop request or the job's end; else ""."""
        is_finished = attempts.is_finished(self.run_folder.shared, self.run_folder.launch_id)
        return stop_reason(self.run_folder.shared) or ("the job is over" if is_finished else "")

    # --- renting ------------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Do one round of the supervisor's work. Returns whether the job is running, or may be.

        Raises `SetupFailed` when the job cannot start, `ClusterError` when AWS or the disk fails, perhaps only briefly.
        """
        try:
            if self.fleet is None:
                # A supervisor that was killed may have left a finished job without its result; rent nothing for it.
                if attempts.is_finished(self.run_folder.shared, self.run_folder.launch_id):
                    return False
                self._start_fleet()
            self._poll_ec2(time.monotonic())
            return self._tick()
        except (Interrupted, NoMachines) as error:
            if isinstance(error, EndedExternally):
                self._request_stop(str(error))
            raise SetupFailed(str(error)) from error
        except CloudError as error:
            if self.fleet is None and self.job_instances.first_machine_time is None:
                raise SetupFailed(str(error)) from error
            raise ClusterError(self._describe_error(error)) from error

    def _start_fleet(self) -> None:
        """Find or rent the job's instances and open the fleet. Raises `Interrupted`, `NoMachines`, `CloudError`."""
        # Instances that are still there get the chance to save a checkpoint before the job stops.
        if (reason := self.get_stop_reason()) and not self.job_instances.list_instances():
            raise Interrupted(reason)
        max_dollars = self.job_instances.rental_spec.max_dollars
        is_first_launch = self.job_instances.first_machine_time is None
        if max_dollars is not None and is_first_launch and self.job_instances.earlier_cost >= max_dollars:
            raise NoMachines(
                f"the limit of {max_dollars:g} dollars (--max-price-total) is spent; launch again with a higher limit"
            )
        self.set_activity("renting machines")
        self.live_instances = self.job_instances.find_or_rent(self._new_launch_id)
        self._apply_cost_limit()
        hosts = ssh_access.ssh_hosts(self.job_instances.journal, self.live_instances)
        # A missing machine needs an entry too, until it is replaced: any existing address will do.
        placeholder = next(iter(hosts.values()))
        hosts |= {name: placeholder for name in self.spec.machine_names if name not in hosts}
        written_hosts = self.job_instances.write_hosts(hosts)
        self.fleet = Fleet(
            replace_fields(self.spec, hosts=written_hosts.to_json()),
            self.run_folder,
            wait_until_ready=self._wait_until_ready,
            limit_start=self.job_instances.first_machine_time,
        )
        self.set_activity("")

    def _new_launch_id(self) -> None:
        """Change the launch ID if earlier instances were set up, so that their status files differ from new ones."""
        setup_record = read_setup_record(self.run_folder)
        if setup_record.is_ready and setup_record.launch == self.run_folder.launch_id:
            launch_id = uuid4().hex
            self.job_instances.record_move(launch_id)
            write_atomic(self.run_folder.launch_path, launch_id.encode())

    def _apply_cost_limit(self) -> None:
        """Convert the price limit into a time limit, now that the price is known. The agents enforce the time limit."""
        place = self.job_instances.current_place
        assert place
        max_hours, grace_seconds = self.job_instances.compute_limits(place)
        if (max_hours, grace_seconds) == (self.spec.max_hours, self.spec.poweroff_grace):
            return
        max_dollars = self.job_instances.rental_spec.max_dollars
        requested_hours = self.job_instances.max_hours
        is_price_limited = max_dollars is not None and (requested_hours is None or max_hours < requested_hours)
        limit_name = f"the limit of {max_dollars:g} dollars (--max-price-total)" if is_price_limited else ""
        self.spec = replace_fields(self.spec, max_hours=max_hours, poweroff_grace=grace_seconds, limit_name=limit_name)
        write_atomic(self.run_folder.shared / "job.json", to_json_bytes(self.spec.to_json()))

    def _wait_until_ready(self, name: str) -> None:
        assert self.fleet
        self.boot_waiter.wait_until_ready(self.fleet, name, self._recent_instances)
        self._update_hosts()

    def _recent_instances(self) -> dict[str, Instance]:
        """Return the live instances, at most `EC2_POLL_SECONDS` old. Used during set-up, when `poll` does not run."""
        with self.hosts_lock:
            is_stale = time.monotonic() - self.last_poll_time > EC2_POLL_SECONDS
            if is_stale:
                self.last_poll_time = time.monotonic()
        if is_stale:
            with contextlib.suppress(CloudError):
                self._update_instances(self.job_instances.list_instances())
        return self.live_instances

    def _update_hosts(self) -> None:
        """Update the addresses in the fleet and in the job's ssh configuration."""
        with self.hosts_lock:
            assert self.fleet
            hosts = self.fleet.hosts | ssh_access.ssh_hosts(self.job_instances.journal, self.live_instances)
            for name, host in hosts.items():
                if host != self.fleet.hosts[name]:
                    self.fleet.replace_host(name, host)
            self.job_instances.write_hosts(hosts)

    # --- monitoring ---------------------------------------------------------------------------------------------------

    def _poll_ec2(self, now: float) -> None:
        """Ask EC2 in the background which instances are alive, and stop the job at its limits. `now` is monotonic."""
        assert self.fleet
        if self.poll_future and self.poll_future.done():
            finished_poll, self.poll_future = self.poll_future, None
            try:
                self._update_instances(finished_poll.result())
            except CloudError as error:
                if now - self.last_warning_time > REPEATED_WARNING_SECONDS:
                    self.last_warning_time = now
                    self.log(self._describe_error(error))
        if self.poll_future is None and now - self.last_poll_time > EC2_POLL_SECONDS:
            self.last_poll_time = now
            self.poll_future = self.fleet.pool.submit(self.job_instances.list_instances)
            if not self.get_stop_reason() and self.job_instances.is_overdue:
                # A machine hangs so that neither its agent nor its own power-off works.
                self._request_stop("its time is over, and not all of its machines have ended")
        max_dollars = self.job_instances.rental_spec.max_dollars
        if max_dollars is None or self.get_stop_reason():
            return
        if self.cost_meter.total_dollars(time.time()) >= max_dollars:
            self._request_stop(f"the limit of {max_dollars:g} dollars (--max-price-total) was reached")

    def _request_stop(self, reason: str) -> None:
        """Write a stop request, which all agents follow."""
        write_atomic(self.run_folder.shared / "stop", to_json_bytes({"time": time.time(), "reason": reason}))
        self.log(reason)

    def _update_instances(self, seen_instances: dict[str, Instance]) -> None:
        """Take over EC2's list of live instances. Raises `CloudError`."""
        for name in self.live_instances.keys() - seen_instances.keys():
            self.log(f"machine {name} ({self.live_instances[name].id}) is gone")
        # The list may be older than a replacement that was just rented.
        just_rented = {name: self.live_instances[name] for name in self.rental_futures if name in self.live_instances}
        previous = self.live_instances
        self.live_instances = self.job_instances.ensure_jump_host({**seen_instances, **just_rented})
        if any(previous.get(name) != instance for name, instance in self.live_instances.items()):
            self._update_hosts()

    def _describe_error(self, error: CloudError) -> str:
        """Return the message of an AWS error; without credentials, also when the machines power themselves off."""
        if not isinstance(error, NoCredentials):
            return str(error)
        expiry_times = [instance.tags.get(tags.EXPIRES, "") for instance in self.live_instances.values()]
        limit = f"at {max(expiry_times)}" if expiry_times else "at the limit of --max-hours"
        return f"{error}; the machines power off {limit}"

    def _tick(self) -> bool:
        """Set up, synchronize and, if needed, move the machines. Returns whether the job is running, or may be."""
        assert self.fleet
        fleet = self.fleet
        if not self._set_up_machines() or self._must_move():
            self._move_to_new_instances()
            return True
        try:
            fleet.push_stop_request()
            fleet.pull_files()
            if not fleet.agents_alive() and not self._is_renting:
                fleet.pull_files()  # what the last agent wrote just before it ended
                if (self.run_folder.shared / RESULT_FILE).exists():
                    final_checkpoint.download_final_checkpoint(
                        fleet, self.job_instances, self.live_instances, self.set_activity
                    )
                return not self.get_stop_reason() and self._move_if_interrupted()
        except Unreachable as error:
            logger.warning("%s", error)
            self._warn_ip_changed(time.monotonic())
        return True

    def _warn_ip_changed(self, now: float) -> None:
        """Log a warning when ssh is open to an address that this computer no longer has. `now` is monotonic."""
        if now - self.last_warning_time < REPEATED_WARNING_SECONDS:
            return
        self.last_warning_time = now
        allowed_address = self.job_instances.allowed_address
        with contextlib.suppress(CloudError):
            public_address = get_public_address()
            if public_address != allowed_address:
                self.log(
                    f"the address of this computer is now {public_address}, but ssh is open to {allowed_address}; "
                    "run: imgnet-cluster up --stack"
                )

    def _set_up_machines(self) -> bool:
        """Set up all machines, and replace those that EC2 terminated meanwhile. Returns False when that is impossible.

        Raises `SetupFailed` for machines that are alive but cannot be used.
        """
        assert self.fleet
        for _ in range(SETUP_ATTEMPTS):
            try:
                self.fleet.set_up_machines()
                return True
            except SetupFailed as error:
                last_error = error
                live_instances = self.job_instances.list_instances()
                gone_names = [name for name in self.spec.machine_names if name not in live_instances]
                if self.get_stop_reason() or not gone_names:
                    raise
                self.live_instances = live_instances
                if not live_instances:
                    return False
                for name in gone_names:
                    try:
                        self.live_instances[name] = self.job_instances.rent_replacement(name)
                    except LaunchRefused as refusal:
                        self.last_refusal = str(refusal)
                        return False
                self._update_hosts()
        raise last_error

    def _move_if_interrupted(self) -> bool:
        """Move to new instances if no agent is running because EC2 interrupted the old ones. Returns whether it did."""
        statuses = machine_statuses(self.run_folder, self.spec).values()
        self.live_instances = self.job_instances.list_instances()
        if any(status.ended and status.state == MachineState.STOPPED for status in statuses):  # reached its limit
            return False
        has_left = any(status.state == MachineState.LEFT for status in statuses)
        if not has_left and len(self.live_instances) >= self.spec.recovery.min_machines:
            return False
        self._move_to_new_instances()
        return True

    @property
    def _is_renting(self) -> bool:
        """Whether a replacement is being rented now. `rental_futures` also holds finished rentals not yet looked at."""
        return any(not future.done() for future in self.rental_futures.values())

    def _must_move(self) -> bool:
        """Whether too few instances are left and no replacement can be rented in their zone."""
        has_too_few = len(self.live_instances) < self.spec.recovery.min_machines and not self._is_renting
        return has_too_few and not self.get_stop_reason() and (bool(self.last_refusal) or not self.live_instances)

    def _move_to_new_instances(self) -> None:
        """Terminate the remaining instances. The next `poll` rents all anew, perhaps elsewhere; training continues."""
        assert self.fleet
        self.log(f"{len(self.live_instances)} machines are left; the job moves to new ones. {self.last_refusal}")
        self.fleet.close()
        self.fleet = None
        self.live_instances = {}
        self.last_refusal = ""
        self.rental_futures = {}
        self.job_instances.terminate_all()

    def dead_machines(self) -> list[str]:
        """Return the machines that certainly have no running agent: EC2 says that they are gone, or they say so.

        Machines that are already being replaced or restarted are left out.
        """
        if self.fleet is None:  # all are gone; the next `poll` rents new ones
            return []
        for name in [name for name, future in self.rental_futures.items() if future.done()]:
            error = self.rental_futures.pop(name).exception()
            self.last_refusal = str(error) if isinstance(error, LaunchRefused) else ""
            if error:
                self.log(f"machine {name} could not be replaced: {error}")
        gone_names = {name for name in self.spec.machine_names if name not in self.live_instances}
        dead_names = {*self.fleet.dead_machines(), *gone_names}
        return sorted(dead_names - self.rental_futures.keys() - self.fleet.restarting.keys(), key=int)

    def replace(self, name: str) -> None:
        """Start a machine's agent again, or rent another instance when the old one is gone or about to leave."""
        assert self.fleet
        status = read_agent_status(self.run_folder, name)
        has_left = status is not None and status.ended and status.state == MachineState.LEFT
        old_instance = self.live_instances.get(name)
        if old_instance and not has_left:
            self.fleet.restart_agent(name)
        elif name not in self.rental_futures:
            self.rental_futures[name] = self.fleet.pool.submit(self._rent_replacement, name, old_instance)

    def _rent_replacement(self, name: str, old_instance: Instance | None) -> None:
        """Rent another instance for a machine and start its agent. Runs in a thread of the fleet's pool."""
        assert self.fleet
        if old_instance:  # it got a spot notice or a request to leave, and its name is needed for the next instance
            status = read_agent_status(self.run_folder, name)
            reason = status.reason if status else ""
            self.log(f"machine {name} leaves: {reason}")
            self.job_instances.terminate([old_instance.id], reason)
        self.log(f"renting a replacement for machine {name}")
        instance = self.job_instances.rent_replacement(name)
        self.live_instances[name] = instance
        self.log(f"machine {name} is now {instance.id}")
        self._update_hosts()
        self.fleet.restart_agent(name)
