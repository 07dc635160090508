"""Renting the machines of a job: all of them in one zone and one fresh placement group, or none.

Each asking is written down before it is made, with its frozen request and its own client token, so that whoever comes
after a crash, or after an answer that was lost, sends the very same again and gets the same machines. Reactions go by
the code of the error (infra/aws/errors.py). Sources: AWS, "Ensuring idempotency", "Cluster placement groups".
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from infra.aws import tags
from infra.aws.client import Account
from infra.aws.errors import CloudError, Reaction, answer, code_of, explain, reaction
from infra.aws.journal import Journal
from infra.aws.market import quotas
from infra.aws.market.instance_types import Kind

from . import instances
from .instances import Instance
from .request import Place, Want, group_name, run_request

TRIES, SAME_SECONDS = 6, 180.0  # of the same asking, when nobody knows whether it was heard
COOL_SECONDS = 180.0  # a place without capacity is not asked again before that (Karpenter does the same)
PENDING_SECONDS = 900.0
ROUND_SECONDS, LONGEST_ROUND = 15.0, 120.0
EACH = 2.0
Request = Callable[[Place], Want]


class Refused(CloudError):
    """EC2 gives no machines at a place; `reaction` says what that means for the next, `came` who had to be ended."""

    def __init__(self, text: str, code: str, reaction: Reaction, came: Sequence[Instance] = ()) -> None:
        super().__init__(text, code)
        self.reaction, self.came = reaction, came


class NoMachines(CloudError):
    """No place has the machines, and everything was tried."""


class Gang:
    """The machines of one job in one region. `pause` waits, and raises `Interrupted` when the job is to stop."""

    def __init__(
        self,
        account: Account,
        uid: str,
        journal: Journal,
        say: Callable[[str], None] = print,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.account, self.uid, self.journal, self.say, self.pause = account, uid, journal, say, pause

    # --- what was asked before ---------------------------------------------------------------------------------------

    def askings(self) -> list[dict[str, Any]]:
        """Return all askings in order, each with how it ended: "granted", "refused", or "" while nobody knows."""
        found: dict[int, dict[str, Any]] = {}
        for line in self.journal.lines("ask", "granted", "refused"):
            if line["what"] == "ask":
                found[line["number"]] = {**line, "end": "", "ids": []}
            elif line["number"] in found:
                ids = [one["id"] for one in line.get("machines", [])]
                found[line["number"]] |= {"end": line["what"], "ids": ids, "capacity": line.get("capacity")}
        return list(found.values())

    @property
    def ids(self) -> list[str]:
        """All machines that were ever granted."""
        return [one for asking in self.askings() if asking["end"] == "granted" for one in asking["ids"]]

    @property
    def living(self) -> list[str]:
        """Those of them of which EC2 has not said that they are gone."""
        gone = {one["id"] for one in self.journal.lines("gone")}
        return [one for one in self.ids if one not in gone]

    @property
    def asked_at(self) -> float:
        """When machines were asked for that may yet appear; 0 when all that was asked for has been seen, or refused."""
        waits = [one for one in self.open() if len(self._of(one["request"]["ClientToken"])) < len(one["names"])]
        return max((one["time"] for one in waits), default=0.0)

    def _of(self, token: str) -> list[Instance]:
        return instances.describe(self.account, {tags.LAUNCH: token})

    def open(self) -> list[dict[str, Any]]:
        """Return askings of this region whose answer nobody has written down."""
        return [one for one in self._here() if not one["end"]]

    def _here(self) -> list[dict[str, Any]]:
        return [one for one in self.askings() if one["place"]["region"] == self.account.region]

    def look(self) -> list[Instance]:
        """Return all machines of the job that EC2 shows, and note those that have ended. Raises `CloudError`.

        A machine that appears after its asking was given up is ended, for others have its place.
        """
        found = instances.all_told(self.account, {tags.JOB: self.uid}, self.living)
        noted = {one["id"] for one in self.journal.lines("gone")}
        for one in found:
            if one.ended is not None and one.id not in noted:
                self._note("gone", id=one.id, name=one.name, ended=one.ended, why=one.why)
        refused = {one["request"]["ClientToken"] for one in self.askings() if one["end"] == "refused"}
        stray = [one.id for one in found if one.bills and one.token in refused]
        if stray:
            self.say(f"{len(stray)} machines came after they were given up; they are ended")
            instances.terminate(self.account, stray)
        return [one for one in found if one.id not in stray]

    def _note(self, what: str, **facts: Any) -> None:
        """Write down what is over. A full disk keeps nobody from ending machines."""
        with contextlib.suppress(OSError):
            self.journal.write(what, **facts)

    # --- asking ------------------------------------------------------------------------------------------------------

    def settle(self) -> list[Instance]:
        """Finish askings that a crash left open: the same again, with the same token. Returns whom that brought."""
        found: list[Instance] = []
        for one in self.open():
            self.say(f"asking {one['number']} was not finished; the same again")
            try:
                found += self._ask(one, again=True)
            except Refused as refused:
                self.say(str(refused))
        return found

    def acquire(
        self, places: Sequence[Place], names: Sequence[str], want: Request, kinds: dict[str, Kind], seconds: float
    ) -> list[Instance]:
        """Return all these machines, from the first place that has them; asked in order, and again until `seconds`.

        Raises `CloudError` with what each place said when none has them, `Interrupted`.
        """
        deadline, round = time.monotonic() + seconds, ROUND_SECONDS
        said, skip, why_not = dict[str, str](), set[str](), dict[str, Reaction]()
        while True:
            for place in places:
                kind, where = kinds[place.type], f"{place.type} {place.market} in {place.zone}"
                code = quotas.code(kind.family, place.market)
                if code + place.region in skip:
                    continue
                if self._cool(place):
                    said.setdefault(where, "had none when it was asked a moment ago")
                    why_not[where] = Reaction.CAPACITY
                    continue
                try:
                    return self.ask(place, names, want(place), kind)
                except Refused as refused:
                    said[where], why_not[where] = str(refused), refused.reaction
                    if refused.reaction is Reaction.QUOTA:
                        skip.add(code + place.region)
                        said[where] += f"; {quotas.request_command(place.region, code, len(names) * kind.vcpus)}"
                    self.say(f"{place.zone}: {said[where]}")
                    if refused.reaction is Reaction.STOP:
                        raise
            hopeless = set(why_not.values()) <= {Reaction.QUOTA, Reaction.ADDRESSES}
            if hopeless or time.monotonic() + round > deadline:
                why = "; ".join(f"{place}: {text}" for place, text in said.items())
                raise NoMachines(f"EC2 has no {len(names)} machines for this job: {why}; see imgnet-cluster offers")
            self.say(f"no place has {len(names)} machines now; again in {round:.0f} s")
            self.pause(round)
            round = min(LONGEST_ROUND, 2 * round)

    def _cool(self, place: Place) -> bool:
        """Whether this place had no capacity a moment ago, as another asking of this job found."""
        for one in reversed(self.askings()):
            if all(one["place"][key] == getattr(place, key) for key in ("zone", "type", "market")):
                return bool(one.get("capacity")) and time.time() - one["time"] < COOL_SECONDS
        return False

    def ask(self, place: Place, names: Sequence[str], want: Want, kind: Kind, group: str = "") -> list[Instance]:
        """Ask once at a place for these machines, in the placement group of an earlier asking if it is named.

        Returns them when all are there and as asked. Raises `Refused`, `CloudError`, `Interrupted`.
        """
        number = 1 + max((one["number"] for one in self.askings()), default=0)
        request = run_request(want, kind, place, names, number)
        if group:
            request["Placement"] = {"GroupName": group}
        mine = group_name(self.uid, number) if want.group and not group else ""
        login = {"image": want.image.id, "user": want.image.user, "port": want.image.port, "host_key": want.host_key}
        asking = {"number": number, "place": vars(place), "names": list(names), "request": request, "group": mine}
        self.journal.write("ask", **asking, login=login)
        return self._ask(asking)

    def _ask(self, asking: dict[str, Any], again: bool = False) -> list[Instance]:
        number = asking["number"]
        self.pause(0)
        try:
            if asking["group"]:
                self._make_group(asking["group"], tags.read(asking["request"]["TagSpecifications"][0]))
            ids = self._run(asking, again)
            found = self._verify(asking, ids)
        except Refused as refused:
            facts = {"code": refused.code, "said": str(refused), "capacity": refused.reaction is Reaction.CAPACITY}
            self._drop_group(asking["group"])
            self.journal.write("refused", number=number, **facts, machines=_facts(refused.came))
            raise
        self.journal.write("granted", number=number, machines=_facts(found))
        return found

    def _make_group(self, name: str, own: tags.Tags) -> None:
        specifications = tags.specifications(["placement-group"], {**own, tags.NAME: name})
        try:
            self.account.ec2.create_placement_group(
                GroupName=name, Strategy="cluster", TagSpecifications=specifications
            )
        except Exception as error:
            if reaction(error) is not Reaction.THERE:
                raise explain(error, "make a placement group (ec2:CreatePlacementGroup)") from error
            mine = instances.groups(self.account, {tags.STACK: tags.OURS, tags.JOB: self.uid})
            if name not in [one["GroupName"] for one in mine]:
                raise CloudError(f"placement group {name} is there and is not ours; remove it, or rename it") from error

    def _drop_group(self, name: str) -> None:
        """Remove the group of an asking that brought nothing. What is still in it keeps it, and `end` removes it."""
        if name:
            try:
                self.account.ec2.delete_placement_group(GroupName=name)
            except Exception as error:
                if reaction(error) not in (Reaction.BUSY, Reaction.LATER):
                    self.say(str(explain(error, f"remove placement group {name}")))

    def _run(self, asking: dict[str, Any], doubt: bool) -> list[str]:
        """Send RunInstances until there is an answer; `doubt` whether it has been heard already.

        Returns the machines' ids. Raises `Refused`, `CloudError`.
        """
        begun, wait = time.monotonic(), 1.0
        for number in range(1, TRIES + 1):
            try:
                said = self.account.once.run_instances(**asking["request"])
                return [one["InstanceId"] for one in said["Instances"]]
            except Exception as error:
                react = self._react(error)
                if code_of(error) == "IdempotentParameterMismatch":
                    return self._found(asking, explain(error, "rent machines (ec2:RunInstances)"))
                if react not in (Reaction.UNKNOWN, Reaction.THROTTLED, Reaction.LATER):
                    raise self._refused(error, react) from error
                last, late = error, time.monotonic() - begun > SAME_SECONDS
                doubt = doubt or react is Reaction.UNKNOWN
                self.journal.write("unanswered", number=asking["number"], **answer(error))
                if late or number == TRIES:
                    break
            self.pause(wait)
            wait *= 2
        failed = explain(last, "rent machines (ec2:RunInstances)")
        if doubt:
            return self._found(asking, failed)
        raise Refused(str(failed), failed.code, Reaction.STOP if react is Reaction.LATER else react)

    @staticmethod
    def _react(error: Exception) -> Reaction:
        """A role that was just made is unknown for some seconds, and EC2 calls that a wrong value."""
        if code_of(error) == "InvalidParameterValue" and "iaminstanceprofile" in str(error).replace(" ", "").lower():
            return Reaction.LATER
        if code_of(error) == "Unsupported" and "zone" not in str(error).lower():
            return Reaction.STOP  # an architecture or a boot mode that no zone will take
        return reaction(error)

    def _refused(self, error: Exception, react: Reaction) -> CloudError:
        failed = explain(error, "rent machines (ec2:RunInstances)")
        if react in (Reaction.CAPACITY, Reaction.PRICE, Reaction.QUOTA, Reaction.ADDRESSES):
            return Refused(str(failed).removeprefix("rent machines (ec2:RunInstances): "), failed.code, react)
        return failed if not failed.code else Refused(str(failed), failed.code, Reaction.STOP)

    def _found(self, asking: dict[str, Any], why: CloudError) -> list[str]:
        """Nobody answered: look for the machines by their tag for a minute. All are taken, some are ended."""
        deadline, found = time.monotonic() + instances.LATE_SECONDS, list[Instance]()
        while time.monotonic() < deadline and len(found) < len(asking["names"]):
            found = [one for one in self._of(asking["request"]["ClientToken"]) if one.bills]
            if len(found) < len(asking["names"]):
                self.pause(EACH)
        if len(found) == len(asking["names"]):
            return [one.id for one in found]
        instances.terminate(self.account, [one.id for one in found])
        said = f"{why}; {len(found)} of {len(asking['names'])} machines came and were ended"
        raise Refused(said, why.code, Reaction.UNKNOWN, found)

    # --- what came ---------------------------------------------------------------------------------------------------

    def _verify(self, asking: dict[str, Any], ids: Sequence[str]) -> list[Instance]:
        """Wait until all run, and see that they are what was asked for; else none of them stays. Raises `Refused`."""
        deadline = time.monotonic() + PENDING_SECONDS
        while True:
            found = [one for one in instances.describe(self.account, {tags.JOB: self.uid}, ids) if one.id in ids]
            wrong = instances.wrong(found, asking["request"], asking["place"]["zone"])
            if len(ids) != len(asking["names"]):
                wrong = f"{len(ids)} of {len(asking['names'])} machines came"
            if not wrong and time.monotonic() > deadline:
                wrong = f"machines did not start in {PENDING_SECONDS:.0f} s"
            if wrong:
                instances.terminate(self.account, list(ids))
                raise Refused(wrong, "", Reaction.CAPACITY, found)
            if len(found) == len(ids) and all(one.state == "running" for one in found):
                return sorted(found, key=lambda one: int(one.name))
            self.pause(EACH)

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self, seconds: float = instances.END_SECONDS) -> list[str]:
        """End all machines of the job, and what they leave. Returns a line for each thing that is not gone."""
        self._note("end", ids=self.ids)
        left = instances.end(self.account, self.uid, self.living, self.say, self.pause, seconds, self.asked_at)
        found = self.look()
        self._forget(found)
        for one in self.open():  # what came all the same is on the bill
            came = _facts([it for it in found if it.token == one["request"]["ClientToken"]])
            self._note("refused", number=one["number"], code="", said="the job ended", capacity=False, machines=came)
        busy = 0.0 if left else min(seconds, instances.BUSY_SECONDS)
        lines = [f"machine {one.id} in {one.region}: {one.state}" for one in left]
        lines += instances.sweep(self.account, {tags.JOB: self.uid}, self.pause, busy)
        if not lines:
            self._note("ended")
        return lines

    def _forget(self, found: Sequence[Instance]) -> None:
        """Note machines that EC2 tells of no more: they ended long ago, by their limit at the latest."""
        known = {one["id"] for one in self.journal.lines("gone")} | {one.id for one in found}
        for asking in self._here():
            own = tags.read(asking["request"]["TagSpecifications"][0])
            ended = min(time.time(), tags.moment(own.get(tags.EXPIRES, "")) or time.time())
            for id in [one for one in asking["ids"] if one not in known]:
                self._note("gone", id=id, name="", ended=ended, why="EC2 tells of it no more")


def _facts(found: Sequence[Instance]) -> list[dict[str, Any]]:
    return [{"id": one.id, "name": one.name, "launched": one.launched} for one in found]
