"""EFS by the clock: file systems and mount targets take `efs_seconds` to be created and deleted."""

from typing import Any

from moto.efs.exceptions import EFSError
from moto.efs.models import efs_backends
from support.simcloud.cloud import ACCOUNT, SimulatedAws, call_moto


def _begin_change(resource: Any, state: str) -> None:
    resource.life_cycle_state = state
    resource._since = SimulatedAws.current.now()  # moto's info_json leaves out names that begin with an underscore
    if SimulatedAws.current.efs_seconds == 0:
        tick(SimulatedAws.current.now())


def tick(now: float) -> None:
    for backend in list(efs_backends[ACCOUNT].values()):
        resources: list[Any] = [*backend.mount_targets_by_id.values(), *backend.file_systems_by_id.values()]
        for resource in resources:
            if now < getattr(resource, "_since", now) + SimulatedAws.current.efs_seconds:
                continue
            if resource.life_cycle_state == "creating":
                resource.life_cycle_state = "available"
            elif resource.life_cycle_state == "deleting" and hasattr(resource, "mount_target_id"):
                call_moto("delete_mount_target", backend, resource.mount_target_id)
            elif resource.life_cycle_state == "deleting":
                call_moto("delete_file_system", backend, resource.file_system_id)


def create_file_system(self: Any, *arguments: Any, **options: Any) -> Any:
    file_system = call_moto("create_file_system", self, *arguments, **options)
    _begin_change(file_system, "creating")
    return file_system


def delete_file_system(self: Any, file_system_id: str) -> None:
    """Begin to delete a file system. It is refused while there are mount targets, even ones that are being deleted."""
    file_system = self.file_systems_by_id.get(file_system_id)
    if file_system is None or file_system.number_of_mount_targets > 0:
        call_moto("delete_file_system", self, file_system_id)  # raises
        return
    _begin_change(file_system, "deleting")


def create_mount_target(self: Any, file_system_id: str, *arguments: Any, **options: Any) -> Any:
    """Begin to create a mount target of a file system, which must be available, in the VPC of its others."""
    file_system = self.file_systems_by_id.get(file_system_id)
    if file_system is not None and file_system.life_cycle_state != "available":
        error = EFSError("IncorrectFileSystemLifeCycleState", f"It is {file_system.life_cycle_state}, not available.")
        error.code = 409  # the HTTP status
        raise error
    vpcs = {target.vpc_id for target in file_system.iter_mount_targets()} if file_system else set()
    subnet_id = arguments[0] if arguments else options["subnet_id"]
    if vpcs and self.ec2_backend.get_subnet(subnet_id).vpc_id not in vpcs:
        raise EFSError("MountTargetConflict", "A file system can be mounted in one VPC at a time.")
    if self.ec2_backend.get_subnet(subnet_id).availability_zone == SimulatedAws.current.zone_without_efs:
        raise EFSError("UnsupportedAvailabilityZone", "EFS is not available in this zone.")
    mount_target = call_moto("create_mount_target", self, file_system_id, *arguments, **options)
    interface = self.ec2_backend.enis[mount_target.network_interface_id]
    interface.description = f"EFS mount target for {file_system_id} ({mount_target.mount_target_id})"
    interface.status = "in-use"
    _begin_change(mount_target, "creating")
    return mount_target


def delete_mount_target(self: Any, mount_target_id: str) -> None:
    mount_target = self.mount_targets_by_id.get(mount_target_id)
    if mount_target is None:
        call_moto("delete_mount_target", self, mount_target_id)  # raises
    _begin_change(mount_target, "deleting")
