"""A job on rented machines, as its supervisor sees it: gets them, sets them up, looks after them and their price.

Everything that happens once there are addresses is the fleet's, as for one's own machines. What is added: machines that
boot, that EC2 takes away, that are replaced by others, and that all move elsewhere when too few are left.
"""

import contextlib
import threading
import time
from concurrent.futures import Future
from dataclasses import replace as with_other
from uuid import uuid4

from cluster.connectors.ssh import Unreachable
from cluster.errors import ClusterError, SetupFailed
from cluster.machines.fleet import RESULT, Fleet
from cluster.state import attempts
from cluster.state.run_folder import Folders, stop_reason
from cluster.state.spec import Spec
from infra.aws import tags
from infra.aws.client import my_address
from infra.aws.errors import CloudError, Interrupted, NoCredentials
from infra.aws.instances.gang import NoMachines, Refused
from infra.aws.instances.instances import Instance
from infra.aws.market import billing
from train.tools.filesystem import as_json, read_json, replace

from . import final_checkpoint, ssh_access
from .boot import Boot
from .instances import EndedElsewhere, Rented

LOOK_SECONDS = 10.0  # between two questions to EC2; one call, however many machines
TRIES = 3
TELL_SECONDS = 60.0  # between two complaints that EC2 cannot be asked


