"""Gang launch: rents all machines of a job in one zone and one new placement group, or none.

Each request is recorded in the journal before it is sent, complete and with its own client token. After a crash or a
lost response the same request is sent again and returns the same machines. What to do after an error follows from its
code (infra/aws/errors.py). Sources: AWS, "Ensuring idempotency", "Cluster placement groups".
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

RUN_ATTEMPTS = 6  # how often a request is sent while its outcome is unknown
RUN_RETRY_SECONDS = 180.0  # how long it is sent again
CAPACITY_COOLDOWN_SECONDS = 180.0  # before a place without capacity is tried again (as in Karpenter)
START_TIMEOUT_SECONDS = 900.0
FIRST_ROUND_PAUSE_SECONDS = 15.0  # between two rounds over all places; doubles with each round
MAX_ROUND_PAUSE_SECONDS = 120.0
GANG_POLL_SECONDS = 2.0
RENT_ACTION = "rent machines (ec2:RunInstances)"
BuildInstanceRequest = Callable[[Place], InstanceRequest]


class LaunchRefused(CloudError):
    """EC2 did not launch the machines of a request.

    `error_kind` says what that means for the next request; `launched` are machines that had to be terminated.
    """

    def __init__(self, text: str, code: str, error_kind: ErrorKind, launched: Sequence[Instance] = ()) -> None:
        super().__init__(text, code)
        self.error_kind = error_kind
        self.launched = launched


class NoMachines(CloudError):
    """No place has the machines, and the time to look for them is over."""


class Gang:
    """The machines of one job in one region.

    `pause` sleeps, and raises `Interrupted` when the job must stop.
    """

    def __init__(
        self,
        account: Account,
        job_uid: str,
        journal: Journal,
        log: Callable[[str], None] = print,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.account = account
        self.job_uid = job_uid
        self.journal = journal
        self.log = log
        self.pause = pause

    # --- earlier requests, from the journal --------------------------------------------------------------------------

    def launch_requests(self) -> list[dict[str, Any]]:
        """Return all recorded requests in order.

        Each has its outcome under "end": "granted", "refused", or "" while it is unknown; its machines' IDs are "ids".
        """
        requests: dict[int, dict[str, Any]] = {}
        for line in self.journal.lines("ask", "granted", "refused"):
            if line["what"] == "ask":
                requests[line["number"]] = {**line, "end": "", "ids": []}
            elif line["number"] in requests:
                ids = [machine["id"] for machine in line.get("machines", [])]
                requests[line["number"]] |= {"end": line["what"], "ids": ids, "capacity": line.get("capacity")}
        return list(requests.values())

    @property
    def granted_ids(self) -> list[str]:
        """The IDs of all machines that were ever granted."""
        return [
            instance_id
            for request in self.launch_requests()
            if request["end"] == "granted"
            for instance_id in request["ids"]
        ]

    @property
    def alive_ids(self) -> list[str]:
        """The IDs of granted machines whose end the journal does not record."""
        gone_ids = {line["id"] for line in self.journal.lines("gone")}
        return [instance_id for instance_id in self.granted_ids if instance_id not in gone_ids]

    @property
    def last_pending_request_time(self) -> float:
        """The time of the last request whose machines may yet become visible; 0 when there is none."""
        pending_times = [
            request["time"]
            for request in self.open_requests()
            if len(self._instances_of(request["request"]["ClientToken"])) < len(request["names"])
        ]
        return max(pending_times, default=0.0)

    def _instances_of(self, token: str) -> list[Instance]:
        return instances.describe(self.account, {tags.LAUNCH: token})

    def open_requests(self) -> list[dict[str, Any]]:
        """Return this region's requests whose outcome is not recorded."""
        return [request for request in self._requests_in_region() if not request["end"]]

    def _requests_in_region(self) -> list[dict[str, Any]]:
        return [request for request in self.launch_requests() if request["place"]["region"] == self.account.region]

    def list_instances(self) -> list[Instance]:
        """Return all machines of the job that EC2 shows, and record those that have ended. Raises `CloudError`.

        A machine that becomes visible after its request was given up is terminated, because others have replaced it.
        """
        found_instances = instances.describe_all(self.account, {tags.JOB: self.job_uid}, self.alive_ids)
        recorded_ids = {line["id"] for line in self.journal.lines("gone")}
        for instance in found_instances:
            if instance.end_time is not None and instance.id not in recorded_ids:
                self._record(
                    "gone", id=instance.id, name=instance.name, ended=instance.end_time, why=instance.end_reason
                )
        refused_tokens = {
            request["request"]["ClientToken"] for request in self.launch_requests() if request["end"] == "refused"
        }
        stray_ids = [
            instance.id
            for instance in found_instances
            if instance.is_billed and instance.launch_token in refused_tokens
        ]
        if stray_ids:
            self.log(f"terminating {len(stray_ids)} machines that appeared after their request was given up")
            instances.terminate(self.account, stray_ids)
        return [instance for instance in found_instances if instance.id not in stray_ids]

    def _record(self, what: str, **fields: Any) -> None:
        """Write an event to the journal. A full disk must not prevent termination, so errors are ignored."""
        with contextlib.suppress(OSError):
            self.journal.write(what, **fields)

    # --- requests ----------------------------------------------------------------------------------------------------

    def finish_open_requests(self) -> list[Instance]:
        """Send requests that a crash left open again, with the same token. Return the machines that EC2 then grants."""
        granted_instances: list[Instance] = []
        for request in self.open_requests():
            self.log(f"request {request['number']} has no recorded outcome; sending it again")
            try:
                granted_instances += self._send_request(request, is_retry=True)
            except LaunchRefused as refusal:
                self.log(str(refusal))
        return granted_instances

    def acquire(
        self,
        places: Sequence[Place],
        names: Sequence[str],
        build_request: BuildInstanceRequest,
        instance_types: dict[str, InstanceType],
        timeout_seconds: float,
    ) -> list[Instance]:
        """Rent all named machines in the first place that has them, and return them.

        The places are tried in order, in rounds until `timeout_seconds`. Raises `NoMachines` with each place's
        refusal, `LaunchRefused`, `CloudError`, `Interrupted`.
        """
        deadline = time.monotonic() + timeout_seconds
        round_pause = FIRST_ROUND_PAUSE_SECONDS
        refusals = dict[str, str]()
        refusal_kinds = dict[str, ErrorKind]()
        exhausted_quotas = set[tuple[str, str]]()  # code and region
        while True:
            for place in places:
                instance_type = instance_types[place.type]
                label = f"{place.type} {place.market} in {place.zone}"
                quota_code = quotas.get_quota_code(instance_type.quota_family, place.market)
                if (quota_code, place.region) in exhausted_quotas:
                    continue
                if self._recently_failed(place):
                    refusals.setdefault(label, "had no capacity a moment ago")
                    refusal_kinds[label] = ErrorKind.NO_CAPACITY
                    continue
                try:
                    return self.request_instances(place, names, build_request(place), instance_type)
                except LaunchRefused as refusal:
                    refusals[label] = str(refusal)
                    refusal_kinds[label] = refusal.error_kind
                    if refusal.error_kind is ErrorKind.QUOTA_EXCEEDED:
                        exhausted_quotas.add((quota_code, place.region))
                        vcpus = len(names) * instance_type.vcpus
                        refusals[label] += f"; {quotas.quota_increase_command(place.region, quota_code, vcpus)}"
                    self.log(f"{place.zone}: {refusals[label]}")
                    if refusal.error_kind is ErrorKind.PERMANENT:
                        raise
            is_hopeless = set(refusal_kinds.values()) <= {ErrorKind.QUOTA_EXCEEDED, ErrorKind.NO_FREE_ADDRESSES}
            if is_hopeless or time.monotonic() + round_pause > deadline:
                reasons = "; ".join(f"{label}: {text}" for label, text in refusals.items())
                raise NoMachines(
                    f"EC2 has no {len(names)} machines for this job: {reasons}; see: imgnet-cluster offers"
                )
            self.log(f"no place has {len(names)} machines now; trying again in {round_pause:.0f} s")
            self.pause(round_pause)
            round_pause = min(MAX_ROUND_PAUSE_SECONDS, 2 * round_pause)

    def _recently_failed(self, place: Place) -> bool:
        """Whether this job's last request at a place failed for lack of capacity, less than the cooldown ago."""
        for request in reversed(self.launch_requests()):
            if all(request["place"][key] == getattr(place, key) for key in ("zone", "type", "market")):
                return bool(request.get("capacity")) and time.time() - request["time"] < CAPACITY_COOLDOWN_SECONDS
        return False

    def request_instances(
        self,
        place: Place,
        names: Sequence[str],
        instance_request: InstanceRequest,
        instance_type: InstanceType,
        placement_group: str = "",
    ) -> list[Instance]:
        """Send one request for the named machines at a place, and return them when all run as requested.

        `placement_group` is the group of an earlier request that they join; else they get a new one.
        Raises `LaunchRefused`, `CloudError`, `Interrupted`.
        """
        number = 1 + max((request["number"] for request in self.launch_requests()), default=0)
        request = build_run_instances(instance_request, instance_type, place, names, number)
        new_group = ""
        if placement_group:
            request["Placement"] = {"GroupName": placement_group}
        elif instance_request.use_placement_group:
            new_group = placement_group_name(self.job_uid, number)
        login = {
            "image": instance_request.image.id,
            "user": instance_request.image.ssh_user,
            "port": instance_request.image.ssh_port,
            "host_key": instance_request.host_key,
        }
        launch_request = {
            "number": number,
            "place": vars(place),
            "names": list(names),
            "request": request,
            "group": new_group,
        }
        self.journal.write("ask", **launch_request, login=login)
        return self._send_request(launch_request)

    def _send_request(self, launch_request: dict[str, Any], is_retry: bool = False) -> list[Instance]:
        """Send a recorded request, wait until its machines run, and record the outcome.

        Raises `LaunchRefused`, `CloudError`, `Interrupted`.
        """
        number = launch_request["number"]
        self.pause(0)
        try:
            if launch_request["group"]:
                own_tags = tags.read_tags(launch_request["request"]["TagSpecifications"][0])
                self._create_placement_group(launch_request["group"], own_tags)
            ids = self._run_instances(launch_request, is_retry)
            running_instances = self._wait_until_running(launch_request, ids)
        except LaunchRefused as refusal:
            self._remove_placement_group(launch_request["group"])
            self.journal.write(
                "refused",
                number=number,
                code=refusal.code,
                said=str(refusal),
                capacity=refusal.error_kind is ErrorKind.NO_CAPACITY,
                machines=_instance_records(refusal.launched),
            )
            raise
        self.journal.write("granted", number=number, machines=_instance_records(running_instances))
        return running_instances

    def _create_placement_group(self, name: str, own_tags: tags.Tags) -> None:
        """Create a cluster placement group, unless the job has it. Raises `CloudError`."""
        specifications = tags.tag_specifications(["placement-group"], {**own_tags, tags.NAME: name})
        try:
            self.account.ec2.create_placement_group(
                GroupName=name, Strategy="cluster", TagSpecifications=specifications
            )
        except Exception as error:
            if classify_error(error) is not ErrorKind.ALREADY_EXISTS:
                raise explain_error(error, "create a placement group (ec2:CreatePlacementGroup)") from error
            own_groups = instances.placement_groups(
                self.account, {tags.STACK: tags.STACK_VALUE, tags.JOB: self.job_uid}
            )
            if name not in [group["GroupName"] for group in own_groups]:
                raise CloudError(
                    f"placement group {name} exists and was not created by imgnet-cluster; remove it, or rename it"
                ) from error

    def _remove_placement_group(self, name: str) -> None:
        """Delete the group of a refused request. A group in use stays until `terminate_job`."""
        if name:
            try:
                self.account.ec2.delete_placement_group(GroupName=name)
            except Exception as error:
                if classify_error(error) not in (ErrorKind.IN_USE, ErrorKind.NOT_VISIBLE_YET):
                    self.log(str(explain_error(error, f"remove placement group {name}")))

    def _run_instances(self, launch_request: dict[str, Any], may_have_run: bool) -> list[str]:
        """Send RunInstances until there is a response, and return the machines' IDs.

        `may_have_run`: EC2 may have executed this request before. Raises `LaunchRefused`, `CloudError`.
        """
        start = time.monotonic()
        retry_pause = 1.0
        for attempt in range(1, RUN_ATTEMPTS + 1):
            try:
                response = self.account.ec2_no_retry.run_instances(**launch_request["request"])
                return [description["InstanceId"] for description in response["Instances"]]
            except Exception as error:
                kind = self._classify_run_error(error)
                if get_error_code(error) == "IdempotentParameterMismatch":
                    return self._recover_by_tag(launch_request, explain_error(error, RENT_ACTION))
                if kind not in (ErrorKind.OUTCOME_UNKNOWN, ErrorKind.THROTTLED, ErrorKind.NOT_VISIBLE_YET):
                    raise self._to_refusal(error, kind) from error
                last_error = error
                is_late = time.monotonic() - start > RUN_RETRY_SECONDS
                may_have_run = may_have_run or kind is ErrorKind.OUTCOME_UNKNOWN
                self.journal.write("unanswered", number=launch_request["number"], **error_to_dict(error))
                if is_late or attempt == RUN_ATTEMPTS:
                    break
            self.pause(retry_pause)
            retry_pause *= 2
        failure = explain_error(last_error, RENT_ACTION)
        if may_have_run:
            return self._recover_by_tag(launch_request, failure)
        refusal_kind = ErrorKind.PERMANENT if kind is ErrorKind.NOT_VISIBLE_YET else kind
        raise LaunchRefused(str(failure), failure.code, refusal_kind)

    @staticmethod
    def _classify_run_error(error: Exception) -> ErrorKind:
        """Return what an error of RunInstances means."""
        code = get_error_code(error)
        if code == "InvalidParameterValue" and "iaminstanceprofile" in str(error).replace(" ", "").lower():
            # EC2 does not know a new role for some seconds, and reports an invalid value.
            return ErrorKind.NOT_VISIBLE_YET
        if code == "Unsupported" and "zone" not in str(error).lower():
            # An architecture or a boot mode that every zone will refuse.
            return ErrorKind.PERMANENT
        return classify_error(error)

    def _to_refusal(self, error: Exception, error_kind: ErrorKind) -> CloudError:
        """Return an error that has a code as a `LaunchRefused`, any other (no response) as a `CloudError`."""
        failure = explain_error(error, RENT_ACTION)
        if error_kind in (
            ErrorKind.NO_CAPACITY,
            ErrorKind.PRICE_TOO_LOW,
            ErrorKind.QUOTA_EXCEEDED,
            ErrorKind.NO_FREE_ADDRESSES,
        ):
            return LaunchRefused(str(failure).removeprefix(f"{RENT_ACTION}: "), failure.code, error_kind)
        return failure if not failure.code else LaunchRefused(str(failure), failure.code, ErrorKind.PERMANENT)

    def _recover_by_tag(self, launch_request: dict[str, Any], cause: CloudError) -> list[str]:
        """Look for the machines of a request without response by their tag, for a minute, and return their IDs.

        When only some are found, they are terminated. Raises `LaunchRefused`.
        """
        deadline = time.monotonic() + instances.INSTANCE_VISIBILITY_SECONDS
        count = len(launch_request["names"])
        found_instances = list[Instance]()
        while time.monotonic() < deadline and len(found_instances) < count:
            tagged_instances = self._instances_of(launch_request["request"]["ClientToken"])
            found_instances = [instance for instance in tagged_instances if instance.is_billed]
            if len(found_instances) < count:
                self.pause(GANG_POLL_SECONDS)
        found_ids = [instance.id for instance in found_instances]
        if len(found_ids) == count:
            return found_ids
        instances.terminate(self.account, found_ids)
        text = f"{cause}; {len(found_ids)} of {count} machines appeared and were terminated"
        raise LaunchRefused(text, cause.code, ErrorKind.OUTCOME_UNKNOWN, found_instances)

    # --- the launched machines ---------------------------------------------------------------------------------------

    def _wait_until_running(self, launch_request: dict[str, Any], ids: Sequence[str]) -> list[Instance]:
        """Wait until all machines of a request run, and return them by name.

        When one of them is not as requested, all are terminated. Raises `LaunchRefused`.
        """
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        count = len(launch_request["names"])
        while True:
            job_instances = instances.describe(self.account, {tags.JOB: self.job_uid}, ids)
            found_instances = [instance for instance in job_instances if instance.id in ids]
            problem = instances.validation_error(
                found_instances, launch_request["request"], launch_request["place"]["zone"]
            )
            if len(ids) != count:
                problem = f"EC2 launched {len(ids)} of {count} machines"
            if not problem and time.monotonic() > deadline:
                problem = f"machines did not start in {START_TIMEOUT_SECONDS:.0f} s"
            if problem:
                instances.terminate(self.account, list(ids))
                raise LaunchRefused(problem, "", ErrorKind.NO_CAPACITY, found_instances)
            if len(found_instances) == len(ids) and all(instance.state == "running" for instance in found_instances):
                return sorted(found_instances, key=lambda instance: int(instance.name))
            self.pause(GANG_POLL_SECONDS)

    # --- termination -------------------------------------------------------------------------------------------------

    def terminate_job(self, timeout_seconds: float = instances.TERMINATE_TIMEOUT_SECONDS) -> list[str]:
        """Terminate all machines of the job, and remove what they leave behind.

        Returns a line for each resource that stays. Raises `CloudError`.
        """
        self._record("end", ids=self.granted_ids)
        remaining = instances.terminate_and_wait(
            self.account,
            self.job_uid,
            self.alive_ids,
            self.log,
            self.pause,
            timeout_seconds,
            self.last_pending_request_time,
        )
        found_instances = self.list_instances()
        self._record_forgotten(found_instances)
        for request in self.open_requests():  # machines that it launched all the same are on the bill
            token = request["request"]["ClientToken"]
            launched = [instance for instance in found_instances if instance.launch_token == token]
            self._record(
                "refused",
                number=request["number"],
                code="",
                said="the job ended",
                capacity=False,
                machines=_instance_records(launched),
            )
        in_use_seconds = 0.0 if remaining else min(timeout_seconds, instances.LEFTOVER_IN_USE_SECONDS)
        lines = [f"machine {instance.id} in {instance.region}: {instance.state}" for instance in remaining]
        lines += instances.remove_leftovers(self.account, {tags.JOB: self.job_uid}, self.pause, in_use_seconds)
        if not lines:
            self._record("ended")
        return lines

    def _record_forgotten(self, visible: Sequence[Instance]) -> None:
        """Record the end of machines that EC2 no longer shows.

        They ended long ago. Their time limit is the latest possible end.
        """
        known_ids = {line["id"] for line in self.journal.lines("gone")} | {instance.id for instance in visible}
        for request in self._requests_in_region():
            own_tags = tags.read_tags(request["request"]["TagSpecifications"][0])
            end_time = min(time.time(), tags.parse_time(own_tags.get(tags.EXPIRES, "")) or time.time())
            for instance_id in request["ids"]:
                if instance_id not in known_ids:
                    self._record("gone", id=instance_id, name="", ended=end_time, why="EC2 no longer shows it")


def _instance_records(launched: Sequence[Instance]) -> list[dict[str, Any]]:
    """Return the journal's records of launched machines."""
    return [{"id": instance.id, "name": instance.name, "launched": instance.launch_time} for instance in launched]
