"""A job on rented machines, as its supervisor sees it: gets them, sets them up, looks after them and their price.

Everything that happens once there are addresses is the fleet's, as for one's own machines. What is added: machines that
boot, that EC2 takes away, that are replaced by others, and that all move elsewhere when too few are left.
"""

import contextlib
import threading
import time
from concurrent.futures import Future
from dataclasses import replace as with_other
from uuid import uuid4

from cluster.connectors.ssh import Unreachable
from cluster.errors import ClusterError, SetupFailed
from cluster.machines.fleet import RESULT_FILE, Fleet
from cluster.state import attempts
from cluster.state.run_folder import RunFolder, stop_reason
from cluster.state.spec import JobSpec
from infra.aws import tags
from infra.aws.client import get_public_address
from infra.aws.errors import CloudError, Interrupted, NoCredentials
from infra.aws.instances.gang import LaunchRefused, NoMachines
from infra.aws.instances.instances import Instance
from infra.aws.market import billing
from train.tools.filesystem import read_json, to_json_bytes, write_atomic

from . import final_checkpoint, ssh_access
from .boot import BootWaiter
from .instances import EndedExternally, JobInstances

EC2_POLL_SECONDS = 10.0  # between two questions to EC2; one call, however many machines
SETUP_ATTEMPTS = 3
REPEATED_WARNING_SECONDS = 60.0  # between two complaints that EC2 cannot be asked


