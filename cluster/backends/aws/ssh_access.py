"""How to log in to rented machines: through which, as whom, with whose host key. From the journal alone."""

from collections.abc import Mapping

from cluster.connectors.hosts_file import Host
from infra.aws.errors import CloudError
from infra.aws.instances.instances import Instance
from infra.aws.journal import Journal
from infra.aws.stack import key_pairs

REMOTE_FOLDER = "~/.imgnet"  # on a machine, as its user data makes it
REMOTE_PYTHON = f"{REMOTE_FOLDER}/python"


def ssh_hosts(journal: Journal, instances: Mapping[str, Instance]) -> dict[str, Host]:
    """Return how to reach machines, by name: by a public address, or by way of the one that has it.

    Raises `CloudError` for one that bears the job's tag and that the journal does not know.
    """
    asked = {line["request"]["ClientToken"]: line["login"] for line in journal.lines("ask")}
    own = own_host_keys(journal)
    if stranger := next((one for one in instances.values() if one.launch_token not in asked), None):
        raise CloudError(f"{stranger.id} bears the job's tag, but {journal.path} does not know it")
    gate = find_jump_host(instances)

    def pin(one: Instance) -> str:
        return str(own.get(one.id, asked[one.launch_token]["host_key"]))

    found = {}
    for name, one in instances.items():
        login, through = asked[one.launch_token], gate if not one.public_ip else None
        found[name] = Host(
            host=one.public_ip or one.private_ip, address=one.private_ip, port=login["port"], user=login["user"],
            key=str(key_pairs.KEY_PATH.expanduser()), python=REMOTE_PYTHON, folder=REMOTE_FOLDER, host_key=pin(one),
            jump=f"{login['user']}@{through.public_ip}:{login['port']}" if through else None,
            jump_host_key=pin(through) if through else None,
        )  # fmt: skip
    return found


def own_host_keys(journal: Journal) -> dict[str, str]:
    """Return the host keys that machines have made for themselves, by id: others have the one they boot with."""
    return {line["id"]: line["key"] for line in journal.lines("host key")}


def record_host_key(journal: Journal, instance: Instance, key: str) -> None:
    """Note that a machine has a host key of its own now."""
    journal.write("host key", id=instance.id, key=key)


def find_jump_host(instances: Mapping[str, Instance]) -> Instance | None:
    """Return the machine by way of which those without a public address are reached."""
    return next((one for one in instances.values() if one.public_ip), None)
