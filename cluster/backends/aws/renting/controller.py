"""The supervisor's part of a rented job: rents the machines, sets them up, replaces lost ones and limits the cost.

Everything from the first ssh connection on is `Fleet`'s work, as for the user's own machines. This module adds what is
special about rented machines: they boot, EC2 interrupts them, replacements are rented, and the whole job moves to new
machines when too few are left.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace as replace_fields
from functools import partial
from uuid import uuid4

from cluster.connectors.hosts_file import Host, Hosts
from cluster.connectors.ssh import Unreachable
from cluster.errors import ClusterError, SetupFailed
from cluster.machines.fleet import Fleet
from cluster.state import supervisor_records
from cluster.state.heartbeats import MachineStatus
from cluster.state.run_folder import Run, RunFolder
from cluster.state.spec import JobSpec
from cluster.state.states import MachineState
from cluster.state.status import machine_statuses, read_final_status, read_setup_record
from infra.aws.instances.instances import Instance
from infra.errors import (
    AdoptedElsewhere,
    CloudError,
    EndedExternally,
    Interrupted,
    MachinesRefused,
    NoAnswer,
    NoCredentials,
    NoMachines,
)
from train.tools.files import write_atomic
from train.tools.records import DamagedRecord, encode
from train.tools.text_files import to_json_bytes

from . import final_network
from .boot import BootFailed, broken_reason, describe_console, wait_until_ready
from .end_watch import EndWatch
from .instances import JobInstances, NoExchangeLeft
from .traffic import TrafficLog

logger = logging.getLogger(__name__)

HOSTS_FILE = "hosts.json"  # how to reach the machines, for other commands
CLOUD_POLL_SECONDS = 10.0  # between two questions to the cloud; one covers all machines of the job
NOT_RENTED = "not rented yet"  # why a spare cannot be used that is rented later than the others
SETUP_ATTEMPTS = 3
LAST_FILES_SECONDS = 120.0  # for the logs of a finished job; its instances are billed meanwhile
REPEATED_WARNING_SECONDS = 60.0  # between two log lines of the same warning


class RentedJobController:
    """Manages the rented machines of a job: "0", "1", ... A replacement takes over its predecessor's name."""

    def __init__(self, spec: JobSpec, run_folder: RunFolder, provider_class: type[JobInstances]) -> None:
        self.spec = spec
        self.run_folder = run_folder
        self.get_stop_reason = run_folder.end_reason  # why nothing more is to be rented or waited for, else ""
        self.set_activity = partial(supervisor_records.write_activity, run_folder.path)  # for `status`
        self.provider = provider_class(spec, run_folder, self.get_stop_reason)
        self.end_watch = EndWatch(self.provider, self.get_stop_reason)
        self.fleet: Fleet | None = None  # None: no machines are rented, or they are not known yet
        self.live_machines: dict[str, Instance] = {}  # by name, as the cloud reported them last
        self.last_poll_time = 0.0  # monotonic seconds
        self.last_warning_time = 0.0  # monotonic seconds
        self.poll_future: Future[dict[str, Instance]] | None = None
        self.rental_futures: dict[str, Future[None]] = {}  # replacements that are being rented, by machine name
        self.exchanged = set[str]()  # machines whose boot has failed, while others are rented in their place
        self.access_error = ""  # why the cloud refuses the credentials, "" if it accepts them
        self.rented_at: dict[str, float] = {}  # when a machine took the name of another one, in monotonic seconds
        self.replacement_error = ""  # of the last attempt to rent a replacement, "" if it did not fail
        self.last_refusal = ""  # that error, if the cloud refused the machine
        self.warned_ids = set[str]()  # agents whose machine is known to be at risk
        self.risk_count = 0  # the most machines at risk at one time, since all were rented
        self.hosts_lock = threading.Lock()
        self.hosts_version = 0  # counts the changes of `live_machines` and of host keys
        self.written_hosts_version = 0
        self.machines_lock = threading.Lock()  # guards changes of `live_machines` and `rented_at` by several threads
        self.traffic_log = TrafficLog(run_folder.path)

    # --- renting ------------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Do one round of the supervisor's work. Returns whether the job is running, or may be.

        Raises `SetupFailed` when the job cannot start, `ClusterError` when cloud or disk fail, perhaps only briefly.
        """
        try:
            if self.fleet is None:
                # A supervisor that was killed may have left a finished job without its result; rent nothing for it.
                if self.run_folder.attempts.is_finished(self.run_folder.launch_id) or self.end_watch.is_given_up:
                    return False
                self._start_fleet()
            self._poll_cloud()
            is_running = not self.end_watch.is_given_up and self._tick()
            if self.fleet:
                self.traffic_log.count(self.fleet, self.provider.gateway_bytes, is_last=not is_running)
            return is_running
        except (Interrupted, NoMachines) as error:
            if isinstance(error, EndedExternally):
                self._request_stop(str(error))
            raise SetupFailed(str(error)) from error
        except AdoptedElsewhere:
            raise
        except CloudError as error:
            if self.fleet is None and self.provider.first_machine_time is None:
                raise SetupFailed(str(error)) from error
            error_class = NoCredentials if isinstance(error, NoCredentials) else ClusterError
            raise error_class(self._describe(error)) from error

    def _describe(self, error: CloudError) -> str:
        """Return the message of an error. Without credentials, add when the job's machines power themselves off."""
        if not isinstance(error, NoCredentials):
            return str(error)
        limit = max((machine.expires for machine in self.live_machines.values()), default="the limit of --max-hours")
        return f"{error}; the machines power off at {limit}"

    def _start_fleet(self) -> None:
        """Find or rent the job's machines and open the fleet. Raises `Interrupted`, `NoMachines`, `CloudError`."""
        # Machines that are still there get the chance to save a checkpoint before the job stops.
        if (reason := self.get_stop_reason()) and not self.provider.list_machines():
            raise Interrupted(reason)
        max_dollars = self.provider.max_dollars
        is_first_launch = self.provider.first_machine_time is None
        if max_dollars is not None and is_first_launch and self.provider.earlier_cost >= max_dollars:
            raise NoMachines(
                f"the limit of ${max_dollars:,.2f} (--max-price-total) is spent; to raise it: "
                f"imgnet-cluster extend {self.spec.name} --max-price-total DOLLARS"
            )
        self.set_activity("renting machines")
        self.live_machines = self._find_or_rent()
        limited_spec = self.provider.with_machine_limits(self.spec)
        if limited_spec != self.spec:  # the agents enforce only the time limit
            self.spec = limited_spec
            write_atomic(self.run_folder.shared / "job.json", to_json_bytes(self.spec.to_json()))
        hosts = self.provider.hosts(self.live_machines)
        # A missing machine needs an entry too, until it is replaced: any existing address will do.
        placeholder = next(iter(hosts.values()))
        hosts |= {name: placeholder for name in self.spec.machine_names if name not in hosts}
        written_hosts = self._write_hosts(hosts)
        self.fleet = Fleet(
            replace_fields(self.spec, hosts=written_hosts),
            self.run_folder,
            wait_until_ready=self._wait_until_ready,
            while_waiting=self._poll_cloud,
            limit_start=self.provider.first_machine_time,
        )
        self.set_activity("")

    def _find_or_rent(self) -> dict[str, Instance]:
        """Return the live machines by name; if there are none, rent all. Raises `EndedExternally`, `CloudError`."""
        provider = self.provider
        provider.finish_open_requests()
        machines = provider.list_machines()
        resume_hint = f"to continue: imgnet-cluster resume {self.spec.name}"
        if provider.is_terminating:
            raise NoMachines(f"its machines were terminated; {resume_hint}")
        if not machines:
            reason = provider.external_termination_reason() or ("its time limit passed" if provider.is_overdue else "")
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
        if self._is_set_up:
            launch_id = uuid4().hex
            self.provider.record_move(launch_id)
            write_atomic(self.run_folder.launch_path, launch_id.encode())

    @property
    def _is_set_up(self) -> bool:
        """Whether the machines of this launch were set up, and their agents started."""
        setup_record = read_setup_record(self.run_folder)
        return setup_record.is_ready and setup_record.launch == self.run_folder.launch_id

    def _wait_until_ready(self, name: str) -> None:
        """Wait until a machine has booted. One whose boot fails is exchanged."""
        fleet = self.fleet
        assert fleet
        if name not in self.live_machines and name not in self.provider.first_names:
            raise SetupFailed(NOT_RENTED)
        while True:
            try:
                wait_until_ready(self.provider, fleet, name, self._recent_machines)
                return self._update_hosts()
            except BootFailed as error:
                if not (machine := self.live_machines.get(name)):
                    raise
                reason = f"{error}{describe_console(self.provider, machine, self.run_folder.path)}"
                if self.get_stop_reason() or fleet.shortage_reason or self.fleet is not fleet:  # the job has moved
                    raise SetupFailed(reason) from error
            try:
                self.exchanged.add(name)
                self.provider.release_broken(machine, reason)
                self._rent_in_place_of(name)
            except NoExchangeLeft as error:
                if self._is_set_up:  # nobody waits for a replacement: without a stop, it would be replaced for ever
                    self._request_stop(f"machine {name}: {error}")
                raise SetupFailed(str(error)) from error
            except CloudError as error:
                raise SetupFailed(f"{reason}; no other machine could be rented: {error}") from error
            finally:
                self.exchanged.discard(name)

    def _recent_machines(self) -> dict[str, Instance]:
        """Return the live machines. Asks the cloud when its last list is older than `CLOUD_POLL_SECONDS`."""
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

    def _poll_cloud(self) -> None:
        """Ask the cloud in the background which machines live, and stop the job at its limits."""
        assert self.fleet
        now = time.monotonic()
        if self.poll_future and self.poll_future.done():
            finished_poll, self.poll_future = self.poll_future, None
            try:
                self._update_machines(finished_poll.result(), self.last_poll_time)
                self.access_error = ""
            except AdoptedElsewhere:
                raise
            except CloudError as error:
                is_denied = isinstance(error, NoAnswer) and error.code  # a role's sessions were revoked, for example
                if isinstance(error, NoCredentials) or is_denied:
                    self.access_error = self._describe(error)
                if now - self.last_warning_time > REPEATED_WARNING_SECONDS:
                    self.last_warning_time = now
                    logger.info(self._describe(error))
        if self.poll_future is None and now - self.last_poll_time > CLOUD_POLL_SECONDS:
            self.last_poll_time = now
            self.poll_future = self.fleet.pool.submit(self.provider.list_machines)
        if reason := self.end_watch.reached_limit():
            self._request_stop(reason)

    def _request_stop(self, reason: str) -> None:
        """Write a stop request, which all agents follow."""
        self.run_folder.request_stop(reason)
        logger.info(reason)

    def _update_machines(self, seen_machines: dict[str, Instance], asked_at: float) -> None:
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

    def _rented_since(self, asked_at: float) -> dict[str, Instance]:
        """Return the replacements rented since `asked_at`: a list of machines requested then may lack them."""
        machines = self.live_machines
        return {
            name: machines[name] for name, moment in self.rented_at.items() if moment >= asked_at and name in machines
        }

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
            self.end_watch.note_answer()
            self.provider.note_access()
            if fleet.unreachable_since:  # over a connection that is still open, others may answer
                self._restore_access()
            self._note_risks()
            if not fleet.agents_alive() and not self._is_renting:
                if not fleet.pull_last_files(LAST_FILES_SECONDS):
                    return True
                final_network.download(self.spec, fleet, self.provider, self.live_machines, self.set_activity)
                return not self.get_stop_reason() and self._move_if_interrupted()
        except Unreachable as error:
            # Machines that are gone, or hang past their power-off, never answer: a job that is over does not wait.
            is_over = bool(self.get_stop_reason()) and not self._is_renting
            if is_over and (self.provider.is_overdue or not (self.live_machines or self.provider.list_machines())):
                return False
            logger.warning("%s", error)
            self._restore_access()
        return True

    def _restore_access(self) -> None:
        """Open ssh to this computer again if it was closed, and log a warning when its address is another now."""
        now = time.monotonic()
        if now - self.last_warning_time < REPEATED_WARNING_SECONDS:
            return
        self.last_warning_time = now
        with contextlib.suppress(CloudError):
            if warning := self.provider.restore_access():
                logger.info(warning)

    def _note_risks(self) -> None:
        """Log once which machines the cloud may take away soon, and count them: so many late spares are rented."""
        at_risk = list[MachineStatus]()
        with contextlib.suppress(DamagedRecord):  # whoever shows the status says so
            statuses = machine_statuses(Run(self.spec, self.run_folder)).values()
            at_risk = [status for status in statuses if status.risk_reason and not status.ended]
        for status in at_risk:
            if status.id not in self.warned_ids:
                self.warned_ids.add(status.id)
                logger.warning("machine %s: %s; it goes on training", status.machine_name, status.risk_reason)
        self.risk_count = max(self.risk_count, len(at_risk))

    @property
    def _missing_machines(self) -> list[str]:
        """The machines that the job lacks. A late spare is one once a machine is at risk, and stays one."""
        due_count = self.spec.machines + self.risk_count if self.provider.rents_spares_late else None
        return [name for name in self.spec.machine_names[:due_count] if name not in self.live_machines]

    def _set_up_machines(self) -> bool:
        """Set up all machines, and replace those that are gone. Returns whether that works. Raises `SetupFailed`."""
        assert self.fleet
        for _ in range(SETUP_ATTEMPTS):
            try:
                self.fleet.set_up_machines()
                return True
            except SetupFailed as error:
                last_error = error
                self.live_machines = live_machines = self.provider.list_machines()
                gone_names = [name for name in self._missing_machines if name in self.provider.first_names]
                broken = {name: reason for name, reason in self.fleet.broken_machines.items() if name in live_machines}
                if self.get_stop_reason() or not (gone_names or broken):
                    raise
                if not live_machines:
                    return False
                self._release_all_broken(broken)
                for name in [*gone_names, *broken]:
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
        reasons = {
            name: broken_reason(read_final_status(self.run_folder, name, machine.private_ip))
            for name, machine in self.live_machines.items()
        }
        self._release_all_broken({name: reason for name, reason in reasons.items() if reason})
        self._move_to_new_machines()
        return True

    def _release_all_broken(self, reasons: Mapping[str, str]) -> None:
        """Terminate broken machines. `reasons` are by name. Raises `SetupFailed`, `CloudError`."""
        for name, reason in reasons.items():
            try:
                self.provider.release_broken(self.live_machines[name], reason)
            except NoExchangeLeft as error:
                raise SetupFailed(f"machine {name}: {error}") from error

    @property
    def _is_renting(self) -> bool:
        """Whether a replacement is being rented now. `rental_futures` also holds finished rentals not yet looked at."""
        return bool(self.exchanged) or any(not future.done() for future in self.rental_futures.values())

    def _must_move(self) -> bool:
        """Whether too few machines are left and no replacement can be rented in their zone."""
        has_too_few = len(self.live_machines) < self.spec.recovery.min_machines and not self._is_renting
        return has_too_few and not self.get_stop_reason() and (bool(self.last_refusal) or not self.live_machines)

    def _move_to_new_machines(self) -> None:
        """Terminate the remaining machines. The next `poll` rents all anew, perhaps elsewhere; training continues."""
        assert self.fleet
        logger.info(f"{len(self.live_machines)} machines are left; the job moves to new ones. {self.last_refusal}")
        self.traffic_log.leave(self.fleet, self.provider.gateway_bytes)
        self.fleet.close()
        self.fleet = None
        self.live_machines = {}
        self.last_refusal, self.replacement_error, self.risk_count = "", "", 0
        self.rental_futures = {}
        self.poll_future = None  # its answer may have the old machines
        while machines := self.provider.list_machines():
            self.provider.terminate([machine.id for machine in machines.values()], "all moved")
            self.provider.sleep_unless_stopping(1.0)

    def dead_machines(self) -> list[str]:
        """Return the machines that certainly have no running agent, and are not being replaced or restarted already."""
        if self.fleet is None:  # all are gone; the next `poll` rents new ones
            return []
        for name in [name for name, future in self.rental_futures.items() if future.done()]:
            error = self.rental_futures.pop(name).exception()
            self.last_refusal = str(error) if isinstance(error, MachinesRefused) else ""
            self.replacement_error = f"machine {name} could not be replaced: {error}" if error else ""
            if error:
                logger.info(self.replacement_error)
        dead_names = {*self.fleet.dead_machines(), *self._missing_machines, *self._broken_spares}
        return sorted(dead_names - self.rental_futures.keys() - self.fleet.restarting.keys(), key=int)

    @property
    def _broken_spares(self) -> dict[str, str]:
        """The machines to exchange, with the reasons: they were broken at the set-up; the job started without them."""
        assert self.fleet
        broken = [(name, why) for name, why in self.fleet.broken_machines.items() if name in self.live_machines]
        return dict(broken[: self.provider.exchanges_left] if broken else [])

    def replace(self, name: str) -> None:
        """Start a machine's agent again, or rent another one when the old one is gone, leaves, or is broken."""
        assert self.fleet
        old_machine = self.live_machines.get(name)
        status = read_final_status(self.run_folder, name, old_machine.private_ip) if old_machine else None
        problem = broken_reason(status) or self._broken_spares.get(name, "")
        has_left = status is not None and status.state == MachineState.LEFT
        if old_machine and not has_left and not problem:
            self.fleet.restart_agent(name)
        elif name not in self.rental_futures:
            arguments = (name, old_machine, problem, status.reason if status else "")
            self.rental_futures[name] = self.fleet.pool.submit(self._rent_replacement, *arguments)

    def _rent_replacement(self, name: str, old_machine: Instance | None, problem: str, reason: str) -> None:
        """Rent another machine in place of a lost one and start its agent. Runs in a thread of the fleet's pool.

        `old_machine` is still there: it is broken (`problem`), or leaves because of a notice or a request (`reason`).
        """
        assert self.fleet
        if old_machine and problem:
            try:
                self.provider.release_broken(old_machine, problem)
            except NoExchangeLeft as error:
                return self._request_stop(f"machine {name}: {error}")
        elif old_machine:
            logger.info(f"machine {name} leaves: {reason}")
            self.provider.terminate([old_machine.id], reason)
        self._rent_in_place_of(name)
        self.fleet.restart_agent(name)

    def _rent_in_place_of(self, name: str) -> None:
        """Rent another machine under the name of one that is gone. Raises `CloudError`."""
        logger.info(f"renting a replacement for machine {name}")
        machine = self.provider.rent_replacement(name)
        with self.machines_lock:
            self.rented_at[name] = time.monotonic()
            self.live_machines[name] = machine
        logger.info(f"machine {name} is now {machine.id}")
        self._update_hosts()
