"""How to log in to rented instances: jump host, user and host keys. Reads the journal only and makes no request."""

from collections.abc import Mapping

from cluster.backends.rented.provider import REMOTE_FOLDER, find_jump_host
from cluster.connectors.hosts_file import Host
from infra.aws.instances.instances import Instance
from infra.aws.journal import Journal
from infra.aws.journal_events import HostKeyReplaced, LaunchRequest
from infra.aws.stack import key_pairs
from infra.errors import CloudError

REMOTE_PYTHON = f"{REMOTE_FOLDER}/python"


def ssh_hosts(journal: Journal, instances: Mapping[str, Instance]) -> dict[str, Host]:
    """Return how to reach each instance, by machine name.

    Instances without a public address are reached through the one that has it (the jump host). Raises `CloudError`
    for an instance that has the job's tag but is missing in the journal: its host key is then unknown.
    """
    request_by_token = {request.token: request for request in journal.events(LaunchRequest)}
    host_keys = own_host_keys(journal)
    for instance in instances.values():
        if instance.launch_token not in request_by_token:
            raise CloudError(
                f"instance {instance.id} has the tag of this job, but {journal.path} has no record of its launch, so "
                "its host key is unknown; if nothing needs it: aws ec2 terminate-instances --region "
                f"{instance.region} --instance-ids {instance.id}"
            )
    jump_host = find_jump_host(instances)

    def host_key(instance: Instance) -> str:
        return host_keys.get(instance.id, request_by_token[instance.launch_token].host_key)

    hosts = {}
    for name, instance in instances.items():
        request = request_by_token[instance.launch_token]
        jump = None if instance.public_ip else jump_host
        hosts[name] = Host(
            host=instance.public_ip or instance.private_ip,
            address=instance.private_ip,
            port=request.ssh_port,
            user=request.ssh_user,
            key=str(key_pairs.KEY_PATH.expanduser()),
            python=REMOTE_PYTHON,
            folder=REMOTE_FOLDER,
            host_key=host_key(instance),
            jump=f"{request.ssh_user}@{jump.public_ip}:{request.ssh_port}" if jump else None,
            jump_host_key=host_key(jump) if jump else None,
        )
    return hosts


def own_host_keys(journal: Journal) -> dict[str, str]:
    """Return the host keys that instances generated themselves, by instance ID.

    An instance that is not in the result still uses the host key from its user data.
    """
    return {event.id: event.key for event in journal.events(HostKeyReplaced)}
