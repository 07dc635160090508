"""Gang launch: rents all machines of a job in one zone and one new placement group, or none.

Each request is recorded in the journal before it is sent, complete and with its own client token. After a crash or a
lost response the same request is sent again and returns the same machines. What to do after an error follows from its
code (infra/aws/error_codes.py). Sources: AWS, "Ensuring idempotency", "Cluster placement groups".
"""

import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from infra.aws import journal_events as events
from infra.aws import tags
from infra.aws.client import Account, list_tagged
from infra.aws.error_codes import (
    ACCOUNT_CODES,
    ErrorKind,
    classify_error,
    explain_error,
    get_error_code,
    quota_increase_command,
)
from infra.aws.journal import Journal, RecordedRequest
from infra.aws.launch_request import Place
from infra.aws.market import quotas
from infra.aws.market.instance_types import InstanceType
from infra.errors import CloudError, Interrupted, MachinesRefused, NoCredentials, NoMachines
from train.tools import host

from . import instances
from .instances import Instance
from .request import EFA_ONLY_DEVICES, InstanceRequest, build_launch_request

logger = logging.getLogger(__name__)

RUN_ATTEMPTS = 6  # how often a request is sent while its outcome is unknown
RUN_RETRY_SECONDS = 180.0  # how long it is sent again
CAPACITY_COOLDOWN_SECONDS = 180.0  # before a place without capacity is tried again (as in Karpenter)
START_TIMEOUT_SECONDS = 900.0
TOKEN_SECONDS = 12 * 3600.0  # for which EC2 certainly knows the token of a request; AWS says a day
FORGET_SECONDS = 3600.0  # for which EC2 goes on showing an instance that has ended, about
FIRST_ROUND_PAUSE_SECONDS = 15.0  # between two rounds over all places; doubles with each round
MAX_ROUND_PAUSE_SECONDS = 120.0
GANG_POLL_SECONDS = 1.0
CLIENT_REASON = "Client."  # begins the reasons of ends that the account caused, as Server. those that EC2 caused
PLACE_RESOURCE_CODES = ("InvalidSubnetID.NotFound", "InvalidPlacementGroup.Unknown")
# Kinds of refusals that a place would repeat in every round.
LASTING_KINDS = (ErrorKind.QUOTA_EXCEEDED, ErrorKind.PLACE_UNSUITABLE)
DEVICE_INDEX = re.compile("device ?index|network ?card", re.IGNORECASE)
RENT_ACTION = "rent machines (ec2:RunInstances)"
BuildInstanceRequest = Callable[[Place], InstanceRequest]


class LaunchRefused(MachinesRefused):
    """EC2 did not launch the machines of a request.

    `error_kind` says what that means for the next request; `launched` are machines that had to be terminated.
    """

    def __init__(self, text: str, code: str, error_kind: ErrorKind, launched: Sequence[Instance] = ()) -> None:
        super().__init__(text, code)
        self.error_kind = error_kind
        self.launched = launched