class AwsController:
    """The rented machines of one job, in its supervisor."""

    def __init__(self, spec: JobSpec, run_folder: RunFolder) -> None:
        self.spec, self.run_folder = spec, run_folder
        self.job_instances = JobInstances(spec, run_folder, self.log, self.get_stop_reason)
        self.fleet: Fleet | None = None
        self.live_instances: dict[str, Instance] = {}  # as EC2 said last
        self.last_poll_time = self.last_warning_time = 0.0
        self.poll_future: Future[dict[str, Instance]] | None = None
        self.rental_futures: dict[str, Future[None]] = {}
        self.last_refusal = ""  # why a lost machine could not be replaced, the last time it was tried
        self.hosts_lock = threading.Lock()
        self.boot_waiter = BootWaiter(self.job_instances, self.get_stop_reason)
        self.cost_meter = billing.CostMeter(self.job_instances.journal)

    def log(self, text: str) -> None:
        """Keep a line of what AWS did in <run>/cloud.log, and show it in the supervisor's window."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        print(line, flush=True)
        with contextlib.suppress(OSError), (self.run_folder.path / "cloud.log").open("a") as file:
            file.write(line + "\n")
        self.set_activity(text)

    def set_activity(self, activity: str) -> None:
        """Say what is being done, for `status`."""
        with contextlib.suppress(OSError):
            write_atomic(
                self.run_folder.path / "cloud.json",
                to_json_bytes({"doing": activity, "time": time.time()}),
                durable=False,
            )

    def get_stop_reason(self) -> str:
        """Why nothing more is to be rented or waited for: the job is to stop, or is decided; "" while it goes on."""
        decided = attempts.is_finished(self.run_folder.shared, self.run_folder.launch_id)
        return stop_reason(self.run_folder.shared) or ("the job is over" if decided else "")

    # --- getting machines --------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Do what is to be done now. Returns whether the job is, or may be, at work.

        Raises `SetupFailed` when it cannot start, `ClusterError` when AWS or the disk are in the way for now.
        """
        try:
            if self.fleet is None:
                # Decided, and somebody was killed before it was written down: nothing is rented for it.
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
        if (
            why := self.get_stop_reason()
        ) and not self.job_instances.list_instances():  # those that are there are to save first
            raise Interrupted(why)
        limit = self.job_instances.rental_spec.max_dollars
        if (
            limit is not None
            and self.job_instances.first_machine_time is None
            and self.job_instances.earlier_cost >= limit
        ):
            raise NoMachines(f"the limit of {limit:g} dollars (--max-price-total) is spent; launch it anew with more")
        self.set_activity("renting machines")
        self.live_instances = self.job_instances.find_or_rent(self._new_launch_id)
        self._apply_cost_limit()
        hosts = ssh_access.ssh_hosts(self.job_instances.journal, self.live_instances)
        hosts |= {
            name: next(iter(hosts.values())) for name in self.spec.machine_names if name not in hosts
        }  # to be replaced
        known = self.job_instances.write_hosts(hosts)
        spec = with_other(self.spec, hosts=known.to_json())
        self.fleet = Fleet(
            spec,
            self.run_folder,
            wait_until_ready=self._wait_until_ready,
            limit_start=self.job_instances.first_machine_time,
        )
        self.set_activity("")

    def _new_launch_id(self) -> None:
        """Machines that were set up are gone: others take over under another mark, by which all know who is who."""
        board = read_json(self.run_folder.path / "machines.json") or {}
        if board.get("ready") and board.get("launch") == self.run_folder.launch_id:
            mark = uuid4().hex
            self.job_instances.record_move(mark)
            write_atomic(self.run_folder.launch_path, mark.encode())

    def _apply_cost_limit(self) -> None:
        """Turn the limit of dollars into one of hours, now that the price is known; the agents keep that."""
        place = self.job_instances.current_place
        assert place
        wish = self.job_instances.rental_spec
        hours, late = self.job_instances.compute_limits(place)
        if (hours, late) != (self.spec.max_hours, self.spec.poweroff_grace):
            asked = self.job_instances.max_hours
            shorter = wish.max_dollars is not None and (asked is None or hours < asked)
            what = f"the limit of {wish.max_dollars:g} dollars (--max-price-total)" if shorter else ""
            self.spec = with_other(self.spec, max_hours=hours, poweroff_grace=late, limit_name=what)
            write_atomic(self.run_folder.shared / "job.json", to_json_bytes(self.spec.to_json()))

    def _wait_until_ready(self, name: str) -> None:
        assert self.fleet
        self.boot_waiter.wait_until_ready(self.fleet, name, self._recent_instances)
        self._update_hosts()

    def _recent_instances(self) -> dict[str, Instance]:
        """Return what is there, as EC2 said a moment ago; while all is being set up nobody else asks."""
        with self.hosts_lock:
            late = time.monotonic() - self.last_poll_time > EC2_POLL_SECONDS
            self.last_poll_time = time.monotonic() if late else self.last_poll_time
        if late:
            with contextlib.suppress(CloudError):
                self._update_instances(self.job_instances.list_instances())
        return self.live_instances

    def _update_hosts(self) -> None:
        """Let the fleet and the job's ssh_config know where the machines are now."""
        with self.hosts_lock:
            assert self.fleet
            hosts = self.fleet.hosts | ssh_access.ssh_hosts(self.job_instances.journal, self.live_instances)
            for name, host in hosts.items():
                if host != self.fleet.hosts[name]:
                    self.fleet.replace_host(name, host)
            self.job_instances.write_hosts(hosts)

    # --- looking after them ------------------------------------------------------------------------------------------

    def _poll_ec2(self, now: float) -> None:
        """Ask EC2 now and then, in the background, which machines there are, and keep to the limit of dollars."""
        assert self.fleet
        if self.poll_future and self.poll_future.done():
            looking, self.poll_future = self.poll_future, None
            try:
                self._update_instances(looking.result())
            except CloudError as error:
                if now - self.last_warning_time > REPEATED_WARNING_SECONDS:
                    self.last_warning_time = now
                    self.log(self._describe_error(error))
        if self.poll_future is None and now - self.last_poll_time > EC2_POLL_SECONDS:
            self.last_poll_time = now
            self.poll_future = self.fleet.pool.submit(self.job_instances.list_instances)
            if (
                not self.get_stop_reason() and self.job_instances.is_overdue
            ):  # a machine hangs, and its own power-off with it
                self._request_stop("its time is over, and not all of its machines have ended")
        limit = self.job_instances.rental_spec.max_dollars
        if limit is not None and not self.get_stop_reason() and self.cost_meter.total_dollars(time.time()) >= limit:
            self._request_stop(f"the limit of {limit:g} dollars (--max-price-total) was reached")

    def _request_stop(self, reason: str) -> None:
        write_atomic(self.run_folder.shared / "stop", to_json_bytes({"time": time.time(), "reason": reason}))
        self.log(reason)

    def _update_instances(self, seen_instances: dict[str, Instance]) -> None:
        """Take in what EC2 says is there. Raises `CloudError`."""
        for name in self.live_instances.keys() - seen_instances.keys():
            self.log(f"machine {name} ({self.live_instances[name].id}) is gone")
        fresh = {
            name: self.live_instances[name] for name in self.rental_futures if name in self.live_instances
        }  # known better
        before, self.live_instances = (
            self.live_instances,
            self.job_instances.ensure_jump_host({**seen_instances, **fresh}),
        )
        if any(before.get(name) != one for name, one in self.live_instances.items()):
            self._update_hosts()

    def _describe_error(self, error: CloudError) -> str:
        """What AWS said; where it does not know us any more, also when the machines end without us."""
        if not isinstance(error, NoCredentials):
            return str(error)
        expires = [one.tags.get(tags.EXPIRES, "") for one in self.live_instances.values()]
        return f"{error}; the machines end by their own limit {f'at {max(expires)}' if expires else 'of --max-hours'}"

    def _tick(self) -> bool:
        assert self.fleet
        fleet = self.fleet
        if not self._set_up_machines() or self._must_move():
            self._move_to_new_instances()
            return True
        try:
            fleet.push_stop_request()
            fleet.pull_files()
            if not fleet.agents_alive() and not self._is_renting:
                fleet.pull_files()
                if (self.run_folder.shared / RESULT_FILE).exists():
                    final_checkpoint.download_final_checkpoint(
                        fleet, self.job_instances, self.live_instances, self.set_activity
                    )
                return not self.get_stop_reason() and self._move_if_interrupted()
        except Unreachable as error:
            print(f"{self.spec.name}: {error}", flush=True)
            self._warn_ip_changed(time.monotonic())
        return True

    def _warn_ip_changed(self, now: float) -> None:
        """Say so when ssh is open to an address that this computer has no more."""
        if now - self.last_warning_time < REPEATED_WARNING_SECONDS:
            return
        self.last_warning_time, open_to = now, self.job_instances.allowed_address
        with contextlib.suppress(CloudError):
            if (mine := get_public_address()) != open_to:
                self.log(
                    f"this computer's address is {mine} now, and ssh is open to {open_to}: imgnet-cluster up --stack"
                )

    def _set_up_machines(self) -> bool:
        """Set all machines up; those that EC2 took away meanwhile are replaced. False when it has no others there.

        Raises `SetupFailed` for machines that are there and cannot be used.
        """
        assert self.fleet
        for _ in range(SETUP_ATTEMPTS):
            try:
                self.fleet.set_up_machines()
                return True
            except SetupFailed as error:
                failed = error
                found = self.job_instances.list_instances()
                gone = [name for name in self.spec.machine_names if name not in found]
                if self.get_stop_reason() or not gone:
                    raise
                self.live_instances = found
                if not found:
                    return False
                for name in gone:
                    try:
                        self.live_instances[name] = self.job_instances.rent_replacement(name)
                    except LaunchRefused as refused:
                        self.last_refusal = str(refused)
                        return False
                self._update_hosts()
        raise failed

    def _move_if_interrupted(self) -> bool:
        """No agent is at work: whether that is because EC2 takes the machines away, and others are to go on."""
        words = [read_json(self.run_folder.status_path(name)) or {} for name in self.spec.machine_names]
        mine = [one for one in words if one.get("launch") == self.run_folder.launch_id]
        self.live_instances = self.job_instances.list_instances()
        if any(one.get("ended") and one.get("state") == "stopped" for one in mine):  # at its limit
            return False
        if not any(one.get("state") == "left" for one in mine) and len(self.live_instances) >= self.spec.min_machines:
            return False
        self._move_to_new_instances()
        return True

    @property
    def _is_renting(self) -> bool:
        """Whether a machine is being rented just now. `renting` has those too of which nobody has heard yet."""
        return any(not one.done() for one in self.rental_futures.values())

    def _must_move(self) -> bool:
        """Whether too few machines are left, and no other could be rented beside them."""
        few = len(self.live_instances) < self.spec.min_machines and not self._is_renting
        return few and not self.get_stop_reason() and (bool(self.last_refusal) or not self.live_instances)

    def _move_to_new_instances(self) -> None:
        """End the machines that are left and rent all of them anew, perhaps elsewhere; training goes on from there."""
        assert self.fleet
        self.log(f"{len(self.live_instances)} machines are left; all move. {self.last_refusal}")
        self.fleet.close()
        self.live_instances, self.fleet, self.last_refusal, self.rental_futures = {}, None, "", {}
        self.job_instances.terminate_all()

    def dead_machines(self) -> list[str]:
        """Return the machines that certainly have no agent at work: EC2 says they are gone, or they say so."""
        if self.fleet is None:  # all are gone, and others are rented at the next step
            return []
        for name in [one for one, future in self.rental_futures.items() if future.done()]:
            error = self.rental_futures.pop(name).exception()
            self.last_refusal = str(error) if isinstance(error, LaunchRefused) else ""
            if error:
                self.log(f"machine {name} could not be replaced: {error}")
        gone = [name for name in self.spec.machine_names if name not in self.live_instances]
        found = {*self.fleet.dead_machines(), *gone} - self.rental_futures.keys() - self.fleet.restarting.keys()
        return sorted(found, key=int)

    def replace(self, name: str) -> None:
        """Start the agent of a machine again, or rent another machine when it is gone, or going."""
        assert self.fleet
        said = read_json(self.run_folder.status_path(name)) or {}
        leaving = said.get("ended") and said.get("state") == "left" and said.get("launch") == self.run_folder.launch_id
        before = self.live_instances.get(name)
        if before and not leaving:
            self.fleet.restart_agent(name)
        elif name not in self.rental_futures:
            self.rental_futures[name] = self.fleet.pool.submit(self._rent_replacement, name, before)

    def _rent_replacement(self, name: str, old_instance: Instance | None) -> None:
        assert self.fleet
        if old_instance:  # it is being taken away, or asked to be: the next one has its name
            said = read_json(self.run_folder.status_path(name)) or {}
            self.log(f"machine {name} leaves: {said.get('reason')}")
            self.job_instances.terminate([old_instance.id], str(said.get("reason")))
        self.log(f"renting another machine {name}")
        self.live_instances[name] = self.job_instances.rent_replacement(name)
        self.log(f"machine {name} is {self.live_instances[name].id} now")
        self._update_hosts()
        self.fleet.restart_agent(name)
