"""EFS by the clock: file systems and mount targets take `efs_seconds` to come and to go."""

from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.efs.models import efs_backends
from support.simcloud.billing import Meter
from support.simcloud.cloud import ACCOUNT, Sim


class Refused(JsonRESTError):
    """An error of EFS that moto does not know."""

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__(code, message)
        self.code = status


def _then(name: str) -> Any:
    from support.simcloud import moto_patches

    return moto_patches.originals[name]


def _begin(thing: Any, state: str) -> None:
    """A change that takes its time; `info_json` leaves out names that begin with a line."""
    thing.life_cycle_state, thing._since = state, Sim.current.now()
    if Sim.current.efs_seconds == 0:
        tick(Sim.current.now())


def tick(now: float) -> None:
    """Finish what has come or gone."""
    wait = Sim.current.efs_seconds
    for backend in list(efs_backends[ACCOUNT].values()):
        things: list[Any] = [*backend.mount_targets_by_id.values(), *backend.file_systems_by_id.values()]
        for thing in [one for one in things if now >= getattr(one, "_since", now) + wait]:
            if thing.life_cycle_state == "creating":
                thing.life_cycle_state = "available"
            elif thing.life_cycle_state == "deleting" and hasattr(thing, "mount_target_id"):
                _then("delete_mount_target")(backend, thing.mount_target_id)
            elif thing.life_cycle_state == "deleting":
                _then("delete_file_system")(backend, thing.file_system_id)


def create_file_system(self: Any, *words: Any, **options: Any) -> Any:
    """Created, not available yet. A token that is taken names the file system that has it."""
    token = options.get("creation_token")
    for other in self.file_systems_by_id.values():
        if other.creation_token == token:
            message = f"File system '{other.file_system_id}' already exists with creation token '{token}'"
            raise Refused("FileSystemAlreadyExists", message, 409)
    system = _then("create_file_system")(self, *words, **options)
    paid = float(system.provisioned_throughput_in_mibps or 0)
    hourly = paid * Meter.EFS_MIBPS + Sim.current.efs_gb * Meter.EFS_GB
    Sim.current.meter.start(system.file_system_id, "efs", hourly)
    _begin(system, "creating")
    return system


def delete_file_system(self: Any, file_system_id: str) -> None:
    """Not while it has mount targets, those that are going included."""
    system = self.file_systems_by_id.get(file_system_id)
    if system is None or system.number_of_mount_targets > 0:
        _then("delete_file_system")(self, file_system_id)  # raises
        return
    Sim.current.meter.stop(file_system_id)
    _begin(system, "deleting")


def create_mount_target(self: Any, file_system_id: str, *words: Any, **options: Any) -> Any:
    """Of a file system that is available."""
    system = self.file_systems_by_id.get(file_system_id)
    if system is not None and system.life_cycle_state != "available":
        message = f"Filesystem is in the state {system.life_cycle_state}, not available."
        raise Refused("IncorrectFileSystemLifeCycleState", message, 409)
    groups = options.get("security_groups") or []
    for missing in [one for one in groups if self.ec2_backend.get_security_group_from_id(one) is None]:
        raise Refused("SecurityGroupNotFound", f"The SecurityGroup ID '{missing}' does not exist", 400)
    target = _then("create_mount_target")(self, file_system_id, *words, **options)
    nic = self.ec2_backend.enis[target.network_interface_id]
    nic.description, nic.status = f"EFS mount target for {file_system_id} ({target.mount_target_id})", "in-use"
    _begin(target, "creating")
    return target


def delete_mount_target(self: Any, mount_target_id: str) -> None:
    """It goes, and its interface with it."""
    target = self.mount_targets_by_id.get(mount_target_id)
    if target is None:
        _then("delete_mount_target")(self, mount_target_id)  # raises
    _begin(target, "deleting")


METHODS = {
    "create_file_system": create_file_system,
    "create_mount_target": create_mount_target,
    "delete_file_system": delete_file_system,
    "delete_mount_target": delete_mount_target,
}
