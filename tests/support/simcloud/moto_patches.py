"""Where the layer takes hold of moto, which is pinned: its insides are private; test_layer.py tells of changes."""

import traceback
from typing import Any

import moto.ec2.models.elastic_ip_addresses as moto_addresses
import moto.ec2.utils as moto_utils
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult
from moto.ec2.exceptions import DryRunClientError
from moto.ec2.models import EC2Backend, ec2_backends
from moto.ec2.models.amis import Ami
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.elastic_network_interfaces import Attachment, NetworkInterface
from moto.ec2.models.instances import Instance
from moto.ec2.responses import EC2Response
from moto.efs.models import EFSBackend, efs_backends
from moto.efs.responses import EFSResponse
from moto.iam.models import iam_backends
from moto.s3.models import s3_backends
from moto.ssm.models import SimpleSystemManagerBackend, ssm_backends
from moto.sts.models import sts_backends
from support.simcloud import addresses, efs, instances, placement_groups, run_instances, spot_market
from support.simcloud.aws_protocol import error_body
from support.simcloud.cloud import Sim

STATUS = {  # EC2 answers 400 to all other errors; moto to these too
    "AuthFailure": 401,
    "UnauthorizedOperation": 403,
    "DryRunOperation": 412,
    "InsufficientInstanceCapacity": 500,
    "InsufficientHostCapacity": 500,
    "InternalError": 500,
    "InternalFailure": 500,
    "NotImplemented": 501,
    "SimulatorBroken": 501,
    "RequestLimitExceeded": 503,
    "ServiceUnavailable": 503,
    "Unavailable": 503,
}
FILTERS = {
    "client-token": "client_token",
    "dns-name": "public_dns_name",
    "instance-lifecycle": "lifecycle",
    "instance-state-code": "filter_state_code",
    "instance.group-name": "filter_group_names",
    "launch-index": "filter_index",
    "metadata-options.http-tokens": "metadata_options.http_tokens",
    "placement-group-name": "placement.group_name",
    "reason": "_reason",
    "reservation-id": "filter_reservation",
    "spot-instance-request-id": "spot_instance_request_id",
    "tenancy": "placement.tenancy",
}
originals: dict[str, Any] = {}


def put(owner: Any, name: str, ours: Any, key: str = "") -> None:
    """Ours in the place of moto's, which is kept in `originals` by the key, or by its name."""
    originals[key or name] = getattr(owner, name, None)
    setattr(owner, name, ours)


def install() -> None:
    """Patch moto, once in a process. Which cloud answers is looked up at each call."""
    if originals:
        return
    for module in (addresses, placement_groups, instances, run_instances, spot_market):
        for name, function in module.ACTIONS.items():
            put(EC2Response, name, function)
    for name, function in efs.METHODS.items():
        put(EFSBackend, name, function)
    for owner in (EC2Response, EFSResponse):
        put(owner, "call_action", call_action, owner.__name__)
    put(EC2Response, "serialized", serialized)
    shapes = EC2Response.RESPONSE_KEY_PATH_TO_TRANSFORMER
    shapes.pop("RunInstances.Reservation.Instances.Instance.State")  # the state as it is, for a token used again too
    shapes["Instances.Instance.StateReason"] = lambda reason: reason if reason.code else None
    _regions()
    _instances()


def _regions() -> None:
    put(EC2Backend, "__init__", ec2_init, "ec2 init")
    put(SimpleSystemManagerBackend, "__init__", ssm_init, "ssm init")
    put(EC2Backend, "create_volume", create_volume)
    put(EC2Backend, "delete_volume", delete_volume)
    put(Ami, "block_device_mappings", property(spot_market.image_disks))
    put(TaggedEC2Resource, "get_tags", get_tags)
    put(moto_addresses, "random_ip", lambda: Sim.current.address())  # moto's are real addresses of strangers
    for kind, prefix in (("placement-group", "pg"), ("spot-instances-request", "sir")):
        moto_utils.EC2_RESOURCE_TO_PREFIX[kind] = prefix
        moto_utils.EC2_PREFIX_TO_RESOURCE[prefix] = kind


