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
from infra.aws.errors import CloudError, ErrorKind, classify_error, error_to_dict, explain_error, get_error_code
from infra.aws.journal import Journal
from infra.aws.market import quotas
from infra.aws.market.instance_types import InstanceType

from . import instances
from .instances import Instance
from .request import InstanceRequest, Place, build_run_instances, placement_group_name

RUN_ATTEMPTS, RUN_RETRY_SECONDS = 6, 180.0  # of the same asking, when nobody knows whether it was heard
CAPACITY_COOLDOWN_SECONDS = 180.0  # a place without capacity is not asked again before that (Karpenter does the same)
START_TIMEOUT_SECONDS = 900.0
FIRST_ROUND_PAUSE_SECONDS, MAX_ROUND_PAUSE_SECONDS = 15.0, 120.0
GANG_POLL_SECONDS = 2.0
BuildInstanceRequest = Callable[[Place], InstanceRequest]


class LaunchRefused(CloudError):
    """EC2 gives no machines at a place; `reaction` says what that means for the next, `came` who had to be ended."""

    def __init__(self, text: str, code: str, error_kind: ErrorKind, launched: Sequence[Instance] = ()) -> None:
        super().__init__(text, code)
        self.error_kind, self.launched = error_kind, launched


class NoMachines(CloudError):
    """No place has the machines, and everything was tried."""


