"""A cloud in memory in place of EC2, for the controller of rented jobs.

Its machines are entries of a dictionary, and nothing runs on them: a test replaces the fleet.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from cluster.backends.aws.backend import AwsBackend
from cluster.backends.aws.renting.instance_history import REMOTE_FOLDER
from cluster.backends.aws.renting.instances import JobInstances
from cluster.connectors.hosts_file import Host
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from infra.aws.instances.instances import Instance
from infra.costs import JobCost, TrafficForecast
from infra.errors import MachinesRefused, NoMachines
from train.tools import host


def make_machine(machine_id: str, name: str, private_ip: str = "10.0.0.1") -> Instance:
    numbers: dict[str, Any] = {"launch_time": 0.0, "end_time": None, "launch_index": 0, "boots_slowly": False}
    texts: dict[str, Any] = {each.name: "" for each in fields(Instance) if each.name not in (*numbers, "tags")}
    known = {"id": machine_id, "name": name, "private_ip": private_ip, "public_ip": "127.0.0.1"}
    return Instance(**{**texts, **numbers, **known})


class ToyCloud(JobInstances):
    """The machines of one job. Nothing of AWS is asked.

    All attributes of the class, such as `rented` and `released`, are the state of the cloud, which all objects share.
    """

    rented: ClassVar[dict[str, Instance]] = {}  # by ID
    released: ClassVar[list[tuple[str, str]]] = []  # ID and reason
    exchanged: ClassVar[set[str]] = set()  # IDs of broken machines
    free_machines: ClassVar[int] = 0
    first_time: ClassVar[float | None] = None
    has_moved = is_terminating = rents_spares_late = False
    max_dollars = dollars_per_hour = closing_time = None
    last_region = "toy"
    expected_traffic = TrafficForecast()

    def __init__(self, spec: JobSpec, run_folder: RunFolder, get_stop_reason: Callable[[], str] = lambda: "") -> None:
        self.gateway_bytes = {}
        self.spec = spec
        self.run_folder = run_folder
        self.get_stop_reason = get_stop_reason
        self.max_exchanges = spec.recovery.max_exchanges
        self._exchange_lock = threading.Lock()
        self._changed_hours = self._changed_dollars = None

    @classmethod
    def reset(cls, free_machines: int) -> None:
        cls.rented.clear()
        cls.released.clear()
        cls.exchanged.clear()
        cls.free_machines, cls.first_time = free_machines, None

    def _rent(self, name: str) -> Instance:
        """Write the intent to the journal, then rent a machine."""
        with self.run_folder.journal_path.open("a") as journal:
            journal.write(f"rent {name}\n")
        cls = type(self)
        cls.free_machines -= 1
        cls.first_time = cls.first_time or host.unix_time()
        number = len(cls.rented) + len(cls.released) + 1
        machine = make_machine(f"toy-{number}", name, f"10.0.0.{number}")
        cls.rented[machine.id] = machine
        return machine

    record_launch: Any = lambda *_: None
    record_move = check_access = require_ownership = finish_open_requests = record_launch
    set_expiry = record_host_key = note_access = record_launch
    read_console: Any = lambda *_: ""
    restore_access = external_termination_reason = read_console

    @property
    def first_machine_time(self) -> float | None:
        return self.first_time

    @property
    def first_names(self) -> tuple[str, ...]:
        return self.spec.machine_names

    def list_machines(self) -> dict[str, Instance]:
        return {machine.name: machine for machine in self.rented.values()}

    def rent_all(self) -> dict[str, Instance]:
        if self.free_machines < len(self.spec.machine_names):
            raise NoMachines(f"the toy cloud has {self.free_machines} machines")
        return {name: self._rent(name) for name in self.spec.machine_names}

    def rent_replacement(self, name: str) -> Instance:
        if not self.free_machines:
            raise MachinesRefused("the toy cloud has no machine left")
        return self._rent(name)

    def terminate(self, ids: list[str], reason: str, is_exchange: bool = False) -> None:
        if is_exchange:
            self.exchanged.update(ids)
        for machine_id in ids:
            if self.rented.pop(machine_id, None):
                self.released.append((machine_id, reason))

    @property
    def exchanged_ids(self) -> set[str]:
        return self.exchanged

    def terminate_job(self) -> list[str]:
        self.terminate(list(self.rented), "the job ended")
        return []

    def ensure_reachable(self, instances_by_name: dict[str, Instance]) -> dict[str, Instance]:
        return instances_by_name

    def hosts(self, machines: Mapping[str, Instance]) -> dict[str, Host]:
        return {
            name: Host(host=machine.public_ip, address=machine.private_ip, folder=REMOTE_FOLDER)
            for name, machine in machines.items()
        }

    def has_own_host_key(self, machine: Instance) -> bool:
        return True

    @classmethod
    def job_cost(cls, run_path: Path, moment: float) -> JobCost:
        return JobCost()

    def cost_until(self, moment: float) -> JobCost:
        return JobCost()


class ToyBackend(AwsBackend):
    name = "toy"
    description = "machines rented from a toy cloud"
    provider_class = ToyCloud