class Gang:
    """The machines of one job in one region.

    `pause` sleeps, and raises `Interrupted` when the job must stop.
    """

    def __init__(
        self, account: Account, job_uid: str, journal: Journal, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.account = account
        self.job_uid = job_uid
        self.journal = journal
        self.pause = pause

    # --- earlier requests, from the journal --------------------------------------------------------------------------

    def _instances_of(self, token: str) -> list[Instance]:
        return instances.describe(self.account, {tags.LAUNCH: token})

    def open_requests(self) -> list[events.LaunchRequest]:
        """Return this region's requests whose outcome is not recorded."""
        return [recorded.request for recorded in self._requests_in_region() if not recorded.outcome]

    def _requests_in_region(self) -> list[RecordedRequest]:
        region = self.account.region
        return [recorded for recorded in self.journal.launch_requests() if recorded.request.place.region == region]

    def list_instances(self) -> list[Instance]:
        """Return all machines of the job that EC2 shows, and record those that have ended. Raises `CloudError`.

        One that EC2 does not show has ended if it is older than `FORGET_SECONDS`: a younger one may become visible.

        A machine that becomes visible after its request was given up is terminated, because others have replaced it.
        """
        found = instances.describe_all(self.account, {tags.JOB: self.job_uid}, self.journal.alive_ids)
        recorded_ids = self.journal.ended_ids
        for instance in found:
            end_time, reason = instance.end_time, instance.end_reason
            if end_time is not None and instance.id not in recorded_ids:
                self._record(events.InstanceEnded(id=instance.id, name=instance.name, ended=end_time, reason=reason))
        stray_ids = list[str]()
        for recorded in self.journal.launch_requests():
            if isinstance(recorded.outcome, events.RequestRefused):
                own = [instance for instance in found if instance.launch_token == recorded.request.token]
                stray_ids += [instance.id for instance in own if instance.is_billed]
                launched = _launched_machines(own, recorded.request.names)
                by_id = {machine.id: machine for machine in (*launched, *recorded.machines)}
                if len(by_id) > len(recorded.machines):  # the new ones are on the bill
                    self._record(replace(recorded.outcome, machines=tuple(by_id.values())))
        self._record_forgotten(found, host.unix_time() - FORGET_SECONDS)
        if stray_ids:
            logger.info(f"terminating {len(stray_ids)} machines that appeared after their request was given up")
            instances.terminate(self.account, stray_ids)
        return [instance for instance in found if instance.id not in stray_ids]

    def _record(self, event: events.JournalEvent) -> None:
        """Write an event to the journal. A full disk must not prevent termination, so errors are ignored."""
        with contextlib.suppress(OSError):
            self.journal.write(event)

    # --- requests ----------------------------------------------------------------------------------------------------

    def finish_open_requests(self) -> list[Instance]:
        """Send requests that a crash left open again, with the same token. Return the machines that EC2 then grants."""
        granted_instances: list[Instance] = []
        for request in self.open_requests():
            self.pause(0)
            logger.info(f"request {request.number} has no recorded outcome; looking for its machines")
            try:
                granted_instances += self._send_request(request, is_retry=True)
            except LaunchRefused as refusal:
                logger.info(str(refusal))
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

        The places are tried in order, in rounds until `timeout_seconds`. What concerns one place, such as a type
        without an image, never ends the search in the others. Raises `NoMachines` with each place's refusal,
        `LaunchRefused` when the account is refused, `CloudError`, `Interrupted`.
        """
        deadline = host.unix_time() + timeout_seconds  # of a clock that goes on while this computer sleeps
        round_pause = FIRST_ROUND_PAUSE_SECONDS
        refusals = dict[str, str]()
        exhausted_quotas = set[tuple[str, str]]()  # code and region
        unsuitable_places = set[Place]()
        in_one_group = False
        while True:
            is_hopeless = True  # until a place may have the machines later
            late_quotas = set[tuple[str, str]]()  # EC2 may still count machines to them that have ended
            for place in places:
                instance_type = instance_types[place.type]
                label = f"{place.type} {place.market} in {place.zone}"
                quota_code = quotas.get_quota_code(place.type, place.market)
                if (quota_code, place.region) in exhausted_quotas | late_quotas or place in unsuitable_places:
                    continue
                if self._recently_failed(place):
                    refusals.setdefault(label, "had no capacity a moment ago")
                    is_hopeless = False
                    continue
                try:
                    instance_request = _build_for_place(build_request, place)
                    in_one_group = in_one_group or (instance_request.use_placement_group and len(names) > 1)
                    return self.request_instances(place, names, instance_request, instance_type)
                except LaunchRefused as refusal:
                    refusals[label] = str(refusal)
                    if refusal.error_kind is ErrorKind.QUOTA_EXCEEDED:
                        quotas_to_skip = late_quotas if quotas.may_be_released(self.journal) else exhausted_quotas
                        quotas_to_skip.add((quota_code, place.region))
                        vcpus = len(names) * instance_type.vcpus
                        refusals[label] += f"; {quota_increase_command(place.region, quota_code, vcpus)}"
                    logger.info(f"{place.zone}: {refusals[label]}")
                    if refusal.error_kind is ErrorKind.PERMANENT:
                        raise
                    if refusal.error_kind is ErrorKind.PLACE_UNSUITABLE:
                        unsuitable_places.add(place)
                    is_hopeless = is_hopeless and refusal.error_kind in LASTING_KINDS and not late_quotas
            may_go_on = not is_hopeless and host.unix_time() + round_pause <= deadline
            if may_go_on:
                logger.info(f"no place has {len(names)} machines now; trying again in {round_pause:.0f} s")
                self.pause(round_pause)
                round_pause = min(MAX_ROUND_PAUSE_SECONDS, 2 * round_pause)
            if not may_go_on or host.unix_time() > deadline:
                reasons = "; ".join(f"{label}: {text}" for label, text in refusals.items())
                raise NoMachines(
                    f"EC2 cannot provide {len(names)} machines for this job: {reasons}; see: imgnet-cluster offers"
                    + ("; machines that need not be close together: --no-group" if in_one_group else "")
                )

    def _recently_failed(self, place: Place) -> bool:
        """Whether this job's last request at a place failed for lack of capacity, less than the cooldown ago."""
        for recorded in reversed(self.journal.launch_requests()):
            request, outcome = recorded.request, recorded.outcome
            if (request.place.zone, request.place.type, request.place.market) == (place.zone, place.type, place.market):
                is_recent = host.unix_time() - request.time < CAPACITY_COOLDOWN_SECONDS
                return is_recent and isinstance(outcome, events.RequestRefused) and outcome.has_no_capacity
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

        `placement_group` is the group of an earlier request that they join; else they get a new one. When EC2 refuses
        the device index of EFA-only interfaces, it is asked again with the other one. Raises `LaunchRefused`,
        `CloudError`, `Interrupted`.
        """
        number = 1 + max((recorded.request.number for recorded in self.journal.launch_requests()), default=0)
        request = build_launch_request(instance_request, instance_type, place, names, number, placement_group)
        self.pause(0)  # not later: the end of a job waits a minute for the machines of a request that it has recorded
        self.journal.write(request)
        try:
            return self._send_request(request)
        except LaunchRefused as refusal:
            is_about_device = refusal.code.startswith("InvalidParameter") and DEVICE_INDEX.search(str(refusal))
            other = replace(instance_request, efa_only_device=EFA_ONLY_DEVICES[-1])
            is_last = other == instance_request or len(instance_type.interface_cards) == 1
            if is_last or not is_about_device:
                raise
            logger.info(f"{refusal}; asking with the device index {other.efa_only_device}")
        return self.request_instances(place, names, other, instance_type, placement_group)

    def _send_request(self, request: events.LaunchRequest, is_retry: bool = False) -> list[Instance]:
        """Send a recorded request, wait until its machines run, and record the outcome.

        Raises `LaunchRefused`, `CloudError`, `Interrupted`.
        """
        try:
            if request.new_group:
                self._create_placement_group(request.new_group, request.tags)
            ids = self._run_instances(request, is_retry)
            running_instances = self._wait_until_running(request, ids)
        except LaunchRefused as refusal:
            self._remove_placement_group(request.new_group)
            self.journal.write(
                events.RequestRefused(
                    number=request.number,
                    code=refusal.code,
                    message=str(refusal),
                    has_no_capacity=refusal.error_kind is ErrorKind.NO_CAPACITY,
                    machines=_launched_machines(refusal.launched, request.names),
                )
            )
            raise
        machines = _launched_machines(running_instances, request.names)
        self.journal.write(events.RequestGranted(number=request.number, machines=machines))
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
            job_tags = {tags.STACK: tags.STACK_VALUE, tags.JOB: self.job_uid}
            own_groups = list_tagged(self.account, "describe_placement_groups", job_tags)
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
                    logger.info(str(explain_error(error, f"remove placement group {name}")))

    def _run_instances(self, request: events.LaunchRequest, may_have_run: bool) -> list[str]:
        """Send RunInstances until there is a response, and return the machines' IDs.

        `may_have_run`: EC2 may have executed this request before. One that is so old that EC2 may have forgotten its
        token is not sent: EC2 would launch machines again. Raises `LaunchRefused`, `CloudError`.
        """
        if may_have_run and host.unix_time() - request.time > TOKEN_SECONDS:
            return self._recover_by_tag(request, CloudError(f"{RENT_ACTION}: too long ago to be sent again"))
        start = time.monotonic()
        retry_pause = 1.0
        for attempt in range(1, RUN_ATTEMPTS + 1):
            try:
                response = self.account.ec2_no_retry.run_instances(**request.parameters)
                return [description["InstanceId"] for description in response["Instances"]]
            except Exception as error:
                kind = self._classify_run_error(error)
                if get_error_code(error) == "IdempotentParameterMismatch":
                    return self._recover_by_tag(request, explain_error(error, RENT_ACTION))
                if kind not in (ErrorKind.OUTCOME_UNKNOWN, ErrorKind.THROTTLED, ErrorKind.NOT_VISIBLE_YET):
                    raise self._to_refusal(error, kind) from error
                last_error = error
                is_late = time.monotonic() - start > RUN_RETRY_SECONDS
                may_have_run = may_have_run or kind is ErrorKind.OUTCOME_UNKNOWN
                if is_late or attempt == RUN_ATTEMPTS:
                    break
            self.pause(retry_pause)
            retry_pause *= 2
        failure = explain_error(last_error, RENT_ACTION)
        if may_have_run:
            return self._recover_by_tag(request, failure)
        refusal_kind = kind
        if kind is ErrorKind.NOT_VISIBLE_YET:  # the key and the role are the same everywhere, a subnet is of one zone
            is_place = failure.code in PLACE_RESOURCE_CODES
            refusal_kind = ErrorKind.PLACE_UNSUITABLE if is_place else ErrorKind.PERMANENT
        raise LaunchRefused(str(failure), failure.code, refusal_kind)

    @staticmethod
    def _classify_run_error(error: Exception) -> ErrorKind:
        """Return what an error of RunInstances means."""
        code = get_error_code(error)
        if code == "InvalidParameterValue" and "iaminstanceprofile" in str(error).replace(" ", "").lower():
            # EC2 does not know a new role for some seconds, and reports an invalid value.
            return ErrorKind.NOT_VISIBLE_YET
        kind = classify_error(error)
        is_place = kind is ErrorKind.PERMANENT and code and code not in ACCOUNT_CODES
        return ErrorKind.PLACE_UNSUITABLE if is_place else kind

    def _to_refusal(self, error: Exception, error_kind: ErrorKind) -> CloudError:
        """Return an error that has a code as a `LaunchRefused`, any other (no response) as a `CloudError`."""
        failure = explain_error(error, RENT_ACTION)
        if error_kind in (ErrorKind.NO_CAPACITY, *LASTING_KINDS):
            return LaunchRefused(str(failure).removeprefix(f"{RENT_ACTION}: "), failure.code, error_kind)
        return failure if not failure.code else LaunchRefused(str(failure), failure.code, ErrorKind.PERMANENT)

    def _recover_by_tag(self, request: events.LaunchRequest, cause: CloudError) -> list[str]:
        """Look for the machines of a request without response by their tag, for a minute, and return their IDs.

        When only some are found, they are terminated. Raises `LaunchRefused`.
        """
        deadline = time.monotonic() + instances.INSTANCE_VISIBILITY_SECONDS
        count = len(request.names)
        found_instances = list[Instance]()
        while time.monotonic() < deadline and len(found_instances) < count:
            tagged_instances = self._instances_of(request.token)
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

    def _wait_until_running(self, request: events.LaunchRequest, ids: Sequence[str]) -> list[Instance]:
        """Give all machines of a request their names, wait until they run, and return them by name.

        A name is a tag of its own for each machine: it becomes a part of what EC2 says of the machine, and a repeated
        request gives the same names. When one does not run, all are terminated. Raises `LaunchRefused`.
        """
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        count = len(request.names)
        tagged_ids = set[str]()
        while True:
            own_instances = [instance for instance in self._instances_of(request.token) if instance.id in ids]
            tagged_names = {instance.id: instance.name for instance in own_instances}
            found_instances = instances.assign_names(own_instances, request.names)
            ended_instances = [instance for instance in found_instances if not instance.is_billed]
            problem = ""
            if len(ids) != count:
                problem = f"EC2 launched {len(ids)} of {count} machines"
            elif ended_instances:
                first = ended_instances[0]
                problem = f"{first.id} ended before it was running: {first.end_reason or first.state}"
            elif time.monotonic() > deadline:
                problem = f"machines did not start in {START_TIMEOUT_SECONDS:.0f} s"
            if problem:
                instances.terminate(self.account, list(ids))
                # The account's own fault, such as a disk key that EC2 may not use, ends machines in every zone.
                is_ours = any(instance.end_reason.startswith(CLIENT_REASON) for instance in ended_instances)
                kind = ErrorKind.PERMANENT if is_ours else ErrorKind.NO_CAPACITY
                raise LaunchRefused(problem, "", kind, found_instances)
            if len(found_instances) == count:
                unnamed = [instance for instance in found_instances if instance.name != tagged_names[instance.id]]
                if not unnamed and all(instance.state == "running" for instance in found_instances):
                    return found_instances
                if untagged := [instance for instance in unnamed if instance.id not in tagged_ids]:
                    for instance in untagged:
                        instances.set_tags(self.account, [instance.id], {tags.MACHINE: instance.name})
                    tagged_ids |= {instance.id for instance in untagged}
                    continue
            self.pause(GANG_POLL_SECONDS)

    # --- termination -------------------------------------------------------------------------------------------------

    def terminate_job(self, timeout_seconds: float = instances.TERMINATE_TIMEOUT_SECONDS) -> list[str]:
        """Terminate all machines of the job, and remove what they leave behind.

        Returns a line for each resource that stays. Raises `CloudError`.
        """
        self._record(events.TerminationStarted(ids=tuple(self.journal.granted_ids)))
        # The machines of an open request may yet become visible: it may have been sent again until now.
        has_pending_request = any(
            len(self._instances_of(each.token)) < len(each.names) for each in self.open_requests()
        )
        remaining = instances.terminate_and_wait(
            self.account,
            self.job_uid,
            self.journal.alive_ids,
            self.pause,
            timeout_seconds,
            has_pending_request,
            logging.DEBUG,  # the command that ends the job reports what is left
        )
        found_instances = self.list_instances()
        self._record_forgotten(found_instances, host.unix_time())
        for request in self.open_requests():  # machines that it launched all the same are on the bill
            launched = [instance for instance in found_instances if instance.launch_token == request.token]
            machines = _launched_machines(launched, request.names)
            self._record(events.RequestRefused(number=request.number, message="the job ended", machines=machines))
        in_use_seconds = 0.0 if remaining else min(timeout_seconds, instances.LEFTOVER_IN_USE_SECONDS)
        lines = [f"machine {instance.id} in {instance.region}: {instance.state}" for instance in remaining]
        lines += instances.remove_leftovers(self.account, self.job_uid, self.pause, in_use_seconds)
        if not lines:
            self._record(events.TerminationFinished())
        return lines

    def _record_forgotten(self, visible: Sequence[Instance], launched_before: float) -> None:
        """Record the end of machines that were launched before a given time and that EC2 no longer shows.

        They ended long ago. Their time limit is the latest possible end.
        """
        known_ids = self.journal.ended_ids | {instance.id for instance in visible}
        changes = self.journal.events(events.ExpiryChanged)
        changed = {instance_id: event.expires for event in changes for instance_id in event.ids}
        for recorded in self._requests_in_region():
            first_expiry = tags.parse_time(recorded.request.tags.get(tags.EXPIRES, ""))
            for machine in recorded.machines:
                if machine.id not in known_ids and machine.launched < launched_before:
                    end_time = min(host.unix_time(), changed.get(machine.id, first_expiry) or host.unix_time())
                    self._record(events.InstanceEnded(id=machine.id, name="", ended=end_time, reason=events.FORGOTTEN))


def _build_for_place(build_request: BuildInstanceRequest, place: Place) -> InstanceRequest:
    """Return the request for a place. Raises `LaunchRefused` when there is none, as for GPUs without an image."""
    try:
        return build_request(place)
    except (NoCredentials, Interrupted):
        raise
    except CloudError as error:
        if error.code in ACCOUNT_CODES:
            raise
        raise LaunchRefused(str(error), error.code, ErrorKind.PLACE_UNSUITABLE) from error


def _launched_machines(launched: Sequence[Instance], names: Sequence[str]) -> tuple[events.LaunchedMachine, ...]:
    return tuple(
        events.LaunchedMachine(id=instance.id, name=instance.name, launched=instance.launch_time)
        for instance in instances.assign_names(launched, names)
    )
