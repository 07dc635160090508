"""The specification of a job: what the user asked for, as plain data, written once as job.json."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, get_type_hints

from cluster.connectors.hosts_file import Host, Hosts
from cluster.errors import BadInput
from train.engine.options import TrainOptions
from train.forecast import Forecast
from train.metrics.hparams import HParamValue, flat_settings
from train.recipe.command import Command
from train.recipe.schedule import Schedule, scaled_image_count
from train.recipe.schema import Recipe
from train.tools.host import mount_of, usable_cpu_count
from train.tools.records import MALFORMED_DATA_ERRORS, DamagedRecord, damaged, decode, require_unix_time
from train.tools.text_files import parse_json

from .job_names import check_name
from .membership import MAX_CRASHES, MembershipRules
from .recovery_options import RecoveryOptions
from .states import WorkKind

# On a network file system a change by another machine is seen up to a second late (nfs(5), acregmin), and each read
# asks a server: heartbeats are slower there, and silence is tolerated for longer.
NETWORK_HEARTBEAT_SECONDS = 1.0
NETWORK_HEARTBEAT_TIMEOUT_SECONDS = 5.0
MAX_MACHINES = 10_000  # of a job, spares included: each has an entry in many tables
Workload = Recipe | Command
# The types of work that a job does, by their names in job.json.
WORKLOADS: dict[str, type[Recipe] | type[Command]] = {"recipe": Recipe, "run": Command}


@dataclass(frozen=True, kw_only=True)
class RentalFacts:
    """What others than the backend read of a rental. The backend's own rental specification extends it."""

    max_dollars: float | None = None  # for all machines of the job together; None: only time limits the job
    gpus_per_machine: int = 0  # fewer visible GPUs are a fault of the machine, not a smaller machine
    # Pip index with a torch build for GPUs that the default build no longer supports.
    torch_index_url: str | None = None
    environment: dict[str, str] = field(default_factory=dict)  # of all processes of the job on its machines
    torch_requirement: str | None = None  # the versions of torch whose builds there support the GPUs: "torch<2.15"


@dataclass(frozen=True, kw_only=True)
class RequestedLimits:
    """The part of job.json that `extend` changes."""

    max_hours: float | None = None
    cloud: RentalFacts | None = None