class Gang:
    """The machines of one job in one region. `pause` waits, and raises `Interrupted` when the job is to stop."""

    def __init__(
        self,
        account: Account,
        job_uid: str,
        journal: Journal,
        log: Callable[[str], None] = print,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.account, self.job_uid, self.journal, self.log, self.pause = account, job_uid, journal, log, pause

    # --- what was asked before ---------------------------------------------------------------------------------------

    def launch_requests(self) -> list[dict[str, Any]]:
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
    def granted_ids(self) -> list[str]:
        """All machines that were ever granted."""
        return [one for asking in self.launch_requests() if asking["end"] == "granted" for one in asking["ids"]]

    @property
    def alive_ids(self) -> list[str]:
        """Those of them of which EC2 has not said that they are gone."""
        gone = {one["id"] for one in self.journal.lines("gone")}
        return [one for one in self.granted_ids if one not in gone]

    @property
    def last_pending_request_time(self) -> float:
        """When machines were asked for that may yet appear; 0 when all that was asked for has been seen, or refused."""
        waits = [
            one
            for one in self.open_requests()
            if len(self._instances_of(one["request"]["ClientToken"])) < len(one["names"])
        ]
        return max((one["time"] for one in waits), default=0.0)

    def _instances_of(self, token: str) -> list[Instance]:
        return instances.describe(self.account, {tags.LAUNCH: token})

    def open_requests(self) -> list[dict[str, Any]]:
        """Return askings of this region whose answer nobody has written down."""
        return [one for one in self._requests_in_region() if not one["end"]]

    def _requests_in_region(self) -> list[dict[str, Any]]:
        return [one for one in self.launch_requests() if one["place"]["region"] == self.account.region]

    def list_instances(self) -> list[Instance]:
        """Return all machines of the job that EC2 shows, and note those that have ended. Raises `CloudError`.

        A machine that appears after its asking was given up is ended, for others have its place.
        """
        found = instances.describe_all(self.account, {tags.JOB: self.job_uid}, self.alive_ids)
        noted = {one["id"] for one in self.journal.lines("gone")}
        for one in found:
            if one.end_time is not None and one.id not in noted:
                self._record("gone", id=one.id, name=one.name, ended=one.end_time, why=one.end_reason)
        refused = {one["request"]["ClientToken"] for one in self.launch_requests() if one["end"] == "refused"}
        stray = [one.id for one in found if one.is_billed and one.launch_token in refused]
        if stray:
            self.log(f"{len(stray)} machines came after they were given up; they are ended")
            instances.terminate(self.account, stray)
        return [one for one in found if one.id not in stray]

    def _record(self, what: str, **fields: Any) -> None:
        """Write down what is over. A full disk keeps nobody from ending machines."""
        with contextlib.suppress(OSError):
            self.journal.write(what, **fields)

    # --- asking ------------------------------------------------------------------------------------------------------

    def finish_open_requests(self) -> list[Instance]:
        """Finish askings that a crash left open: the same again, with the same token. Returns whom that brought."""
        found: list[Instance] = []
        for one in self.open_requests():
            self.log(f"asking {one['number']} was not finished; the same again")
            try:
                found += self._send_request(one, is_retry=True)
            except LaunchRefused as refused:
                self.log(str(refused))
        return found

    def acquire(
        self,
        places: Sequence[Place],
        names: Sequence[str],
        build_request: BuildInstanceRequest,
        instance_types: dict[str, InstanceType],
        timeout_seconds: float,
    ) -> list[Instance]:
        """Return all these machines, from the first place that has them; asked in order, and again until `seconds`.

        Raises `CloudError` with what each place said when none has them, `Interrupted`.
        """
        deadline, round = time.monotonic() + timeout_seconds, FIRST_ROUND_PAUSE_SECONDS
        said, skip, why_not = dict[str, str](), set[str](), dict[str, ErrorKind]()
        while True:
            for place in places:
                kind, where = instance_types[place.type], f"{place.type} {place.market} in {place.zone}"
                code = quotas.get_quota_code(kind.quota_family, place.market)
                if code + place.region in skip:
                    continue
                if self._recently_failed(place):
                    said.setdefault(where, "had none when it was asked a moment ago")
                    why_not[where] = ErrorKind.NO_CAPACITY
                    continue
                try:
                    return self.request_instances(place, names, build_request(place), kind)
                except LaunchRefused as refused:
                    said[where], why_not[where] = str(refused), refused.error_kind
                    if refused.error_kind is ErrorKind.QUOTA_EXCEEDED:
                        skip.add(code + place.region)
                        said[where] += f"; {quotas.quota_increase_command(place.region, code, len(names) * kind.vcpus)}"
                    self.log(f"{place.zone}: {said[where]}")
                    if refused.error_kind is ErrorKind.PERMANENT:
                        raise
            hopeless = set(why_not.values()) <= {ErrorKind.QUOTA_EXCEEDED, ErrorKind.NO_FREE_ADDRESSES}
            if hopeless or time.monotonic() + round > deadline:
                why = "; ".join(f"{place}: {text}" for place, text in said.items())
                raise NoMachines(f"EC2 has no {len(names)} machines for this job: {why}; see imgnet-cluster offers")
            self.log(f"no place has {len(names)} machines now; again in {round:.0f} s")
            self.pause(round)
            round = min(MAX_ROUND_PAUSE_SECONDS, 2 * round)

    def _recently_failed(self, place: Place) -> bool:
        """Whether this place had no capacity a moment ago, as another asking of this job found."""
        for one in reversed(self.launch_requests()):
            if all(one["place"][key] == getattr(place, key) for key in ("zone", "type", "market")):
                return bool(one.get("capacity")) and time.time() - one["time"] < CAPACITY_COOLDOWN_SECONDS
        return False

    def request_instances(
        self,
        place: Place,
        names: Sequence[str],
        instance_request: InstanceRequest,
        instance_type: InstanceType,
        placement_group: str = "",
    ) -> list[Instance]:
        """Ask once at a place for these machines, in the placement group of an earlier asking if it is named.

        Returns them when all are there and as asked. Raises `Refused`, `CloudError`, `Interrupted`.
        """
        number = 1 + max((one["number"] for one in self.launch_requests()), default=0)
        request = build_run_instances(instance_request, instance_type, place, names, number)
        if placement_group:
            request["Placement"] = {"GroupName": placement_group}
        mine = (
            placement_group_name(self.job_uid, number)
            if instance_request.use_placement_group and not placement_group
            else ""
        )
        login = {
            "image": instance_request.image.id,
            "user": instance_request.image.ssh_user,
            "port": instance_request.image.ssh_port,
            "host_key": instance_request.host_key,
        }
        asking = {"number": number, "place": vars(place), "names": list(names), "request": request, "group": mine}
        self.journal.write("ask", **asking, login=login)
        return self._send_request(asking)

    def _send_request(self, launch_request: dict[str, Any], is_retry: bool = False) -> list[Instance]:
        number = launch_request["number"]
        self.pause(0)
        try:
            if launch_request["group"]:
                self._create_placement_group(
                    launch_request["group"], tags.read_tags(launch_request["request"]["TagSpecifications"][0])
                )
            ids = self._run_instances(launch_request, is_retry)
            found = self._wait_until_running(launch_request, ids)
        except LaunchRefused as refused:
            facts = {
                "code": refused.code,
                "said": str(refused),
                "capacity": refused.error_kind is ErrorKind.NO_CAPACITY,
            }
            self._remove_placement_group(launch_request["group"])
            self.journal.write("refused", number=number, **facts, machines=_instance_records(refused.launched))
            raise
        self.journal.write("granted", number=number, machines=_instance_records(found))
        return found

    def _create_placement_group(self, name: str, own_tags: tags.Tags) -> None:
        specifications = tags.tag_specifications(["placement-group"], {**own_tags, tags.NAME: name})
        try:
            self.account.ec2.create_placement_group(
                GroupName=name, Strategy="cluster", TagSpecifications=specifications
            )
        except Exception as error:
            if classify_error(error) is not ErrorKind.ALREADY_EXISTS:
                raise explain_error(error, "make a placement group (ec2:CreatePlacementGroup)") from error
            mine = instances.placement_groups(self.account, {tags.STACK: tags.STACK_VALUE, tags.JOB: self.job_uid})
            if name not in [one["GroupName"] for one in mine]:
                raise CloudError(f"placement group {name} is there and is not ours; remove it, or rename it") from error

    def _remove_placement_group(self, name: str) -> None:
        """Remove the group of an asking that brought nothing. What is still in it keeps it, and `end` removes it."""
        if name:
            try:
                self.account.ec2.delete_placement_group(GroupName=name)
            except Exception as error:
                if classify_error(error) not in (ErrorKind.IN_USE, ErrorKind.NOT_VISIBLE_YET):
                    self.log(str(explain_error(error, f"remove placement group {name}")))

    def _run_instances(self, launch_request: dict[str, Any], may_have_run: bool) -> list[str]:
        """Send RunInstances until there is an answer; `doubt` whether it has been heard already.

        Returns the machines' ids. Raises `Refused`, `CloudError`.
        """
        begun, wait = time.monotonic(), 1.0
        for number in range(1, RUN_ATTEMPTS + 1):
            try:
                said = self.account.ec2_no_retry.run_instances(**launch_request["request"])
                return [one["InstanceId"] for one in said["Instances"]]
            except Exception as error:
                react = self._classify_run_error(error)
                if get_error_code(error) == "IdempotentParameterMismatch":
                    return self._recover_by_tag(
                        launch_request, explain_error(error, "rent machines (ec2:RunInstances)")
                    )
                if react not in (ErrorKind.OUTCOME_UNKNOWN, ErrorKind.THROTTLED, ErrorKind.NOT_VISIBLE_YET):
                    raise self._to_refusal(error, react) from error
                last, late = error, time.monotonic() - begun > RUN_RETRY_SECONDS
                may_have_run = may_have_run or react is ErrorKind.OUTCOME_UNKNOWN
                self.journal.write("unanswered", number=launch_request["number"], **error_to_dict(error))
                if late or number == RUN_ATTEMPTS:
                    break
            self.pause(wait)
            wait *= 2
        failed = explain_error(last, "rent machines (ec2:RunInstances)")
        if may_have_run:
            return self._recover_by_tag(launch_request, failed)
        raise LaunchRefused(
            str(failed), failed.code, ErrorKind.PERMANENT if react is ErrorKind.NOT_VISIBLE_YET else react
        )

    @staticmethod
    def _classify_run_error(error: Exception) -> ErrorKind:
        """A role that was just made is unknown for some seconds, and EC2 calls that a wrong value."""
        if (
            get_error_code(error) == "InvalidParameterValue"
            and "iaminstanceprofile" in str(error).replace(" ", "").lower()
        ):
            return ErrorKind.NOT_VISIBLE_YET
        if get_error_code(error) == "Unsupported" and "zone" not in str(error).lower():
            return ErrorKind.PERMANENT  # an architecture or a boot mode that no zone will take
        return classify_error(error)

    def _to_refusal(self, error: Exception, error_kind: ErrorKind) -> CloudError:
        failed = explain_error(error, "rent machines (ec2:RunInstances)")
        if error_kind in (
            ErrorKind.NO_CAPACITY,
            ErrorKind.PRICE_TOO_LOW,
            ErrorKind.QUOTA_EXCEEDED,
            ErrorKind.NO_FREE_ADDRESSES,
        ):
            return LaunchRefused(
                str(failed).removeprefix("rent machines (ec2:RunInstances): "), failed.code, error_kind
            )
        return failed if not failed.code else LaunchRefused(str(failed), failed.code, ErrorKind.PERMANENT)

    def _recover_by_tag(self, launch_request: dict[str, Any], cause: CloudError) -> list[str]:
        """Nobody answered: look for the machines by their tag for a minute. All are taken, some are ended."""
        deadline, found = time.monotonic() + instances.INSTANCE_VISIBILITY_SECONDS, list[Instance]()
        while time.monotonic() < deadline and len(found) < len(launch_request["names"]):
            found = [one for one in self._instances_of(launch_request["request"]["ClientToken"]) if one.is_billed]
            if len(found) < len(launch_request["names"]):
                self.pause(GANG_POLL_SECONDS)
        if len(found) == len(launch_request["names"]):
            return [one.id for one in found]
        instances.terminate(self.account, [one.id for one in found])
        said = f"{cause}; {len(found)} of {len(launch_request['names'])} machines came and were ended"
        raise LaunchRefused(said, cause.code, ErrorKind.OUTCOME_UNKNOWN, found)

    # --- what came ---------------------------------------------------------------------------------------------------

    def _wait_until_running(self, launch_request: dict[str, Any], ids: Sequence[str]) -> list[Instance]:
        """Wait until all run, and see that they are what was asked for; else none of them stays. Raises `Refused`."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            found = [one for one in instances.describe(self.account, {tags.JOB: self.job_uid}, ids) if one.id in ids]
            wrong = instances.validation_error(found, launch_request["request"], launch_request["place"]["zone"])
            if len(ids) != len(launch_request["names"]):
                wrong = f"{len(ids)} of {len(launch_request['names'])} machines came"
            if not wrong and time.monotonic() > deadline:
                wrong = f"machines did not start in {START_TIMEOUT_SECONDS:.0f} s"
            if wrong:
                instances.terminate(self.account, list(ids))
                raise LaunchRefused(wrong, "", ErrorKind.NO_CAPACITY, found)
            if len(found) == len(ids) and all(one.state == "running" for one in found):
                return sorted(found, key=lambda one: int(one.name))
            self.pause(GANG_POLL_SECONDS)

    # --- the end -----------------------------------------------------------------------------------------------------

    def terminate_job(self, timeout_seconds: float = instances.TERMINATE_TIMEOUT_SECONDS) -> list[str]:
        """End all machines of the job, and what they leave. Returns a line for each thing that is not gone."""
        self._record("end", ids=self.granted_ids)
        left = instances.terminate_and_wait(
            self.account,
            self.job_uid,
            self.alive_ids,
            self.log,
            self.pause,
            timeout_seconds,
            self.last_pending_request_time,
        )
        found = self.list_instances()
        self._record_forgotten(found)
        for one in self.open_requests():  # what came all the same is on the bill
            came = _instance_records([it for it in found if it.launch_token == one["request"]["ClientToken"]])
            self._record("refused", number=one["number"], code="", said="the job ended", capacity=False, machines=came)
        busy = 0.0 if left else min(timeout_seconds, instances.LEFTOVER_IN_USE_SECONDS)
        lines = [f"machine {one.id} in {one.region}: {one.state}" for one in left]
        lines += instances.remove_leftovers(self.account, {tags.JOB: self.job_uid}, self.pause, busy)
        if not lines:
            self._record("ended")
        return lines

    def _record_forgotten(self, visible: Sequence[Instance]) -> None:
        """Note machines that EC2 tells of no more: they ended long ago, by their limit at the latest."""
        known = {one["id"] for one in self.journal.lines("gone")} | {one.id for one in visible}
        for asking in self._requests_in_region():
            own = tags.read_tags(asking["request"]["TagSpecifications"][0])
            ended = min(time.time(), tags.parse_time(own.get(tags.EXPIRES, "")) or time.time())
            for id in [one for one in asking["ids"] if one not in known]:
                self._record("gone", id=id, name="", ended=ended, why="EC2 tells of it no more")


def _instance_records(launched: Sequence[Instance]) -> list[dict[str, Any]]:
    return [{"id": one.id, "name": one.name, "launched": one.launch_time} for one in launched]
