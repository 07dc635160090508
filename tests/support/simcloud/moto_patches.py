"""The places where the simulated cloud replaces parts of moto.

These parts are private to moto. Therefore its version is pinned, and tests/simcloud/test_rules.py fails on changes.
"""

import traceback
from typing import Any

import moto.ec2.models.elastic_ip_addresses as moto_addresses
import moto.ec2.utils as moto_utils
from moto.core.base_backend import BackendDict
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult
from moto.ec2.exceptions import DryRunClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.elastic_network_interfaces import Attachment, NetworkInterface
from moto.ec2.models.instances import Instance
from moto.ec2.responses import EC2Response
from moto.efs.models import EFSBackend
from moto.efs.responses import EFSResponse
from moto.iam.access_control import PermissionResult
from moto.s3.models import FakeBucket
from moto.ssm.models import SimpleSystemManagerBackend
from support.simcloud import efs, instances, internet, permissions, run_instances, spot_market  # noqa: F401
from support.simcloud.aws_protocol import error_response
from support.simcloud.cloud import EC2_CALLS, SimulatedAws, call_moto, moto_originals

HTTP_STATUS_BY_CODE = {  # EC2 answers 400 to all other errors; moto answers 400 to these too
    **{"AuthFailure": 401, "UnauthorizedOperation": 403, "DryRunOperation": 412},
    **dict.fromkeys(("InsufficientInstanceCapacity", "InsufficientHostCapacity"), 500),
    **dict.fromkeys(("InternalError", "InternalFailure"), 500),
    **dict.fromkeys(("NotImplemented", "SimulatorBroken"), 501),
    **dict.fromkeys(("RequestLimitExceeded", "ServiceUnavailable", "Unavailable"), 503),
}
# moto ignores the conditions of a bucket's policy, so it would deny what comes over TLS.
BUCKETS_WITHOUT_CONDITIONS = FakeBucket, "get_permission", lambda *_: PermissionResult.NEUTRAL


def replace_attribute(owner: Any, name: str, replacement: Any, key: str = "") -> None:
    """Replace an attribute of moto, and keep the original in `moto_originals` under `key`, or under its name."""
    moto_originals[key or name] = getattr(owner, name, None)
    setattr(owner, name, replacement)


def install() -> None:
    """Patch moto, once in a process. Each call looks up the cloud that answers it."""
    if moto_originals:
        return
    for name, function in EC2_CALLS.items():  # of the modules imported above
        replace_attribute(EC2Response, name, function)
    for name in ("create_file_system", "create_mount_target", "delete_file_system", "delete_mount_target"):
        replace_attribute(EFSBackend, name, getattr(efs, name))
    for owner in (EC2Response, EFSResponse):
        replace_attribute(owner, "call_action", call_action, owner.__name__)
    replace_attribute(EC2Response, "serialized", serialized)
    shapes = EC2Response.RESPONSE_KEY_PATH_TO_TRANSFORMER
    # A repeated client token shows the state as it is now.
    shapes.pop("RunInstances.Reservation.Instances.Instance.State")
    shapes["Instances.Instance.StateReason"] = lambda reason: reason if reason.code else None
    replace_attribute(*BUCKETS_WITHOUT_CONDITIONS)
    # regions
    replace_attribute(EC2Backend, "__init__", ec2_init, "ec2 init")
    replace_attribute(SimpleSystemManagerBackend, "__init__", ssm_init, "ssm init")
    replace_attribute(Ami, "block_device_mappings", property(spot_market.image_disks))
    replace_attribute(TaggedEC2Resource, "get_tags", get_tags)
    # The addresses that moto draws belong to strangers.
    replace_attribute(moto_addresses, "random_ip", lambda: SimulatedAws.current.next_address())
    moto_utils.EC2_RESOURCE_TO_PREFIX["placement-group"] = "pg"
    moto_utils.EC2_PREFIX_TO_RESOURCE["pg"] = "placement-group"
    # instances
    replace_attribute(Attachment, "__init__", attachment_init, "attachment init")
    replace_attribute(NetworkInterface, "group_set", property(lambda self: self._group_set))
    replace_attribute(NetworkInterface, "network_card_index", 0)
    replace_attribute(Instance, "prep_nics", run_instances.prep_nics)
    for name, attribute in (("private_ip", "private_ip_address"), ("public_ip", "public_ip")):
        for alias in (name, f"{name}_address"):
            replace_attribute(Instance, alias, _address(attribute))
    for name in ("private_dns_name", "public_dns_name"):
        original = getattr(Instance, name)
        name_of = lambda self, original=original: original.__get__(self) if self.nics else ""  # noqa: E731
        replace_attribute(Instance, name, property(name_of))


def _address(attribute: str) -> property:
    """Return a property for an address, None for a terminated instance: it has no interface."""
    return property(lambda self: getattr(self.nics.get(0), attribute, None))


def get_tags(self: Any) -> list[dict[str, str]]:
    """Look up the tags of a resource. moto searches the tags of all resources for each one."""
    return [{"key": key, "value": value} for key, value in dict(self.ec2_backend.tags.get(self.id) or {}).items()]


def call_action(self: Any) -> Any:
    """Handle one call at a time, at one moment of the clock. Only a launch is checked in a dry run."""
    sim = SimulatedAws.current
    action = self._get_action()
    with sim.lock:
        sim.tick()
        denial = permissions.find_denial(self, action)
        if denial:
            response = _error_response(self, denial)
        elif isinstance(self, EC2Response) and self._get_param("DryRun", False) and action != "RunInstances":
            response = _error_response(self, DryRunClientError())
        else:
            try:
                response = call_moto(type(self).__name__, self)
            except Exception as error:  # of moto or of this package, which must not look like an error of EC2
                sim.errors.append(traceback.format_exc())
                traceback.print_exc()
                response = _error_response(self, ServiceException("SimulatorBroken", f"{action}: {error!r}"))
    return response


def _error_response(self: Any, error: ServiceException) -> Any:
    status_line, headers, body = error_response(self.boto3_service_name, error.code, error.message, None)
    status = status_line.split()[0]
    return int(status), {**dict(headers), "status": status}, body.decode()


def serialized(self: Any, result: ActionResult) -> Any:
    status, headers, body = call_moto("serialized", self, result)
    if isinstance(result.result, ServiceException):
        status = HTTP_STATUS_BY_CODE.get(result.result.code, status)
    return status, headers, body


def attachment_init(self: Any, eni: Any) -> None:
    call_moto("attachment init", self, eni)
    self.network_card_index = eni.network_card_index


def ec2_init(self: Any, region_name: str, account_id: str) -> None:
    call_moto("ec2 init", self, region_name, account_id)
    spot_market.make_images(SimulatedAws.current, self)


def ssm_init(self: Any, region_name: str, account_id: str) -> None:
    call_moto("ssm init", self, region_name, account_id)
    spot_market.make_parameters(self)


def reset_backends() -> None:
    for service in list(BackendDict._instances):  # type: ignore[misc]
        for account in list(service.values()):
            account.reset()
