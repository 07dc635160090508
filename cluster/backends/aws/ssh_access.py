"""How to log in to rented machines: through which, as whom, with whose host key. From the journal alone."""

from collections.abc import Mapping

from cluster.connectors.hosts_file import Host
from infra.aws.errors import CloudError
from infra.aws.instances.instances import Instance
from infra.aws.journal import Journal
from infra.aws.stack import key_pairs

FOLDER = "~/.imgnet"  # on a machine, as its user data makes it
PYTHON = f"{FOLDER}/python"


def hosts(journal: Journal, present: Mapping[str, Instance]) -> dict[str, Host]:
    """Return how to reach machines, by name: by a public address, or by way of the one that has it.

    Raises `CloudError` for one that bears the job's tag and that the journal does not know.
    """
    asked = {line["request"]["ClientToken"]: line["login"] for line in journal.lines("ask")}
    own = own_keys(journal)
    if stranger := next((one for one in present.values() if one.token not in asked), None):
        raise CloudError(f"{stranger.id} bears the job's tag, but {journal.path} does not know it")
    gate = gate_of(present)

    def pin(one: Instance) -> str:
        return str(own.get(one.id, asked[one.token]["host_key"]))

    found = {}
    for name, one in present.items():
        login, through = asked[one.token], gate if not one.public else None
        found[name] = Host(
            host=one.public or one.private, address=one.private, port=login["port"], user=login["user"],
            key=str(key_pairs.KEY.expanduser()), python=PYTHON, folder=FOLDER, host_key=pin(one),
            jump=f"{login['user']}@{through.public}:{login['port']}" if through else None,
            jump_key=pin(through) if through else None,
        )  # fmt: skip
    return found


def own_keys(journal: Journal) -> dict[str, str]:
    """Return the host keys that machines have made for themselves, by id: others have the one they boot with."""
    return {line["id"]: line["key"] for line in journal.lines("host key")}


def keep_key(journal: Journal, one: Instance, key: str) -> None:
    """Note that a machine has a host key of its own now."""
    journal.write("host key", id=one.id, key=key)


def gate_of(found: Mapping[str, Instance]) -> Instance | None:
    """Return the machine by way of which those without a public address are reached."""
    return next((one for one in found.values() if one.public), None)
