"""A cloud in memory, the smallest that the controller of rented jobs can use. docs/adding-a-backend.md refers to it.

Its machines are entries of a dictionary, and nothing runs on them: a test replaces the fleet.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from cluster.backends.rented.backend import RentedBackend
from cluster.backends.rented.provider import REMOTE_FOLDER, CloudProvider
from cluster.connectors.hosts_file import Host
from infra.costs import JobCost
from infra.errors import MachinesRefused, NoMachines
from infra.rented_machine import RentedMachine
from train.tools import host


class ToyCloud(CloudProvider[RentedMachine]):
    """The machines of one job.

    All attributes of the class, such as `rented` and `released`, are the state of the cloud, which all objects share.
    """

    cloud_name = "the toy cloud"
    rented: ClassVar[dict[str, RentedMachine]] = {}  # by ID
    released: ClassVar[list[tuple[str, str]]] = []  # ID and reason
    exchanged: ClassVar[set[str]] = set()  # IDs of broken machines
    free_machines: ClassVar[int] = 0
    first_time: ClassVar[float | None] = None

    @classmethod
    def reset(cls, free_machines: int) -> None:
        """Start again, with this number of machines to rent in all."""
        cls.rented.clear()
        cls.released.clear()
        cls.exchanged.clear()
        cls.free_machines, cls.first_time = free_machines, None

    def _rent(self, name: str) -> RentedMachine:
        """Write the intent to the journal, then rent a machine."""
        with self.run_folder.journal_path.open("a") as journal:
            journal.write(f"rent {name}\n")
        cls = type(self)
        cls.free_machines -= 1
        cls.first_time = cls.first_time or host.unix_time()
        number = len(cls.rented) + len(cls.released) + 1
        machine = RentedMachine(id=f"toy-{number}", name=name, private_ip=f"10.0.0.{number}", public_ip="127.0.0.1")
        cls.rented[machine.id] = machine
        return machine

    def record_launch(self, launch_id: str) -> None: ...

    def record_move(self, launch_id: str) -> None: ...

    @property
    def first_machine_time(self) -> float | None:
        return self.first_time

    has_moved = is_terminating = False

    def external_termination_reason(self) -> str:
        return ""

    def finish_open_requests(self) -> None: ...

    def list_machines(self) -> dict[str, RentedMachine]:
        return {machine.name: machine for machine in self.rented.values()}

    def rent_all(self) -> dict[str, RentedMachine]:
        if self.free_machines < len(self.spec.machine_names):
            raise NoMachines(f"the toy cloud has {self.free_machines} machines")
        return {name: self._rent(name) for name in self.spec.machine_names}

    def rent_replacement(self, name: str) -> RentedMachine:
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

    def set_expiry(self, expiry_time: float) -> None: ...

    def hosts(self, machines: Mapping[str, RentedMachine]) -> dict[str, Host]:
        return {
            name: Host(host=machine.public_ip, address=machine.private_ip, folder=REMOTE_FOLDER)
            for name, machine in machines.items()
        }

    def has_own_host_key(self, machine: RentedMachine) -> bool:
        return True

    def record_host_key(self, machine: RentedMachine, key: str) -> None: ...

    @classmethod
    def job_cost(cls, run_path: Path, moment: float) -> JobCost:
        return JobCost()

    max_dollars = dollars_per_hour = None


class ToyBackend(RentedBackend[RentedMachine]):
    name = "toy"
    description = "machines rented from a toy cloud"
    provider_class = ToyCloud
