"""EC2 Instance Connect, which moto's server does not have: a key that may log in to a machine for 60 seconds."""

from typing import Any

from support.iam import is_allowed

from infra.aws import tags

ACTION = "ec2-instance-connect:SendSSHPublicKey"
KEY_SECONDS = 60.0  # source: AWS, API reference, SendSSHPublicKey


def send_ssh_public_key(sim: Any, region: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer SendSSHPublicKey of EC2 Instance Connect. The machine gets the key at once."""
    from support.simcloud.cloud import ACCOUNT
    from support.simcloud.prices import ServiceError

    id, key = arguments["InstanceId"], arguments["SSHPublicKey"]
    try:
        instance = sim.view(sim.find(id))
    except KeyError as error:
        raise ServiceError("EC2InstanceNotFoundException", f"The instance {id} was not found.") from error
    context = {f"aws:ResourceTag/{tags.STACK}": instance.tags.get(tags.STACK, "")}
    arn = f"arn:aws:ec2:{region}:{ACCOUNT}:instance/{id}"
    if sim.policy is not None and not is_allowed(sim.policy, ACTION, arn, context):
        raise ServiceError("AccessDeniedException", f"You are not authorized to perform {ACTION} on {arn}.")
    if instance.state != "running":
        raise ServiceError("EC2InstanceStateInvalidException", f"The instance {id} is {instance.state}.")
    if key.split()[:1] not in (["ssh-ed25519"], ["ssh-rsa"]):
        raise ServiceError("InvalidArgsException", "The key must be of the type ED25519 or RSA.")
    for listener in list(sim.listeners):
        if hasattr(listener, "on_login_key"):
            listener.on_login_key(instance, arguments["InstanceOSUser"], key)
    return {"RequestId": "sim", "Success": True}
