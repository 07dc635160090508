"""A job's machines at AWS: rents them, tells where they are, notes which are gone, ends them.

All that changes something is written into <run>/cloud.jsonl before it is done. Only the supervisor rents; any command
may end. Never touches the machines themselves.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cluster.connectors.hosts_file import Host, Hosts
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec
from infra.aws import tags
from infra.aws.client import Account, call, my_address
from infra.aws.errors import REACTIONS, CloudError, Interrupted, NoCredentials
from infra.aws.instances import amis, instances
from infra.aws.instances.gang import Gang, NoMachines, Refused
from infra.aws.instances.instances import Instance
from infra.aws.instances.request import Place, Want
from infra.aws.instances.user_data import user_data
from infra.aws.journal import Journal
from infra.aws.market import billing
from infra.aws.market.instance_types import Kind
from infra.aws.market.offers import kinds
from infra.aws.stack import key_pairs, security_group, stack
from train.tools.filesystem import as_json, read_json, replace

from .rental_spec import Wish

ACQUIRE_SECONDS = 1200.0
SSH_PORT = 22
JOURNAL, HOSTS = "cloud.jsonl", "hosts.json"


class EndedElsewhere(NoMachines):
    """Somebody, or a limit, has ended the job's machines; it is stopped."""


class Rented:
    """The machines of one job. `stopping` says why the job is to stop; whoever waits then raises `Interrupted`."""

    def __init__(
        self, spec: Spec, folders: Folders, say: Callable[[str], None], stopping: Callable[[], str] = lambda: ""
    ) -> None:
        self.spec, self.folders, self.say, self.stopping = spec, folders, say, stopping
        self.wish = Wish.of(spec.cloud)
        self.let_in = self.wish.address  # the address to which ssh is open
        self.journal = Journal(folders.run / JOURNAL)
        self.asking = threading.Lock()
        self.checked = False
        self.account = Account(self.wish.region)
        self.gang = self._gang(self.account)
        asked = [one["place"]["region"] for one in self.gang.askings() if one["end"] != "refused"]
        self.region = asked[-1] if asked else self.wish.region
        if self.region != self.wish.region:
            self.account = self.account.at(self.region)
            self.gang = self._gang(self.account)
        self.stack: stack.Stack | None = None
        self.kinds: dict[str, Kind] = {}
        self.images: dict[tuple[str, str], amis.Image] = {}

    def _gang(self, account: Account) -> Gang:
        return Gang(account, self.spec.uid, self.journal, self.say, self._pause)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            if why := self.stopping():
                raise Interrupted(why)
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.5, left))

    def _granted(self) -> list[dict[str, Any]]:
        lines = self.journal.lines("ask", "granted")
        granted = {one["number"] for one in lines if one["what"] == "granted"}
        return [one for one in lines if one["what"] == "ask" and one["number"] in granted]

    # --- where we stand ----------------------------------------------------------------------------------------------

    @property
    def place(self) -> Place | None:
        """Where the gang is: of the last asking for all of its machines; None before the first."""
        whole = self._whole()
        return Place(**whole["place"]) if whole else None

    def _whole(self) -> dict[str, Any] | None:
        """The last asking for all machines that was granted."""
        return next((one for one in reversed(self._granted()) if len(one["names"]) == len(self.spec.names)), None)

    @property
    def since(self) -> float | None:
        """When the first machine of this launch came, in seconds since 1970."""
        return min((one["time"] for one in self._grants()), default=None)

    def _grants(self) -> list[dict[str, Any]]:
        """The journal's lines of machines that came in this launch."""
        begun = max((one["time"] for one in self.journal.lines("begin")), default=0.0)
        return [one for one in self.journal.lines("granted") if one["time"] >= begun]

    @property
    def spent(self) -> float:
        """The dollars that earlier launches of the job have cost."""
        return billing.Meter(self.journal).dollars(self.since or time.time())

    @property
    def max_hours(self) -> float | None:
        """The limit of time that is asked for; it may have been extended."""
        limit: float | None = (read_json(self.folders.spec) or {}).get("max_hours", self.spec.max_hours)
        return limit

    def limits(self, place: Place, hours: float | None = None) -> tuple[float, float]:
        """Return the hours since the first machine of this launch after which the job saves and ends there, and the
        seconds after that until the power goes; with another limit of `hours` than was asked for.
        """
        spent, count, now = self.spent, len(self.spec.names), time.time()
        rate = self.wish.rate(count, place)
        if rate and self.since and sum(len(one["machines"]) == count for one in self._grants()) > 1:
            # All have moved: what the hours before cost is known, and is not what they would have cost here.
            spent = billing.Meter(self.journal).dollars(now) - rate * (now - self.since) / 3600
        return self.wish.limits(count, place, self.max_hours if hours is None else hours, spent)

    @property
    def late(self) -> bool:
        """Whether the time of this launch is over, and its machines should have ended by themselves."""
        if self.since is None or self.place is None:
            return False
        hours, late = self.limits(self.place)
        return time.time() - self.since > 3600 * hours + late

    def begin(self, mark: str) -> None:
        """Note that a launch of the job has begun; once, however often its supervisor does."""
        if mark not in [one["mark"] for one in self.journal.lines("begin", "move")]:
            self.journal.write("begin", mark=mark)

    def moves(self, mark: str) -> None:
        """Note that a launch goes on with other machines, under another mark."""
        self.journal.write("move", mark=mark)

    @property
    def ended(self) -> bool:
        """Whether somebody began to end what this launch has rented; then nothing is rented for it any more."""
        last = self.journal.lines("begin", "end")[-1:]
        return bool(last) and last[0]["what"] == "end"

    def known(self) -> None:
        """Raise `NoCredentials` when these are another account's: it knows nothing of the machines."""
        if not self.checked and self.wish.account and self.wish.account != self.account.identity[0]:
            other = self.account.identity[0]
            raise NoCredentials(f"{self.spec.name} is of account {self.wish.account}, these credentials are of {other}")
        self.checked = True

    def look(self) -> dict[str, Instance]:
        """Return the machines that are there, by name. Raises `CloudError` when AWS does not say."""
        self.known()
        return instances.present(self.gang.look())

    def with_gate(self, found: dict[str, Instance]) -> dict[str, Instance]:
        """Return the machines, one of which has a public address: EC2 gives none to those with several cards.

        Raises `CloudError`.
        """
        if not found or any(one.public for one in found.values()):
            return found
        head = found[min(found, key=int)]
        self.journal.write("address", id=head.id)
        own = {key: value for key, value in head.tags.items() if key not in (tags.MACHINE, tags.LAUNCH)}
        instances.open_gate(self.account, head, own)
        self.say(f"machine {head.name} has a public address; the others are reached through it")
        deadline = time.monotonic() + instances.LATE_SECONDS
        while time.monotonic() < deadline:
            again = self.look()
            if not again or any(one.public for one in again.values()):
                return again
            self._pause(1.0)
        raise CloudError(f"{head.id} does not show the address that it was given")

    # --- renting -----------------------------------------------------------------------------------------------------

    def gather(self, anew: Callable[[], None]) -> dict[str, Instance]:
        """Return the machines of the job: those that are there; or all are rented, after `anew` was called.

        Raises `NoMachines`, `CloudError`. What a crash left unanswered is asked again first: never two gangs.
        """
        self.known()
        if self.gang.open():
            self._stack_of(self.account)
            self.gang.settle()
        found = self.look()
        if self.ended:
            raise NoMachines(f"its machines were ended; go on: imgnet-cluster resume {self.spec.name}")
        if not found:
            if how := by_hand(self.journal, self._grants()) or ("its time is over" if self.late else ""):
                raise EndedElsewhere(f"{how}; go on: imgnet-cluster resume {self.spec.name}")
            anew()
            found = {one.name: one for one in self._acquire()}
        try:
            return self.with_gate(found)
        except CloudError as error:
            if error.code in REACTIONS or not error.code:  # else it would go wrong again, while all machines bill
                raise
            raise NoMachines(str(error)) from error

    def _acquire(self) -> list[Instance]:
        regions = list(dict.fromkeys(one.region for one in self.wish.places))
        if self._granted():  # the data, and what has been trained so far, are there and nowhere else
            regions = [self.region]
        for region in regions:
            self.region, self.account = region, self.account.at(region)
            self.gang = self._gang(self.account)
            own = self._stack_of(self.account)
            places = [one for one in self.wish.places if one.region == region and one.zone in own.subnets]
            self.kinds |= kinds(self.account, sorted({one.type for one in places}))
            places = [one for one in places if one.type in self.kinds]
            try:
                if not places:
                    raise CloudError(f"{region}: none of its zones has machines of the types that were asked for")
                seconds = ACQUIRE_SECONDS if region == regions[-1] else 0.0
                return self.gang.acquire(places, self.spec.names, self._want, self.kinds, seconds)
            except Interrupted:
                raise
            except CloudError as error:
                stop = isinstance(error, Refused) or self.gang.open()  # elsewhere too; or it is not over
                if region == regions[-1] or stop:
                    raise
                self.say(f"{error}; the next region")
        raise CloudError("no region was asked for")

    def _stack_of(self, account: Account) -> stack.Stack:
        if self.stack is None or self.stack.region != account.region:
            self.stack = stack.ensure(account, self.address(), self.say)
        return self.stack

    def address(self) -> str:
        """The address that is let in: as it was said, else this computer's now. It moves, and a job lives on."""
        if not self.wish.fixed:
            with contextlib.suppress(CloudError):
                self.let_in = my_address()
        return self.let_in

    def rent(self, name: str) -> Instance:
        """Rent another machine in place of one, in the same zone and group. Raises `Refused`, `CloudError`."""
        with self.asking:
            whole = self._whole()
            assert whole
            place = Place(**whole["place"])
            self._stack_of(self.account)
            self.kinds |= kinds(self.account, [place.type]) if place.type not in self.kinds else {}
            group = whole["request"].get("Placement", {}).get("GroupName", "")
            return self.gang.ask(place, [name], self._want(place), self.kinds[place.type], group)[0]

    def _want(self, place: Place) -> Want:
        """What a machine is to be, with a bootstrap host key that no other asking has."""
        assert self.stack
        kind, now = self.kinds[place.type], time.time()
        where = place.region, kind.arch
        if where not in self.images:  # once: a newer one would make another request of the same asking
            self.images[where] = amis.resolve(self.account, kind.arch, self.wish.ami)
        image = self.images[where]
        if image.port != SSH_PORT:
            ports, group = (SSH_PORT, image.port), self.stack.security_group
            security_group.let_in(self.account, group, self.address(), self.wish.owner, ports=ports)
        hours, late = self.limits(place)
        left = max(0.0, 3600 * hours - (now - (self.since or now))) + late
        private, public = key_pairs.new_pair()
        data = user_data(
            seconds=round(left), private=private, public=public, file_system=self.stack.file_system,
            access_point=self.stack.access_point, region=place.region, user=image.user, python=image.python,
        )  # fmt: skip
        return Want(
            uid=self.spec.uid, name=self.spec.name, owner=self.wish.owner, expires=now + left, image=image,
            stack=self.stack, user_data=data, host_key=public, group=self.wish.group,
        )  # fmt: skip

    def write_hosts(self, found: Mapping[str, Host]) -> Hosts:
        """Write down how to reach the machines, for commands that want to, in the order of their names."""
        hosts = Hosts(None, tuple(found[name] for name in self.spec.names if name in found))
        replace(self.folders.run / HOSTS, as_json({**hosts.to_json(), "names": list(found)}))
        return hosts

    def tell_expiry(self, moment: float) -> None:
        """Tag the machines with another end of their time, for who looks for what is past it. Raises `CloudError`."""
        ids = [one.id for one in self.look().values()]
        new = tags.pairs({tags.EXPIRES: tags.stamp(moment)})
        call("tag machines (ec2:CreateTags)", self.account.ec2.create_tags, Resources=ids, Tags=new)

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> list[str]:
        """End everything that bills. Returns a line for each thing that is not gone. Raises `CloudError`."""
        self.known()
        left = self._ending(self.account).end()
        for region in {one["place"]["region"] for one in self.gang.askings()} - {self.region}:
            left += self._ending(self.account.at(region)).end()
        return left

    def _ending(self, account: Account) -> Gang:
        """Whoever ends things is not kept from it by a stop."""
        return Gang(account, self.spec.uid, self.journal, self.say)

    def lose(self, name: str) -> None:
        """Take a machine away as a power cut does. Raises `CloudError` when it is not there."""
        found = self.look()
        if name not in found:
            raise CloudError(f"machine {name} is not there; imgnet-cluster status {self.spec.name}")
        self.release([found[name].id], "lost in a rehearsal")

    def release(self, ids: list[str], why: str) -> None:
        """End some machines, whose place others take."""
        self.journal.write("release", ids=ids, why=why)
        instances.terminate(self.account, ids)

    def release_all(self) -> None:
        """End the machines that are left, and return when EC2 shows none of them any more."""
        while found := self.look():
            self.release([one.id for one in found.values()], "all moved")
            self._pause(1.0)


def by_hand(journal: Journal, grants: Iterable[Mapping[str, Any]]) -> str:
    """Return how the last machines of a launch were ended, "" when it was EC2 or we ourselves: then others may come.

    From another computer, in the console, or by their own limit: whoever did that does not want others. Those that
    ended last tell, for EC2 may have taken one away before, in whose place none came. `grants` are the launch's lines
    of machines that came.
    """
    released = {id for line in journal.lines("release", "end") for id in line["ids"]}
    last = {one["name"]: one["id"] for line in grants for one in line["machines"]}
    known = {line["id"]: (line["ended"], line["why"]) for line in journal.lines("gone")}
    forgotten = (math.inf, "Client.InstanceInitiatedShutdown")  # an hour or more ago, with nobody to see it
    _, why = max((known.get(id, forgotten) for id in last.values() if id not in released), default=(0.0, ""))
    if not why.startswith("Client."):
        return ""
    if "InstanceInitiated" in why:
        return "its machines were ended by their own limit, or when it was done"
    return "its machines were ended by somebody (down, or the AWS console)"