def _instances() -> None:
    put(Attachment, "__init__", attachment, "attachment")
    put(NetworkInterface, "group_set", property(lambda self: self._group_set))
    put(NetworkInterface, "network_card_index", 0)
    put(Instance, "prep_nics", run_instances.prep_nics)
    put(Instance, "spot_instance_request_id", None)
    put(Instance, "filter_state_code", property(lambda self: str(self._state.code)))
    put(Instance, "filter_index", property(lambda self: str(self.ami_launch_index)))
    put(Instance, "filter_group_names", property(lambda self: [group.name for group in self.security_groups]))
    for name in ("private_ip", "private_ip_address", "public_ip", "public_ip_address"):
        put(Instance, name, property(_address(name)))
    for name in ("private_dns_name", "public_dns_name"):
        put(Instance, name, property(_dns_name(getattr(Instance, name))))
    moto_utils.filter_dict_attribute_mapping.update(FILTERS)


def get_tags(self: Any) -> list[dict[str, str]]:
    """The tags of a thing, looked up; moto searches those of all things for each."""
    return [{"key": key, "value": value} for key, value in dict(self.ec2_backend.tags.get(self.id) or {}).items()]


def _address(name: str) -> Any:
    """A terminated instance has no interface, so no address."""
    public = name.startswith("public")

    def read(self: Any) -> str | None:
        nic = self.nics.get(0)
        return None if nic is None else nic.public_ip if public else nic.private_ip_address

    return read


def _dns_name(original: property) -> Any:
    return lambda self: original.__get__(self) if self.nics else ""


def call_action(self: Any) -> Any:
    """One call at a time, at one moment of the clock; a dry run never gets further, except to check a launch."""
    sim, action = Sim.current, self._get_action()
    with sim.lock:
        sim.tick()
        if isinstance(self, EC2Response) and self._get_param("DryRun", False) and action != "RunInstances":
            answer = _refusal(self, DryRunClientError())
        else:
            try:
                answer = originals[type(self).__name__](self)
            except NotImplementedError as error:
                answer = _refusal(self, ServiceException("NotImplemented", str(error)))
            except Exception as error:  # a fault of moto or of this layer, which must not look like one of EC2
                sim.errors.append(traceback.format_exc())
                traceback.print_exc()
                answer = _refusal(self, ServiceException("SimulatorBroken", f"{action}: {error!r}"))
    sim.deliver()
    return answer


def _refusal(self: Any, error: ServiceException) -> Any:
    line, headers, body = error_body(self.boto3_service_name, error.code, error.message, None)
    status = line.split()[0]
    return int(status), {**dict(headers), "status": status}, body.decode()


def serialized(self: Any, result: ActionResult) -> Any:
    """moto's answer, with the HTTP status that EC2 gives to this error."""
    status, headers, body = originals["serialized"](self, result)
    if isinstance(result.result, ServiceException):
        status = STATUS.get(result.result.code, status)
    return status, headers, body


def attachment(self: Any, eni: Any) -> None:
    """An interface's attachment, which knows its network card."""
    originals["attachment"](self, eni)
    self.network_card_index = eni.network_card_index


# --- regions as they are made ----------------------------------------------------------------------------------------


def ec2_init(self: Any, region_name: str, account_id: str) -> None:
    """A new region has our images."""
    originals["ec2 init"](self, region_name, account_id)
    spot_market.make_images(Sim.current, self)
    self.metered = True


def ssm_init(self: Any, region_name: str, account_id: str) -> None:
    """A new region has the public parameters that name our images."""
    originals["ssm init"](self, region_name, account_id)
    spot_market.make_parameters(self)


def create_volume(self: Any, *words: Any, **options: Any) -> Any:
    """A disk, on the bill."""
    volume = originals["create_volume"](self, *words, **options)
    if getattr(self, "metered", False):
        Sim.current.meter.volume(volume)
    return volume


def delete_volume(self: Any, volume_id: str) -> Any:
    """A disk's end, on the bill."""
    volume = originals["delete_volume"](self, volume_id)
    Sim.current.meter.stop(volume_id)
    return volume


def reset_backends() -> None:
    """Empty regions, of the services that we use."""
    services: tuple[Any, ...] = (ec2_backends, efs_backends, iam_backends, s3_backends, ssm_backends, sts_backends)
    for service in services:
        for account in list(service.values()):
            account.reset()
