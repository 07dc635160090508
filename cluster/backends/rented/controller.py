"""The supervisor's part of a rented job: rents the machines, sets them up, replaces lost ones and limits the cost.

Everything from the first ssh connection on is `Fleet`'s work, as for the user's own machines. This module adds what is
special about rented machines: they boot, the cloud interrupts them, replacements are rented, and the whole job moves to
new machines when too few are left. What differs between clouds is in their `CloudProvider`.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace as replace_fields
from typing import Generic
from uuid import uuid4

from cluster.connectors.hosts_file import Host, Hosts
from cluster.connectors.ssh import Unreachable
from cluster.errors import ClusterError, NoCloudAccess, SetupFailed
from cluster.machines.fleet import Fleet
from cluster.state import supervisor_records
from cluster.state.run_folder import Run, RunFolder, stop_reason
from cluster.state.spec import JobSpec
from cluster.state.states import MachineState
from cluster.state.status import machine_statuses, read_agent_status, read_setup_record
from infra.errors import CloudError, Interrupted, MachinesRefused, NoCredentials, NoMachines
from train.tools.agent_protocol import RESULT_FILE
from train.tools.filesystem import to_json_bytes, write_atomic
from train.tools.records import encode

from . import final_checkpoint
from .boot import BootFailed, BootWaiter
from .console import describe_console
from .provider import CloudProvider, MachineT

logger = logging.getLogger(__name__)

HOSTS_FILE = "hosts.json"  # how to reach the machines, for other commands
CLOUD_POLL_SECONDS = 10.0  # between two questions to the cloud; one covers all machines of the job
SETUP_ATTEMPTS = 3
LAST_FILES_SECONDS = 120.0  # for the logs of a finished job; its instances are billed meanwhile
MAX_BOOT_EXCHANGES = 2  # machines that are exchanged because their boot failed, in all launches of this process
REPEATED_WARNING_SECONDS = 60.0  # between two log lines of the same warning


class EndedExternally(NoMachines):
    """The job's machines were terminated by a user or by a limit, so the job stops instead of renting new ones."""