@dataclass(frozen=True, kw_only=True)
class UserProject:
    """The folder with the user's modules that a recipe names, or in which a command runs.

    `folder` is its path on the computer of the launch. `search` are the folders below it, as relative paths, in which
    modules are searched, in this order. A command runs in `workdir`, also a relative path.
    """

    folder: str
    search: tuple[str, ...] = ()
    workdir: str = "."

    def __post_init__(self) -> None:
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in (*self.search, self.workdir)):
            raise ValueError("search: must name folders of the project")

    def search_folders(self, copy: Path) -> tuple[str, ...]:
        """Return the folders of a copy of the project in which modules are searched."""
        return tuple(str(copy / name) for name in self.search)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One recipe, or one command of the user, on one set of machines. Paths are absolute.

    `name` is the job's ID, such as job-3, `given_name` what its user called it, "" for none. `procs` is the number of
    trainer processes of each machine. Names that end with `seconds` are in seconds. `notify` are the targets of
    notifications. They are secret, so they are in no JSON (`RunFolder.write_spec`). Neither are `secret_values`, of a
    command's secret variables: the launch keeps them elsewhere (cluster/script/secret_values.py).
    """

    name: str
    workload: Workload
    recipe_file: str
    train: TrainOptions
    recovery: RecoveryOptions
    user_project: UserProject | None = None  # None: the recipe names no modules of a project
    data_source: str = ""  # where each machine fetches its images from, into the folders of `train`; "": they are there
    copies_source: str = ""  # the same for the resized copies, when they do not lie beside the images
    generate_data: bool = False
    backend: str = "local"
    is_one_computer: bool = True  # all machines of the job are one computer and share its processors
    # The GPUs of that computer that the job uses, one for each trainer; (): it trains on the CPU. None: not known, or
    # each machine has its own.
    gpus_of_computer: tuple[str, ...] | None = None
    uid: str = ""
    given_name: str = ""
    hosts: Hosts | None = None
    cloud: dict[str, Any] | None = None  # the rented machines. Any: as their backend describes them
    backend_options: dict[str, object] | None = None  # options of the launch that exist for its backend only
    machines: int = 1
    joining: tuple[str, ...] = ()  # spares that `join` has added; when they are set up, they train if they have work
    procs: int = 1
    requested_procs: int | None = None  # None: as many as the backend finds best for its machines
    max_hours: float | None = None
    limit_name: str = ""  # how messages call the limit in hours, when it follows from another limit (dollars)
    poweroff_grace: float | None = None  # seconds after the limit until a rented machine cuts its own power
    heartbeat_seconds: float = 0.5
    heartbeat_timeout_seconds: float = 2.5
    metadata_address: str = ""
    queue: str = ""  # the queue in which the job waits for its turn; "": none
    parallel: int = 1  # the number of jobs of that queue that run at once
    notify: tuple[str, ...] = ()
    secret_values: dict[str, str] = field(default_factory=dict, repr=False)
    forecast: Forecast | None = None  # made at the launch
    command: str = ""  # the command that launched the job, as it was typed; "": it was launched from Python
    git_commit: str | None = None
    created: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        machine_count = self.machines + self.recovery.spares
        if not 1 <= self.machines <= machine_count <= MAX_MACHINES:
            raise ValueError(f"machines: a job has 1 to {MAX_MACHINES}, with its spares")
        for name in ("procs", "parallel"):
            if not 1 <= getattr(self, name) <= MAX_MACHINES:
                raise ValueError(f"{name}: must be from 1 to {MAX_MACHINES}")
        if self.given_name:  # it names files, and may come from a machine
            check_name(self.given_name)
        require_unix_time(self.created, "created")

    @property
    def recipe(self) -> Recipe:
        """The recipe. Raises `BadInput` for a job that runs a command of the user."""
        if isinstance(self.workload, Recipe):
            return self.workload
        raise BadInput(
            f"{self.name} runs a command of your own ({self.workload.name}), not a recipe: this program does not know "
            "its network, images and schedule"
        )

    @property
    def own_command(self) -> Command | None:
        """The command of the user that the job runs, None for a job that trains a recipe."""
        return self.workload if isinstance(self.workload, Command) else None

    @property
    def title(self) -> str:
        """The job's ID and the name that its user gave it."""
        return f"{self.name} {self.given_name}".rstrip()

    @property
    def settings(self) -> dict[str, HParamValue]:
        """The settings of a recipe, or the arguments of a command, as one flat row: jobs are compared by them."""
        world_size = self.machines * self.procs
        if self.own_command:
            return self.own_command.settings(world_size)
        return flat_settings(self.recipe_schedule, world_size)

    @property
    def work_kind(self) -> WorkKind:
        """Whether the job trains a recipe or runs a command of the user."""
        return WorkKind.COMMAND if self.own_command else WorkKind.RECIPE

    @property
    def machine_names(self) -> tuple[str, ...]:
        """The machines' names, spares included: "0", "1", ..."""
        return tuple(map(str, range(self.machines + self.recovery.spares)))

    def with_joined(self, machine: str) -> Self:
        """Return the specification once `machine` is set up: it trains if there is work for it, else it is a spare."""
        joining = tuple(name for name in self.joining if name != machine)
        has_work = self.own_command.elastic if self.own_command else self.machines * self.procs < self.schedule_gpus
        count = int(has_work and machine in self.joining)
        recovery = replace(self.recovery, spares=self.recovery.spares - count)
        return replace(self, joining=joining, machines=self.machines + count, recovery=recovery)

    @property
    def host_list(self) -> tuple[Host, ...]:
        """The machines of the hosts file, or those that are rented now; empty for machines that ssh does not reach."""
        return self.hosts.machines if self.hosts else ()

    @property
    def rental_facts(self) -> RentalFacts:
        """What others than the backend read of the job's rental. Raises `DamagedRecord`."""
        return decode(RentalFacts, self.cloud or {})

    @property
    def tmux_session(self) -> str:
        """The job's tmux session on its machines. On a shared host "job-3" may be the session of another user."""
        return self.uid if self.hosts else self.name

    @property
    def membership_rules(self) -> MembershipRules:
        """The rules by which the job's machines agree on the members of an attempt."""
        is_elastic = self.own_command is None or self.own_command.elastic  # goes on with fewer machines after a loss
        return MembershipRules(
            machine_names=self.machine_names,
            target_size=self.machines,
            min_size=self.recovery.min_machines if is_elastic else self.machines,
            heartbeat_timeout=self.heartbeat_timeout_seconds,
            goes_on_in_place=self.own_command is None and self.recovery.goes_on_in_place,
            loss_timeout=self.recovery.lost_seconds,
            startup_loss_timeout=max(self.recovery.lost_seconds, MembershipRules.startup_loss_timeout),
            stall_timeout=self.recovery.stall_seconds,
            startup_stall_timeout=max(self.recovery.stall_seconds, MembershipRules.startup_stall_timeout),
            is_rented=bool(self.cloud),
            has_progress=self.own_command is None,
            max_crashes=self.own_command.retries + 1 if self.own_command else MAX_CRASHES,
        )

    @property
    def has_own_folders(self) -> bool:
        """Whether machines have folders of their own, as over ssh; not on this computer and on Slurm's nodes."""
        return bool(self.hosts or self.cloud)

    @property
    def schedule_gpus(self) -> int:
        """The number of GPUs that the schedule is computed for."""
        return self.train.gpus or self.machines * self.procs

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of a recipe, the same on any number of machines; None for a command. Raises `ValueError`."""
        return None if self.own_command else self.recipe_schedule

    @property
    def recipe_schedule(self) -> Schedule:
        """The schedule of a recipe. Raises `ValueError`, and `BadInput` for a command, which has none."""
        images = scaled_image_count(self.recipe.data.train, self.train.scale)
        return Schedule(self.recipe, images, self.schedule_gpus, self.train.max_steps)

    @property
    def processes_per_host(self) -> int:
        """The number of trainers that share one computer's processors."""
        return self.trainer_count * self.parallel if self.is_one_computer else self.procs

    def gpus_of_machine(self, machine: str) -> tuple[str, ...] | None:
        """Return the machine's share of the computer's GPUs; None when it may use all that it has."""
        if self.gpus_of_computer is None:
            return None
        first = int(machine) * self.procs
        return self.gpus_of_computer[first : first + self.procs]

    @property
    def trainer_count(self) -> int:
        """The number of trainers of all machines, spares included."""
        return self.procs * len(self.machine_names)

    @property
    def threads_per_process(self) -> int | None:
        """CPU threads of a trainer; None when its machine is not shared, so that torch decides."""
        if self.processes_per_host == self.procs:
            return None
        return max(1, usable_cpu_count() // self.processes_per_host)

    @property
    def loader_workers(self) -> int | None:
        """Loader processes of a trainer; None lets the trainer count the processors of its machine."""
        if self.train.workers is not None or self.processes_per_host == self.procs:
            return self.train.workers
        return min(16, usable_cpu_count() // self.processes_per_host)

    def resolved_on_machine(self, shared: Path) -> Self:
        """Return the specification as one of the job's machines applies it.

        "~" in paths becomes that machine's home, and trainers on a shared computer get their share of its processors.
        When `shared` is on a network file system, heartbeats are slower.
        """
        is_network = mount_of(shared.resolve()).network
        train = replace(
            self.train,
            data=str(Path(self.train.data).expanduser()) if self.train.data else "",
            copies=str(Path(self.train.copies).expanduser()) if self.train.copies else "",
            gpus=self.schedule_gpus,
            workers=self.loader_workers,
            threads=self.threads_per_process,
        )
        return replace(
            self,
            train=train,
            heartbeat_seconds=NETWORK_HEARTBEAT_SECONDS if is_network else self.heartbeat_seconds,
            heartbeat_timeout_seconds=(
                NETWORK_HEARTBEAT_TIMEOUT_SECONDS if is_network else self.heartbeat_timeout_seconds
            ),
        )

    def to_json(self) -> dict[str, object]:
        """Return plain data from which `from_json` makes an equal JobSpec, but for its secrets."""
        key = next(key for key, workload_type in WORKLOADS.items() if isinstance(self.workload, workload_type))
        values = {**asdict(self), key: self.workload.to_json()}
        del values["notify"], values["secret_values"], values["workload"]
        return values

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Return the JobSpec that `to_json` described; keys of a later version are ignored. Raises `DamagedRecord`."""
        if not isinstance(value, Mapping):
            raise DamagedRecord("it describes no job")
        types = get_type_hints(cls)
        try:
            key = next((key for key in WORKLOADS if key in value), "recipe")
            workload = WORKLOADS[key].from_json(value[key])
            names = types.keys() & value.keys() - {"workload"}
            known = {name: decode(types[name], value[name], name) for name in names}
            return cls(**known, workload=workload)
        except KeyError as error:
            raise DamagedRecord(f"it has no {error}") from error
        except MALFORMED_DATA_ERRORS as error:
            raise damaged(error) from error

    @classmethod
    def parse(cls, text: bytes, source: object) -> Self:
        """Return the JobSpec of a job.json. `source` says in a message where it is from. Raises `DamagedRecord`."""
        try:
            return cls.from_json(parse_json(text))
        except ValueError as error:
            raise damaged(error, source) from error