class Cloud:
    """The rented machines of one job, in its supervisor."""

    def __init__(self, spec: Spec, folders: Folders) -> None:
        self.spec, self.folders = spec, folders
        self.rented = Rented(spec, folders, self.say, self.stopping)
        self.fleet: Fleet | None = None
        self.present: dict[str, Instance] = {}  # as EC2 said last
        self.looked = self.told = 0.0
        self.looking: Future[dict[str, Instance]] | None = None
        self.renting: dict[str, Future[None]] = {}
        self.refused = ""  # why a lost machine could not be replaced, the last time it was tried
        self.wiring = threading.Lock()
        self.boot = Boot(self.rented, self.stopping)
        self.cost = billing.Meter(self.rented.journal)

    def say(self, text: str) -> None:
        """Keep a line of what AWS did in <run>/cloud.log, and show it in the supervisor's window."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        print(line, flush=True)
        with contextlib.suppress(OSError), (self.folders.run / "cloud.log").open("a") as file:
            file.write(line + "\n")
        self.note(text)

    def note(self, doing: str) -> None:
        """Say what is being done, for `status`."""
        with contextlib.suppress(OSError):
            replace(self.folders.run / "cloud.json", as_json({"doing": doing, "time": time.time()}), durable=False)

    def stopping(self) -> str:
        """Why nothing more is to be rented or waited for: the job is to stop, or is decided; "" while it goes on."""
        decided = attempts.decided(self.folders.shared, self.folders.mark)
        return stop_reason(self.folders.shared) or ("the job is over" if decided else "")

    # --- getting machines --------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do what is to be done now. Returns whether the job is, or may be, at work.

        Raises `SetupFailed` when it cannot start, `ClusterError` when AWS or the disk are in the way for now.
        """
        try:
            if self.fleet is None:
                # Decided, and somebody was killed before it was written down: nothing is rented for it.
                if attempts.decided(self.folders.shared, self.folders.mark):
                    return False
                self._gather()
            self._watch(time.monotonic())
            return self._steer()
        except (Interrupted, NoMachines) as error:
            if isinstance(error, EndedElsewhere):
                self._stop(str(error))
            raise SetupFailed(str(error)) from error
        except CloudError as error:
            if self.fleet is None and self.rented.since is None:
                raise SetupFailed(str(error)) from error
            raise ClusterError(self._told(error)) from error

    def _gather(self) -> None:
        if (why := self.stopping()) and not self.rented.look():  # those that are there are to save first
            raise Interrupted(why)
        limit = self.rented.wish.max_dollars
        if limit is not None and self.rented.since is None and self.rented.spent >= limit:
            raise NoMachines(f"the limit of {limit:g} dollars (--max-price-total) is spent; launch it anew with more")
        self.note("renting machines")
        self.present = self.rented.gather(self._anew)
        self._limit()
        hosts = ssh_access.hosts(self.rented.journal, self.present)
        hosts |= {name: next(iter(hosts.values())) for name in self.spec.names if name not in hosts}  # to be replaced
        known = self.rented.write_hosts(hosts)
        spec = with_other(self.spec, hosts=known.to_json())
        self.fleet = Fleet(spec, self.folders, greet=self._greet, since=self.rented.since)
        self.note("")

    def _anew(self) -> None:
        """Machines that were set up are gone: others take over under another mark, by which all know who is who."""
        board = read_json(self.folders.run / "machines.json") or {}
        if board.get("ready") and board.get("launch") == self.folders.mark:
            mark = uuid4().hex
            self.rented.moves(mark)
            replace(self.folders.launch, mark.encode())

    def _limit(self) -> None:
        """Turn the limit of dollars into one of hours, now that the price is known; the agents keep that."""
        place = self.rented.place
        assert place
        wish = self.rented.wish
        hours, late = self.rented.limits(place)
        if (hours, late) != (self.spec.max_hours, self.spec.late):
            asked = self.rented.max_hours
            shorter = wish.max_dollars is not None and (asked is None or hours < asked)
            what = f"the limit of {wish.max_dollars:g} dollars (--max-price-total)" if shorter else ""
            self.spec = with_other(self.spec, max_hours=hours, late=late, limit=what)
            replace(self.folders.shared / "job.json", as_json(self.spec.to_json()))

    def _greet(self, name: str) -> None:
        assert self.fleet
        self.boot.greet(self.fleet, name, self._look_now)
        self._rewire()

    def _look_now(self) -> dict[str, Instance]:
        """Return what is there, as EC2 said a moment ago; while all is being set up nobody else asks."""
        with self.wiring:
            late = time.monotonic() - self.looked > LOOK_SECONDS
            self.looked = time.monotonic() if late else self.looked
        if late:
            with contextlib.suppress(CloudError):
                self._see(self.rented.look())
        return self.present

    def _rewire(self) -> None:
        """Let the fleet and the job's ssh_config know where the machines are now."""
        with self.wiring:
            assert self.fleet
            hosts = self.fleet.hosts | ssh_access.hosts(self.rented.journal, self.present)
            for name, host in hosts.items():
                if host != self.fleet.hosts[name]:
                    self.fleet.move(name, host)
            self.rented.write_hosts(hosts)

    # --- looking after them ------------------------------------------------------------------------------------------

    def _watch(self, now: float) -> None:
        """Ask EC2 now and then, in the background, which machines there are, and keep to the limit of dollars."""
        assert self.fleet
        if self.looking and self.looking.done():
            looking, self.looking = self.looking, None
            try:
                self._see(looking.result())
            except CloudError as error:
                if now - self.told > TELL_SECONDS:
                    self.told = now
                    self.say(self._told(error))
        if self.looking is None and now - self.looked > LOOK_SECONDS:
            self.looked = now
            self.looking = self.fleet.pool.submit(self.rented.look)
            if not self.stopping() and self.rented.late:  # a machine hangs, and its own power-off with it
                self._stop("its time is over, and not all of its machines have ended")
        limit = self.rented.wish.max_dollars
        if limit is not None and not self.stopping() and self.cost.dollars(time.time()) >= limit:
            self._stop(f"the limit of {limit:g} dollars (--max-price-total) was reached")

    def _stop(self, why: str) -> None:
        replace(self.folders.shared / "stop", as_json({"time": time.time(), "reason": why}))
        self.say(why)

    def _see(self, found: dict[str, Instance]) -> None:
        """Take in what EC2 says is there. Raises `CloudError`."""
        for name in self.present.keys() - found.keys():
            self.say(f"machine {name} ({self.present[name].id}) is gone")
        fresh = {name: self.present[name] for name in self.renting if name in self.present}  # known better
        before, self.present = self.present, self.rented.with_gate({**found, **fresh})
        if any(before.get(name) != one for name, one in self.present.items()):
            self._rewire()

    def _told(self, error: CloudError) -> str:
        """What AWS said; where it does not know us any more, also when the machines end without us."""
        if not isinstance(error, NoCredentials):
            return str(error)
        expires = [one.tags.get(tags.EXPIRES, "") for one in self.present.values()]
        return f"{error}; the machines end by their own limit {f'at {max(expires)}' if expires else 'of --max-hours'}"

    def _steer(self) -> bool:
        assert self.fleet
        fleet = self.fleet
        if not self._set_up() or self._must_move():
            self._move()
            return True
        try:
            fleet.push()
            fleet.bring()
            if not fleet.alive() and not self._awaiting:
                fleet.bring()
                if (self.folders.shared / RESULT).exists():
                    final_checkpoint.bring_network(fleet, self.rented, self.present, self.note)
                return not self.stopping() and self._all_gone()
        except Unreachable as error:
            print(f"{self.spec.name}: {error}", flush=True)
            self._moved(time.monotonic())
        return True

    def _moved(self, now: float) -> None:
        """Say so when ssh is open to an address that this computer has no more."""
        if now - self.told < TELL_SECONDS:
            return
        self.told, open_to = now, self.rented.let_in
        with contextlib.suppress(CloudError):
            if (mine := my_address()) != open_to:
                self.say(
                    f"this computer's address is {mine} now, and ssh is open to {open_to}: imgnet-cluster up --stack"
                )

    def _set_up(self) -> bool:
        """Set all machines up; those that EC2 took away meanwhile are replaced. False when it has no others there.

        Raises `SetupFailed` for machines that are there and cannot be used.
        """
        assert self.fleet
        for _ in range(TRIES):
            try:
                self.fleet.launch()
                return True
            except SetupFailed as error:
                failed = error
                found = self.rented.look()
                gone = [name for name in self.spec.names if name not in found]
                if self.stopping() or not gone:
                    raise
                self.present = found
                if not found:
                    return False
                for name in gone:
                    try:
                        self.present[name] = self.rented.rent(name)
                    except Refused as refused:
                        self.refused = str(refused)
                        return False
                self._rewire()
        raise failed

    def _all_gone(self) -> bool:
        """No agent is at work: whether that is because EC2 takes the machines away, and others are to go on."""
        words = [read_json(self.folders.status(name)) or {} for name in self.spec.names]
        mine = [one for one in words if one.get("launch") == self.folders.mark]
        self.present = self.rented.look()
        if any(one.get("ended") and one.get("state") == "stopped" for one in mine):  # at its limit
            return False
        if not any(one.get("state") == "left" for one in mine) and len(self.present) >= self.spec.min_machines:
            return False
        self._move()
        return True

    @property
    def _awaiting(self) -> bool:
        """Whether a machine is being rented just now. `renting` has those too of which nobody has heard yet."""
        return any(not one.done() for one in self.renting.values())

    def _must_move(self) -> bool:
        """Whether too few machines are left, and no other could be rented beside them."""
        few = len(self.present) < self.spec.min_machines and not self._awaiting
        return few and not self.stopping() and (bool(self.refused) or not self.present)

    def _move(self) -> None:
        """End the machines that are left and rent all of them anew, perhaps elsewhere; training goes on from there."""
        assert self.fleet
        self.say(f"{len(self.present)} machines are left; all move. {self.refused}")
        self.fleet.close()
        self.present, self.fleet, self.refused, self.renting = {}, None, "", {}
        self.rented.release_all()

    def dead(self) -> list[str]:
        """Return the machines that certainly have no agent at work: EC2 says they are gone, or they say so."""
        if self.fleet is None:  # all are gone, and others are rented at the next step
            return []
        for name in [one for one, future in self.renting.items() if future.done()]:
            error = self.renting.pop(name).exception()
            self.refused = str(error) if isinstance(error, Refused) else ""
            if error:
                self.say(f"machine {name} could not be replaced: {error}")
        gone = [name for name in self.spec.names if name not in self.present]
        found = {*self.fleet.dead(), *gone} - self.renting.keys() - self.fleet.starting.keys()
        return sorted(found, key=int)

    def replace(self, name: str) -> None:
        """Start the agent of a machine again, or rent another machine when it is gone, or going."""
        assert self.fleet
        said = read_json(self.folders.status(name)) or {}
        leaving = said.get("ended") and said.get("state") == "left" and said.get("launch") == self.folders.mark
        before = self.present.get(name)
        if before and not leaving:
            self.fleet.replace(name)
        elif name not in self.renting:
            self.renting[name] = self.fleet.pool.submit(self._rent, name, before)

    def _rent(self, name: str, before: Instance | None) -> None:
        assert self.fleet
        if before:  # it is being taken away, or asked to be: the next one has its name
            said = read_json(self.folders.status(name)) or {}
            self.say(f"machine {name} leaves: {said.get('reason')}")
            self.rented.release([before.id], str(said.get("reason")))
        self.say(f"renting another machine {name}")
        self.present[name] = self.rented.rent(name)
        self.say(f"machine {name} is {self.present[name].id} now")
        self._rewire()
        self.fleet.replace(name)