class ActivityHandler(logging.Handler):
    """Shows what clouds and their controller log as the job's current activity. Warnings are no activity."""

    @classmethod
    def install(cls, run_folder: RunFolder) -> None:
        """Show the activity in a run folder, instead of in the one of an earlier controller of this process."""
        handler = cls(run_folder)
        for name in ("infra", "cluster.backends"):
            activity_logger = logging.getLogger(name)
            activity_logger.handlers[:] = [*(h for h in activity_logger.handlers if not isinstance(h, cls)), handler]

    def __init__(self, run_folder: RunFolder) -> None:
        super().__init__()
        self.run_folder = run_folder

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message to the run folder."""
        if record.levelno == logging.INFO:
            supervisor_records.write_activity(self.run_folder.path, record.getMessage())


class RentedJobController(Generic[MachineT]):
    """Manages the rented machines of one job. One object per supervisor process.

    Machines are named "0", "1", ...; a replacement takes over its predecessor's name.
    """

    def __init__(self, spec: JobSpec, run_folder: RunFolder, provider_class: type[CloudProvider[MachineT]]) -> None:
        self.spec = spec
        self.run_folder = run_folder
        self.provider = provider_class(spec, run_folder, self.get_stop_reason)
        self.fleet: Fleet | None = None  # None: no machines are rented, or they are not known yet
        self.live_machines: dict[str, MachineT] = {}  # by name, as the cloud reported them last
        self.last_poll_time = 0.0  # monotonic seconds
        self.last_warning_time = 0.0  # monotonic seconds
        self.poll_future: Future[dict[str, MachineT]] | None = None
        self.rental_futures: dict[str, Future[None]] = {}  # replacements that are being rented, by machine name
        self.access_error = ""  # why the cloud refuses the credentials, "" if it accepts them
        self.rented_at: dict[str, float] = {}  # when a machine took the name of another one, in monotonic seconds
        self.boot_exchange_count = 0
        self.last_refusal = ""  # why the last attempt to rent a replacement failed, "" if it did not
        self.hosts_lock = threading.Lock()
        self.hosts_version = 0  # counts the changes of `live_machines` and of host keys
        self.written_hosts_version = 0
        self.machines_lock = threading.Lock()  # guards changes of `live_machines` and `rented_at` by several threads
        self.boot_waiter = BootWaiter(self.provider)
        ActivityHandler.install(run_folder)

    def set_activity(self, activity: str) -> None:
        """Write the current activity to the run folder, where `status` reads it."""
        supervisor_records.write_activity(self.run_folder.path, activity)

    def get_stop_reason(self) -> str:
        """Return why nothing more is to be rented or waited for: a stop request or the job's end; else ""."""
        is_finished = self.run_folder.attempts.is_finished(self.run_folder.launch_id)
        return stop_reason(self.run_folder.shared) or ("the job is over" if is_finished else "")

    # --- renting ------------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Do one round of the supervisor's work. Returns whether the job is running, or may be.

        Raises `SetupFailed` when the job cannot start, `ClusterError` when cloud or disk fail, perhaps only briefly.
        """
        try:
            if self.fleet is None:
                # A supervisor that was killed may have left a finished job without its result; rent nothing for it.
                if self.run_folder.attempts.is_finished(self.run_folder.launch_id):
                    return False
                self._start_fleet()
            self._poll_cloud(time.monotonic())
            return self._tick()
        except (Interrupted, NoMachines) as error:
            if isinstance(error, EndedExternally):
                self._request_stop(str(error))
            raise SetupFailed(str(error)) from error
        except CloudError as error:
            if self.fleet is None and self.provider.first_machine_time is None:
                raise SetupFailed(str(error)) from error
            error_class = NoCloudAccess if isinstance(error, NoCredentials) else ClusterError
            raise error_class(self._describe_error(error)) from error

    def _start_fleet(self) -> None:
        """Find or rent the job's machines and open the fleet. Raises `Interrupted`, `NoMachines`, `CloudError`."""
        # Machines that are still there get the chance to save a checkpoint before the job stops.
        if (reason := self.get_stop_reason()) and not self.provider.list_machines():
            raise Interrupted(reason)
        max_dollars = self.provider.max_dollars
        is_first_launch = self.provider.first_machine_time is None
        if max_dollars is not None and is_first_launch and self.provider.earlier_cost >= max_dollars:
            raise NoMachines(
                f"the limit of {max_dollars:g} dollars (--max-price-total) is spent; launch again with a higher limit"
            )
        self.set_activity("renting machines")
        self.live_machines = self._find_or_rent()
        self._apply_cost_limit()
        hosts = self.provider.hosts(self.live_machines)
        # A missing machine needs an entry too, until it is replaced: any existing address will do.
        placeholder = next(iter(hosts.values()))
        hosts |= {name: placeholder for name in self.spec.machine_names if name not in hosts}
        written_hosts = self._write_hosts(hosts)
        self.fleet = Fleet(
            replace_fields(self.spec, hosts=written_hosts),
            self.run_folder,
            wait_until_ready=self._wait_until_ready,
            limit_start=self.provider.first_machine_time,
        )
        self.set_activity("")

    def _find_or_rent(self) -> dict[str, MachineT]:
        """Return the job's live machines by name. If there are none, rent all.

        Raises `EndedExternally` when the launch was ended on purpose, `NoMachines`, `CloudError`.
        """
        provider = self.provider
        provider.finish_open_requests()
        machines = provider.list_machines()
        resume_hint = f"to continue: imgnet-cluster resume {self.spec.name}"
        if provider.is_terminating:
            raise NoMachines(f"its machines were terminated; {resume_hint}")
        if not machines:
            reason = provider.external_termination_reason() or ("its time is over" if provider.is_overdue else "")
            if reason:
                raise EndedExternally(f"{reason}; {resume_hint}")
            self._new_launch_id()
            machines = provider.rent_all()
        reachable_machines = provider.ensure_reachable(machines)
        if machines and not reachable_machines:
            reachable_machines = provider.ensure_reachable(provider.rent_all())
        return reachable_machines

    def _write_hosts(self, hosts_by_name: Mapping[str, Host]) -> Hosts:
        """Write how to reach the machines to the run folder, and return it in the order of the machines' names."""
        hosts = Hosts(None, tuple(hosts_by_name[name] for name in self.spec.machine_names if name in hosts_by_name))
        content = {**encode(hosts), "names": list(hosts_by_name)}
        write_atomic(self.run_folder.path / HOSTS_FILE, to_json_bytes(content))
        return hosts

    def _new_launch_id(self) -> None:
        """Change the launch ID if earlier machines were set up, so that their status files differ from new ones."""
        setup_record = read_setup_record(self.run_folder)
        if setup_record.is_ready and setup_record.launch == self.run_folder.launch_id:
            launch_id = uuid4().hex
            self.provider.record_move(launch_id)
            write_atomic(self.run_folder.launch_path, launch_id.encode())

    def _apply_cost_limit(self) -> None:
        """Set the time limit at which the job reaches its price limit. The agents enforce only the time limit."""
        max_hours, grace_seconds = self.provider.compute_limits(self.provider.dollars_per_hour)
        if (max_hours, grace_seconds) == (self.spec.max_hours, self.spec.poweroff_grace):
            return
        max_dollars = self.provider.max_dollars
        requested_hours = self.provider.max_hours
        is_price_limited = max_dollars is not None and (requested_hours is None or max_hours < requested_hours)
        limit_name = f"the limit of {max_dollars:g} dollars (--max-price-total)" if is_price_limited else ""
        self.spec = replace_fields(self.spec, max_hours=max_hours, poweroff_grace=grace_seconds, limit_name=limit_name)
        write_atomic(self.run_folder.shared / "job.json", to_json_bytes(self.spec.to_json()))

    def _wait_until_ready(self, name: str) -> None:
        """Wait until a machine has booted. One whose boot fails is exchanged, `MAX_BOOT_EXCHANGES` at most."""
        assert self.fleet
        while True:
            try:
                self.boot_waiter.wait_until_ready(self.fleet, name, self._recent_machines)
                return self._update_hosts()
            except BootFailed as error:
                if not (machine := self.live_machines.get(name)):
                    raise
                reason = f"{error}{describe_console(self.provider, machine, self.run_folder.path)}"
                with self.hosts_lock:
                    is_allowed = self.boot_exchange_count < MAX_BOOT_EXCHANGES
                    self.boot_exchange_count += is_allowed
                if not is_allowed:
                    raise SetupFailed(f"{reason}; {MAX_BOOT_EXCHANGES} machines were exchanged before") from error
                if self.get_stop_reason() or self.fleet.shortage_reason:
                    raise SetupFailed(reason) from error
            logger.warning("machine %s (%s): %s; it is exchanged", name, machine.id, reason)
            try:
                self._rent_in_place_of(name, machine, reason)
            except CloudError as error:
                raise SetupFailed(f"{reason}; no other machine could be rented: {error}") from error

    def _recent_machines(self) -> dict[str, MachineT]:
        """Return the live machines, at most `CLOUD_POLL_SECONDS` old. Used during set-up, when `poll` does not run."""
        with self.hosts_lock:
            is_stale = time.monotonic() - self.last_poll_time > CLOUD_POLL_SECONDS
            if is_stale:
                self.last_poll_time = time.monotonic()
        if is_stale:
            asked_at = time.monotonic()
            with contextlib.suppress(CloudError):
                self._update_machines(self.provider.list_machines(), asked_at)
        return self.live_machines

    def _update_hosts(self) -> None:
        """Update the addresses in the fleet and in the job's ssh configuration.

        Many machines call this at the same time, each from its thread. One update serves all that wait for it.
        """
        self.hosts_version += 1
        with self.hosts_lock:
            assert self.fleet
            if self.written_hosts_version == self.hosts_version:
                return
            version = self.hosts_version
            hosts = self.fleet.hosts | self.provider.hosts(self.live_machines)
            for name, host in hosts.items():
                if host != self.fleet.hosts[name]:
                    self.fleet.replace_host(name, host)
            self._write_hosts(hosts)
            self.fleet.write_ssh_config()
            self.written_hosts_version = version

    # --- monitoring ---------------------------------------------------------------------------------------------------

    def _poll_cloud(self, now: float) -> None:
        """Ask the cloud in the background which machines live, and stop the job at its limits. `now` is monotonic."""
        assert self.fleet
        if self.poll_future and self.poll_future.done():
            finished_poll, self.poll_future = self.poll_future, None
            try:
                self._update_machines(finished_poll.result(), self.last_poll_time)
                self.access_error = ""
            except CloudError as error:
                if isinstance(error, NoCredentials):
                    self.access_error = self._describe_error(error)
                if now - self.last_warning_time > REPEATED_WARNING_SECONDS:
                    self.last_warning_time = now
                    logger.info(self._describe_error(error))
        if self.poll_future is None and now - self.last_poll_time > CLOUD_POLL_SECONDS:
            self.last_poll_time = now
            self.poll_future = self.fleet.pool.submit(self.provider.list_machines)
            if not self.get_stop_reason() and self.provider.is_overdue:
                # A machine hangs so that neither its agent nor its own power-off works.
                self._request_stop("its time is over, and not all of its machines have ended")
        max_dollars = self.provider.max_dollars
        if max_dollars is None or self.get_stop_reason():
            return
        if self.provider.total_dollars(time.time()) >= max_dollars:
            self._request_stop(f"the limit of {max_dollars:g} dollars (--max-price-total) was reached")

    def _request_stop(self, reason: str) -> None:
        """Write a stop request, which all agents follow."""
        write_atomic(self.run_folder.shared / "stop", to_json_bytes({"time": time.time(), "reason": reason}))
        logger.info(reason)

    def _update_machines(self, seen_machines: dict[str, MachineT], asked_at: float) -> None:
        """Take over the cloud's list of live machines, as it was at `asked_at` or later. Raises `CloudError`."""
        previous = self.live_machines
        just_rented = self._rented_since(asked_at)
        for name in previous.keys() - seen_machines.keys() - just_rented.keys():
            logger.info(f"machine {name} ({previous[name].id}) is gone")
        live_machines = self.provider.ensure_reachable({**seen_machines, **just_rented})
        with self.machines_lock:
            for name, machine in self._rented_since(asked_at).items():
                if name not in live_machines or live_machines[name].id != machine.id:
                    live_machines[name] = machine
            self.live_machines = live_machines
        if any(previous.get(name) != machine for name, machine in live_machines.items()):
            self._update_hosts()

    def _rented_since(self, asked_at: float) -> dict[str, MachineT]:
        """Return the replacements rented since `asked_at`: a list of machines requested then may lack them."""
        machines = self.live_machines
        return {
            name: machines[name] for name, moment in self.rented_at.items() if moment >= asked_at and name in machines
        }

    def _describe_error(self, error: CloudError) -> str:
        """Return the message of a cloud's error; without credentials, also when the machines power themselves off."""
        if not isinstance(error, NoCredentials):
            return str(error)
        expiry_times = [machine.expires for machine in self.live_machines.values()]
        limit = f"at {max(expiry_times)}" if expiry_times else "at the limit of --max-hours"
        return f"{error}; the machines power off {limit}"

    def _tick(self) -> bool:
        """Set up, synchronize and, if needed, move the machines. Returns whether the job is running, or may be."""
        assert self.fleet
        fleet = self.fleet
        if not self._set_up_machines() or self._must_move():
            self._move_to_new_machines()
            return True
        try:
            fleet.push_stop_request()
            fleet.pull_files()
            if not fleet.agents_alive() and not self._is_renting:
                if not fleet.pull_last_files(LAST_FILES_SECONDS):
                    return True
                if (self.run_folder.shared / RESULT_FILE).exists():
                    final_checkpoint.download_final_checkpoint(
                        fleet, self.provider, self.live_machines, self.set_activity
                    )
                return not self.get_stop_reason() and self._move_if_interrupted()
        except Unreachable as error:
            # Machines that the cloud no longer has will never answer. A job that is over does not wait for them.
            is_over = bool(self.get_stop_reason()) and not self._is_renting
            if is_over and not self.live_machines and not self.provider.list_machines():
                return False
            logger.warning("%s", error)
            self._warn_of_closed_access(time.monotonic())
        return True

    def _warn_of_closed_access(self, now: float) -> None:
        """Log a warning when ssh is open to an address that this computer no longer has. `now` is monotonic."""
        if now - self.last_warning_time < REPEATED_WARNING_SECONDS:
            return
        self.last_warning_time = now
        with contextlib.suppress(CloudError):
            if warning := self.provider.access_warning():
                logger.info(warning)

    def _set_up_machines(self) -> bool:
        """Set up all machines, and replace those that the cloud took away. Returns False when that is impossible.

        Raises `SetupFailed` for machines that are alive but cannot be used.
        """
        assert self.fleet
        for _ in range(SETUP_ATTEMPTS):
            try:
                self.fleet.set_up_machines()
                return True
            except SetupFailed as error:
                last_error = error
                live_machines = self.provider.list_machines()
                gone_names = [name for name in self.spec.machine_names if name not in live_machines]
                if self.get_stop_reason() or not gone_names:
                    raise
                self.live_machines = live_machines
                if not live_machines:
                    return False
                for name in gone_names:
                    try:
                        self.live_machines[name] = self.provider.rent_replacement(name)
                    except MachinesRefused as refusal:
                        self.last_refusal = str(refusal)
                        return False
                self._update_hosts()
        raise last_error

    def _move_if_interrupted(self) -> bool:
        """Move to new machines if no agent runs because the cloud interrupted the old ones. Returns whether it did."""
        statuses = machine_statuses(Run(self.spec, self.run_folder)).values()
        self.live_machines = self.provider.list_machines()
        if any(status.ended and status.state == MachineState.STOPPED for status in statuses):  # reached its limit
            return False
        has_left = any(status.state == MachineState.LEFT for status in statuses)
        if not has_left and len(self.live_machines) >= self.spec.recovery.min_machines:
            return False
        self._move_to_new_machines()
        return True

    @property
    def _is_renting(self) -> bool:
        """Whether a replacement is being rented now. `rental_futures` also holds finished rentals not yet looked at."""
        return any(not future.done() for future in self.rental_futures.values())

    def _must_move(self) -> bool:
        """Whether too few machines are left and no replacement can be rented in their zone."""
        has_too_few = len(self.live_machines) < self.spec.recovery.min_machines and not self._is_renting
        return has_too_few and not self.get_stop_reason() and (bool(self.last_refusal) or not self.live_machines)

    def _move_to_new_machines(self) -> None:
        """Terminate the remaining machines. The next `poll` rents all anew, perhaps elsewhere; training continues."""
        assert self.fleet
        logger.info(f"{len(self.live_machines)} machines are left; the job moves to new ones. {self.last_refusal}")
        self.fleet.close()
        self.fleet = None
        self.live_machines = {}
        self.last_refusal = ""
        self.rental_futures = {}
        while machines := self.provider.list_machines():
            self.provider.terminate([machine.id for machine in machines.values()], "all moved")
            self.provider.sleep_unless_stopping(1.0)

    def dead_machines(self) -> list[str]:
        """Return the machines that certainly have no running agent: the cloud says that they are gone, or they say so.

        Machines that are already being replaced or restarted are left out.
        """
        if self.fleet is None:  # all are gone; the next `poll` rents new ones
            return []
        for name in [name for name, future in self.rental_futures.items() if future.done()]:
            error = self.rental_futures.pop(name).exception()
            self.last_refusal = str(error) if isinstance(error, MachinesRefused) else ""
            if error:
                logger.info(f"machine {name} could not be replaced: {error}")
        gone_names = {name for name in self.spec.machine_names if name not in self.live_machines}
        dead_names = {*self.fleet.dead_machines(), *gone_names}
        return sorted(dead_names - self.rental_futures.keys() - self.fleet.restarting.keys(), key=int)

    def replace(self, name: str) -> None:
        """Start a machine's agent again, or rent another one when the old one is gone or about to leave."""
        assert self.fleet
        status = read_agent_status(self.run_folder, name)
        has_left = status is not None and status.ended and status.state == MachineState.LEFT
        old_machine = self.live_machines.get(name)
        if old_machine and not has_left:
            self.fleet.restart_agent(name)
        elif name not in self.rental_futures:
            self.rental_futures[name] = self.fleet.pool.submit(self._rent_replacement, name, old_machine)

    def _rent_replacement(self, name: str, old_machine: MachineT | None) -> None:
        """Rent another machine in place of a lost one and start its agent. Runs in a thread of the fleet's pool."""
        assert self.fleet
        reason = ""
        if old_machine:  # it got a spot notice or a request to leave, and its name is needed for the next machine
            status = read_agent_status(self.run_folder, name)
            reason = status.reason if status else ""
            logger.info(f"machine {name} leaves: {reason}")
        self._rent_in_place_of(name, old_machine, reason)
        self.fleet.restart_agent(name)

    def _rent_in_place_of(self, name: str, old_machine: MachineT | None, reason: str) -> None:
        """Terminate a machine if it is still there, and rent another one under its name. Raises `CloudError`."""
        if old_machine:
            self.provider.terminate([old_machine.id], reason)
        logger.info(f"renting a replacement for machine {name}")
        machine = self.provider.rent_replacement(name)
        with self.machines_lock:
            self.rented_at[name] = time.monotonic()
            self.live_machines[name] = machine
        logger.info(f"machine {name} is now {machine.id}")
        self._update_hosts()
