"""A machine over ssh, on the real sshd of the testbed: what comes through, runs once, is let in, is said."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ssh_machines import Testbed, testbed

from cluster.connectors import ssh as module
from cluster.connectors import ssh_scripts as sh
from cluster.connectors.hosts_file import Host, Hosts, read_hosts
from cluster.connectors.local import CommandFailed, Connector
from cluster.connectors.ssh import SSHConnector, SSHRefused, Unreachable
from cluster.connectors.ssh_config import openssh_argv, write_ssh_config
from cluster.errors import ClusterError

__all__ = ["testbed"]  # the fixture
TELL = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"


def each(machines: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Call a function for all machines at once, on threads. Returns in their order what it returned, or its error."""

    def safe(one: Any) -> Any:
        try:
            return function(one)
        except Exception as error:
            return error

    with ThreadPoolExecutor(max(1, len(machines))) as pool:
        return list(pool.map(safe, machines))


def changes(folder: str, names: Sequence[str], have: Mapping[str, int], limit: int = 1 << 24) -> dict[str, bytes]:
    """What `Remote.changes` must give, on this computer: what is new in the files below the sub-folders `names`.

    A new empty file is there too, with no bytes. At most `limit` bytes in all.
    """
    found = {}
    for name in names:
        for here, _, inner in os.walk(Path(folder) / name):
            for path in (Path(here, one) for one in inner if not one.startswith(".")):
                key = str(path.relative_to(folder))
                with contextlib.suppress(FileNotFoundError):
                    if limit > 0 and path.stat().st_size > have.get(key, -1):
                        with path.open("rb") as file:
                            file.seek(have.get(key, 0))
                            found[key] = file.read(limit)
                        limit -= len(found[key])
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
    return found


@pytest.fixture(scope="module")
def beds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Machines for looking, that no test takes down."""
    with Testbed(tmp_path_factory.mktemp("beds") / "bed", 3) as bed:
        yield bed


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without keys, agent or known hosts, for the one who connects."""
    home = tmp_path / "my home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


def hosts(bed: Testbed, **extra: Any) -> Hosts:
    return read_hosts(bed.write_hosts_toml(bed.folder / f"hosts-{time.monotonic_ns()}.toml", **extra))


def host(bed: Testbed, number: int = 0, **changes: Any) -> Host:
    return replace(hosts(bed).machines[number], **changes)


@pytest.fixture
def machine(beds: Testbed) -> Iterator[SSHConnector]:
    with SSHConnector(host(beds), "machine 0 (here)", reconnect_seconds=5) as one:
        yield one


@pytest.fixture
def own(testbed: Callable[..., Testbed]) -> Iterator[tuple[Any, SSHConnector]]:
    """One machine of this test's own, and the way to it."""
    bed = testbed(1)
    with SSHConnector(host(bed), "machine 0 (own)", reconnect_seconds=20) as one:
        yield bed.machines[0], one


# --- commands -----------------------------------------------------------------------------------------------------

WORDS = [
    "",
    " ",
    "'",
    '"',
    "\\",
    "$HOME",
    "`id`",
    ";",
    "#",
    "&& false",
    "*",
    "~",
    "\n",
    "\n\n",
    "-n",
    "ä",
    "\udcff",
    "a=b",
]


def test_words_arrive_as_they_are(machine: SSHConnector) -> None:
    said = machine.run([sys.executable, "-c", TELL, *WORDS, "end"]).out
    assert said == b"\0".join(map(os.fsencode, [*WORDS, "end"]))
    assert machine.run([sys.executable, "-c", TELL, *WORDS, "end"], env={"A": "'\n#"}, timeout=60).out == said


def test_there_may_be_more_words_than_a_login_shell_takes(machine: SSHConnector) -> None:
    words = [f"{number} " + "x" * 90 for number in range(10_000)]
    assert machine.run([sys.executable, "-c", TELL, *words]).out == b"\0".join(map(str.encode, words))


def test_a_result_has_the_words_the_code_both_outputs_and_the_time(machine: SSHConnector) -> None:
    argv = ["sh", "-c", "printf out; printf err >&2; sleep 0.1; exit 7"]
    result = machine.run(argv, check=False)
    assert (result.argv, result.code, result.out, result.err) == (tuple(argv), 7, b"out", b"err")
    assert 0.1 <= result.seconds < 60


@pytest.mark.parametrize("size", [0, 1, 300_001])
def test_bytes_go_in_and_out_unchanged(machine: SSHConnector, size: int) -> None:
    content = os.urandom(size)
    assert machine.run(["cat"], input=content).out == content


def test_a_hundred_megabytes_come_out_of_both_ends(machine: SSHConnector) -> None:
    half = "head -c 50000000 /dev/zero"
    result = machine.run(["sh", "-c", f"{half} & {half} >&2; wait"])
    assert (len(result.out), len(result.err), result.out.count(0)) == (50_000_000, 50_000_000, 50_000_000)


def test_a_command_runs_in_the_home_of_the_machine_with_the_variables_of_the_call(
    machine: SSHConnector, beds: Testbed
) -> None:
    said = machine.run(["sh", "-c", 'echo "$HOME" "$PWD" "$ONE"'], env={"ONE": "a 'b"}).out
    assert said.decode() == f"{beds.machines[0].home} {beds.machines[0].home} a 'b\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSEGV, signal.SIGPIPE])
def test_a_command_that_a_signal_ended_has_a_negative_code(machine: SSHConnector, number: int) -> None:
    result = machine.run(["sh", "-c", f"ulimit -c 0; kill -{int(number)} $$"], check=False)
    assert (result.code, result.err) == (-number, b"")


def test_a_command_can_be_interrupted_as_at_home(machine: SSHConnector) -> None:
    script = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert machine.run([sys.executable, "-c", script]).out == b"True\n"


@pytest.mark.parametrize("program", ["no-program-of-this-name", "/no/such/file", "/tmp"])
@pytest.mark.parametrize("more", [{}, {"timeout": 9.0}, {"env": {"A": "b"}}])
def test_a_program_that_cannot_be_started_fails_as_in_a_shell(machine: SSHConnector, program: str, more: Any) -> None:
    assert machine.run([program], check=False, **more).code == (126 if program == "/tmp" else 127)
    with pytest.raises(CommandFailed, match=rf"machine 0 \(here\): {program} ended with code 12[67]\n.*{program}"):
        machine.run([program], **more)


def test_the_words_of_a_shell_are_not_run_as_such(machine: SSHConnector) -> None:
    assert machine.run(["exit", "3"], check=False).code == 127


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("script", ["echo begun; exec sleep 4321", "echo begun; sleep 4321 & wait"])
def test_a_command_that_takes_too_long_is_killed_with_what_it_started(
    machine: SSHConnector, beds: Testbed, check: bool, script: str
) -> None:
    with pytest.raises(CommandFailed, match=r"not over in 0\.3 s") as caught:
        machine.run(["sh", "-c", script], timeout=0.3, check=check)
    assert caught.value.result.out == b"begun\n" and caught.value.result.seconds < 30
    wait_for(lambda: not beds.machines[0].processes("sleep"))


def test_what_a_command_leaves_running_does_not_hold_it_up(machine: SSHConnector, beds: Testbed) -> None:
    assert machine.run(["sh", "-c", "sleep 4322 & echo $!"], timeout=20).out
    (pid,) = beds.machines[0].processes("sleep 4322")
    os.kill(pid, signal.SIGKILL)


def test_nothing_of_a_command_is_left_when_it_is_over(machine: SSHConnector, beds: Testbed) -> None:
    machine.run(["cat"], input=b"a")
    folder = beds.machines[0].home / ".imgnet/commands"
    wait_for(lambda: not list(folder.iterdir()) and not beds.machines[0].left())


def test_what_nobody_fetched_in_a_day_is_swept(beds: Testbed) -> None:
    folder = beds.machines[0].home / ".imgnet/commands"
    for name in ("old", "new"):
        (folder / name).mkdir(parents=True)
        (folder / name / "code").write_text("0\n")
    os.utime(folder / "old", (0, 0))
    with SSHConnector(host(beds)) as one:
        one.run(["true"])
        wait_for(lambda: not (folder / "old").exists())
    (folder / "new" / "code").unlink()
    (folder / "new").rmdir()


def test_a_login_shell_that_talks_does_no_harm(own: tuple[Any, SSHConnector]) -> None:
    bed, one = own
    (bed.home / ".bashrc").write_text("echo welcome to the machine; echo oh dear >&2\n")
    result = one.run(["sh", "-c", "echo said"])
    assert (result.out, result.err) == (b"said\n", b"")


def test_threads_share_one_connection(machine: SSHConnector, beds: Testbed) -> None:
    machine.run(["true"])
    before = beds.machines[0].log.count("Accepted publickey")
    said = each(range(20), lambda number: machine.run(["sh", "-c", f"sleep 0.05; echo {number}"]).out)
    assert said == [f"{number}\n".encode() for number in range(20)]
    assert beds.machines[0].log.count("Accepted publickey") == before


def test_more_threads_than_sshd_has_sessions_wait_for_each_other(own: tuple[Any, SSHConnector]) -> None:
    bed, one = own
    bed.configure("MaxSessions 2\n")
    said = each(range(8), lambda number: one.run(["sh", "-c", f"sleep 0.05; echo {number}"]).out)
    assert said == [f"{number}\n".encode() for number in range(8)]
    assert bed.log.count("Accepted publickey") == 1


def test_a_machine_whose_login_runs_no_commands_is_one_line(own: tuple[Any, SSHConnector]) -> None:
    bed, one = own
    bed.configure("ForceCommand echo This account is closed. >&2; exit 1\n")
    with pytest.raises(
        ClusterError, match=r"^machine 0 \(own\): its login shell runs no commands: This account is closed\.$"
    ):
        one.run(["true"])


def test_ctrl_c_ends_the_command_on_the_machine(own: tuple[Any, SSHConnector]) -> None:
    bed, one = own
    thread = threading.Thread(
        target=lambda: (wait_for(lambda: (bed.home / "ran").exists()), os.kill(os.getpid(), signal.SIGINT))
    )
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        one.run(["sh", "-c", "touch ran; sleep 4327 & wait"], timeout=300)
    thread.join()
    wait_for(lambda: not bed.left())
    assert not list((bed.home / ".imgnet/commands").iterdir())


# --- a connection that drops --------------------------------------------------------------------------------------


def test_a_command_runs_once_and_loses_nothing_when_its_connection_is_cut(own: tuple[Any, SSHConnector]) -> None:
    bed, one = own
    script = (
        "echo ran >>ran; head -c 3000000 /dev/zero; while [ ! -e go ]; do sleep 0.01; done; cat; echo end >&2; exit 5"
    )
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(one.run(["sh", "-c", script], check=False, input=b"in")))
    thread.start()
    for _ in range(2):
        wait_for(lambda: (bed.home / "ran").exists() and bed.cut())
        wait_for(lambda: len(bed.sshd_pids()) > 1)
    (bed.home / "go").touch()
    thread.join(60)
    (result,) = found
    assert (bed.home / "ran").read_text() == "ran\n"
    assert (result.code, result.out, result.err) == (5, bytes(3_000_000) + b"in", b"end\n")


def test_a_command_is_there_again_when_ssh_was_down_for_a_while(own: tuple[Any, SSHConnector]) -> None:
    bed, one = own
    found: list[Any] = []
    script = "echo ran >>ran; while [ ! -e go ]; do sleep 0.01; done; echo end"
    thread = threading.Thread(target=lambda: found.append(one.run(["sh", "-c", script])))
    thread.start()
    wait_for(lambda: (bed.home / "ran").exists())
    bed.unplug()
    (bed.home / "go").touch()
    wait_for(lambda: not bed.left())
    bed.plug()
    thread.join(60)
    assert found[0].out == b"end\n" and (bed.home / "ran").read_text() == "ran\n"


def test_input_that_is_cut_off_starts_nothing_and_is_sent_again(own: tuple[Any, SSHConnector]) -> None:
    bed, one = own
    content = os.urandom(20_000_000)
    one.run(["true"])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(one.run(["tee", "-a", "kept"], input=content)))
    thread.start()
    wait_for(lambda: [path for path in (bed.home / ".imgnet/commands").glob(".*") if path.stat().st_size])
    bed.cut()
    thread.join(60)
    assert found[0].out == content == (bed.home / "kept").read_bytes()


def test_a_first_call_that_comes_after_the_second_runs_nothing(tmp_path: Path) -> None:
    def call(again: bool) -> bytes:
        script = sh.run_script("a-task", f"{tmp_path}/f", ["sh", "-c", f"echo ran >>'{tmp_path}/ran'"], is_retry=again)
        return subprocess.run(["sh", "-c", script], input=b"\n", stdout=subprocess.PIPE, timeout=60).stdout

    assert call(again=True) == b"\na-task 0 0 0\n"
    call(again=False)
    assert (tmp_path / "ran").read_text() == "ran\n"


def test_a_command_whose_machine_lost_power_has_been_killed(own: tuple[Any, SSHConnector]) -> None:
    bed, one = own
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(one.run(["sh", "-c", "touch ran; sleep 4323"], check=False)))
    thread.start()
    wait_for(lambda: (bed.home / "ran").exists())
    bed.power_off()
    bed.boot()
    thread.join(60)
    assert found[0].code == -9


def test_a_machine_that_stays_away_is_unreachable_and_the_command_may_still_run(own: tuple[Any, SSHConnector]) -> None:
    bed, one = own
    one.reconnect_seconds = 0.3
    threading.Thread(target=lambda: (wait_for(lambda: (bed.home / "ran").exists()), bed.unplug())).start()
    with pytest.raises(
        Unreachable, match=r"machine 0 \(own\): cannot be reached at 127.1.0.1 port.*; sh may still run there"
    ):
        one.run(["sh", "-c", "touch ran; exec sleep 4324"])
    (pid,) = wait_for(lambda: bed.processes("sleep 4324"))
    os.kill(pid, signal.SIGKILL)


def test_a_frozen_machine_does_not_answer_at_the_deadline(
    own: tuple[Any, SSHConnector], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, one = own
    monkeypatch.setattr(module, "DEADLINE_GRACE_SECONDS", 0.5)
    threading.Thread(target=lambda: (wait_for(lambda: (bed.home / "ran").exists()), bed.freeze())).start()
    with pytest.raises(Unreachable, match=r"does not answer: .* s of silence; is it frozen\?; sh may still run there"):
        one.run(["sh", "-c", "touch ran; exec sleep 4325"], timeout=1)
    bed.thaw()
    wait_for(lambda: not bed.processes("sleep 4325"))  # the machine keeps the deadline by itself


def test_a_frozen_machine_is_noticed_by_its_silence(
    own: tuple[Any, SSHConnector], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.connectors import ssh_connection

    bed, one = own
    monkeypatch.setattr(ssh_connection, "KEEPALIVE_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(ssh_connection, "KEEPALIVE_SECONDS", 0.2)
    one.reconnect_seconds = 0.5
    threading.Thread(target=lambda: (wait_for(lambda: (bed.home / "ran").exists()), bed.freeze())).start()
    with pytest.raises(Unreachable, match="cannot be reached"):
        one.run(["sh", "-c", "touch ran; exec sleep 4326"])
    bed.thaw()
    one.reconnect_seconds = 20.0
    assert one.run(["echo", "back"]).out == b"back\n"
    (pid,) = bed.processes("sleep 4326")
    os.kill(pid, signal.SIGKILL)


def test_files_are_read_and_written_again_when_the_connection_is_cut(
    own: tuple[Any, SSHConnector], tmp_path: Path
) -> None:
    bed, one = own
    content = os.urandom(30_000_000)
    (tmp_path / "a").write_bytes(content)
    stop = threading.Event()

    def cut() -> None:
        for _ in range(3):
            wait_for(lambda: stop.is_set() or len(bed.sshd_pids()) > 1)
            stop.wait(0.1)
            bed.cut()

    thread = threading.Thread(target=cut)
    thread.start()
    one.put(tmp_path / "a", "~/b")
    one.get("~/b", tmp_path / "c")
    stop.set()
    thread.join()
    assert (tmp_path / "c").read_bytes() == content
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"a", "c"}


# --- files --------------------------------------------------------------------------------------------------------


def test_files_are_put_got_and_written_whole(machine: SSHConnector, beds: Testbed, tmp_path: Path) -> None:
    content, home = os.urandom(100_000), beds.machines[0].home
    machine.write("~/new/fol der/a", content)
    machine.get("~/new/fol der/a", tmp_path / "b")
    machine.put(tmp_path / "b", f"{home}/other 'folder'/c")
    assert (home / "other 'folder'/c").read_bytes() == content
    machine.write("~/new/fol der/a", b"")
    assert (home / "new/fol der/a").read_bytes() == b""
    assert [path.name for path in (home / "new/fol der").iterdir()] == ["a"]


def test_a_file_that_cannot_be_written_or_got_is_one_line(machine: SSHConnector, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"^machine 0 \(here\): /proc/a/b: mkdir: .*$"):
        machine.write("/proc/a/b", b"a")
    with pytest.raises(ClusterError, match=r"^machine 0 \(here\): /tmp: is a folder$"):
        machine.write("/tmp", b"a" * 5_000_000)
    with pytest.raises(ClusterError, match=r"^machine 0 \(here\): ~/nothing: .*No such file or directory$"):
        machine.get("~/nothing", tmp_path / "a")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


@pytest.mark.parametrize(
    "offset, limit, expected", [(0, 100, b"0123456789"), (3, 4, b"3456"), (9, 9, b"9"), (10, 1, b""), (99, 1, b"")]
)
def test_a_file_is_read_from_an_offset(machine: SSHConnector, offset: int, limit: int, expected: bytes) -> None:
    machine.write("~/read", b"0123456789")
    assert machine.read_from("~/read", offset, limit) == expected
    assert machine.read_from("~/not there", offset, limit) == b""


def make(folder: Path) -> None:
    for name in ("a", "logs/b c", "logs/deep/ä", ".hid/seen", "logs/.hidden", "events/new\nline"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "to nowhere").symlink_to("nothing")
    (folder / "to a").symlink_to("a")
    (folder / "to logs").symlink_to("logs")


def test_files_are_listed_as_here(machine: SSHConnector, tmp_path: Path) -> None:
    make(tmp_path / "f")
    assert machine.list_files(str(tmp_path / "f")) == Connector().list_files(str(tmp_path / "f"))
    assert machine.list_files(str(tmp_path / "none")) == {}


@pytest.mark.parametrize("far", [True, False])
def test_what_is_new_in_a_folder_comes_at_once(machine: SSHConnector, tmp_path: Path, far: bool) -> None:
    folder = tmp_path / "f"

    def new(have: dict[str, int]) -> dict[str, bytes]:
        names = ["logs", "events", "none"]
        return machine.read_new_bytes(str(folder), names, have) if far else changes(str(folder), names, have)

    assert new({}) == {}
    for name, text in {
        "logs/a": "1234",
        "logs/b 'c": "xy\n",
        "events/d/e": "",
        "other/f": "no",
        "logs/.g": "no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert new({}) == {"logs/a": b"1234", "logs/b 'c": b"xy\n", "events/d/e": b""}
    have = {"logs/a": 4, "logs/b 'c": 1, "events/d/e": 0}
    assert new(have) == {"logs/b 'c": b"y\n"}
    every = bytes(range(256)) * 100
    (folder / "logs/a").write_bytes(b"1234" + every)
    assert new({**have, "logs/b 'c": 3}) == {"logs/a": every}


@pytest.mark.parametrize("far", [True, False])
def test_what_is_new_is_bounded_and_the_rest_comes_next(
    machine: SSHConnector, tmp_path: Path, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NEW_BYTES_LIMIT", 1000)
    (tmp_path / "f/logs").mkdir(parents=True)
    content = {f"logs/{name}": os.urandom(700) for name in "abc"}
    got: dict[str, bytes] = {}
    for name, text in content.items():
        (tmp_path / "f" / name).write_bytes(text)
    calls = 0
    while got != content:
        have, calls = {name: len(text) for name, text in got.items()}, calls + 1
        folder = str(tmp_path / "f")
        new = machine.read_new_bytes(folder, ["logs"], have) if far else changes(folder, ["logs"], have, 1000)
        assert 0 < sum(map(len, new.values())) <= 1000
        got |= {name: got.get(name, b"") + text for name, text in new.items()}
    assert calls == 3


# --- who is let in ------------------------------------------------------------------------------------------------


def no(host: Host, kind: type[ClusterError] = SSHRefused, patience: float = 0.2) -> str:
    """The one line with which a machine is not reached."""
    with SSHConnector(host, "machine 2 (gpu3)", patience) as one, pytest.raises(ClusterError) as caught:
        one.run(["true"])
    line = str(caught.value)
    assert type(caught.value) is kind and "\n" not in line and line.startswith(("machine 2 (gpu3): ", "the jump host"))
    return line


def yes(host: Host) -> bool:
    with SSHConnector(host, reconnect_seconds=5) as one:
        return one.run(["echo", "in"]).out == b"in\n"


def test_a_host_key_that_is_not_known_is_refused_with_what_to_do(beds: Testbed, home: Path) -> None:
    one = beds.machines[0]
    line = no(host(beds, host_key=None))
    assert "its host key is not known: it offers SHA256:" in line
    assert f"ssh-keyscan -p {one.port} {one.address} >> {home}/.ssh/known_hosts" in line
    assert f'host_key = "{one.host_key}"' in line


@pytest.mark.parametrize("hashed", [False, True])
def test_a_host_key_of_known_hosts_is_believed(beds: Testbed, home: Path, hashed: bool) -> None:
    path = beds.known_hosts(home / ".ssh/known_hosts")
    if hashed:
        subprocess.run(["ssh-keygen", "-H", "-f", str(path)], check=True, capture_output=True)
        assert "127" not in path.read_text().replace(beds.machines[0].host_key, "").split("|1|")[0]
    assert yes(host(beds, host_key=None))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_host_key_that_has_changed_is_refused_with_what_to_do(beds: Testbed, home: Path, pinned: bool) -> None:
    one, other = beds.machines[:2]
    (home / ".ssh/known_hosts").write_text(f"[{one.address}]:{one.port} {other.host_key}\n")
    line = no(host(beds, host_key=other.host_key if pinned else None))
    assert "its host key has CHANGED: it offers SHA256:" in line
    mend = f'host_key = "{one.host_key}"' if pinned else f"ssh-keygen -f {home}/.ssh/known_hosts -R '[{one.address}]:"
    assert mend in line and ("hosts.toml has" if pinned else "known_hosts line 1 has") in line


def test_a_host_key_that_is_revoked_is_refused(beds: Testbed, home: Path) -> None:
    path = beds.known_hosts(home / ".ssh/known_hosts")
    path.write_text(path.read_text() + f"@revoked * {beds.machines[0].host_key}\n")
    assert "is marked as revoked" in no(host(beds, host_key=None))


def test_a_key_that_is_not_let_in_is_refused_with_what_to_do(beds: Testbed) -> None:
    stranger = beds.folder / "stranger"
    if not stranger.exists():
        beds.new_key("stranger")
    line = no(host(beds, key=str(stranger)))
    assert f"does not let root in with {stranger}; try: ssh-copy-id -p " in line.replace(Path.home().name, "root")


def test_a_key_that_is_not_there_is_refused(beds: Testbed) -> None:
    assert "the key /no/key does not exist; make it: ssh-keygen -f /no/key" in no(host(beds, key="/no/key"))


def test_without_any_key_it_says_so(beds: Testbed) -> None:
    assert "there is no key to log in with" in no(host(beds, key=None))


def test_a_key_with_a_passphrase_wants_an_agent(beds: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    key = beds.new_key("locked", "secret")
    beds.authorize(key)
    assert f"the key {key} has a passphrase; give it to ssh-agent: ssh-add {key}" in no(host(beds, key=str(key)))
    said = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    values = dict(line.split(";")[0].split("=") for line in said.splitlines() if "=" in line)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", values["SSH_AUTH_SOCK"])
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "secret", "-N", "", "-f", str(key)], check=True)
        subprocess.run(["ssh-add", "-q", str(key)], check=True, capture_output=True)
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(key)], check=True)
        assert yes(host(beds, key=str(key)))
    finally:
        os.kill(int(values["SSH_AGENT_PID"]), signal.SIGTERM)


def test_default_keys_and_the_words_of_the_users_ssh_config_are_used(beds: Testbed, home: Path) -> None:
    one = beds.machines[0]
    config = f"Host gpu\n HostName {one.address}\n Port {one.port}\n User root\n UserKnownHostsFile ~/.ssh/mine\n"
    (home / ".ssh/config").write_text(config)
    beds.known_hosts(home / ".ssh/mine")
    (home / ".ssh/id_ed25519").write_bytes(beds.key.read_bytes())
    (home / ".ssh/id_ed25519").chmod(0o600)
    assert yes(Host(host="gpu"))
    assert "refused" in no(Host(host="gpu", port=1), Unreachable)  # hosts.toml wins


RELAY = """\
import os, socket, sys, threading

def pour(read, write):
    while data := read():
        write(data)
    os._exit(0)

one = socket.create_connection((sys.argv[1], int(sys.argv[2])))
threading.Thread(target=pour, args=(lambda: os.read(0, 65536), one.sendall)).start()
pour(lambda: one.recv(65536), lambda data: os.write(1, data))
"""


@pytest.mark.parametrize("how", ["hosts.toml", "ProxyJump", "ProxyCommand", "two"])
def test_a_machine_is_reached_by_way_of_another(beds: Testbed, home: Path, how: str) -> None:
    target, *gates = (beds.machines[number] for number in (0, 1, 2))
    beds.known_hosts(home / ".ssh/known_hosts")
    text = "".join(
        f"Host gate{number}\n HostName {one.address}\n Port {one.port}\n User root\n IdentityFile {beds.key}\n"
        for number, one in enumerate(gates)
    )
    (home / "relay.py").write_text(RELAY)
    relay = f"{sys.executable} '{home}/relay.py' %h %p"
    ways = {"ProxyJump": "ProxyJump gate0", "ProxyCommand": f"ProxyCommand {relay}"}
    (home / ".ssh/config").write_text(f"{text}Host {target.address}\n {ways.get(how, '')}\n")
    jump = {"hosts.toml": f"root@{gates[0].address}:{gates[0].port}", "two": "gate0,gate1"}.get(how)
    before = [one.log.count("Accepted") for one in gates]
    assert yes(host(beds, jump=jump))
    passed = [one.log.count("Accepted") - count for one, count in zip(gates, before, strict=True)]
    assert passed == {"two": [1, 1], "ProxyCommand": [0, 0]}.get(how, [1, 0])


def test_the_host_key_of_a_jump_host_is_checked_too(beds: Testbed, home: Path) -> None:
    gate = beds.machines[1]
    line = no(host(beds, jump=f"root@{gate.address}:{gate.port}"))
    assert line.startswith(f"the jump host {gate.address} of machine 2 (gpu3): its host key is not known")


@pytest.mark.parametrize("what", ["closed", "silent", "not ssh", "no name"])
def test_what_cannot_be_reached_is_unreachable_and_not_refused(
    beds: Testbed, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.1.0.9", 0)) as one:
        port = one.getsockname()[1]
        if what == "closed":
            one.close()
        if what == "not ssh":
            threading.Thread(target=lambda: one.accept()[0].sendall(b"HTTP/1.1 400\r\n" * 200)).start()
        name = "no-such-host.invalid" if what == "no name" else "127.1.0.9"
        line = no(host(beds, host=name, port=port), Unreachable)
    assert f"cannot be reached at {name} port {port}: " in line


# --- all at once, and a person's terminal -------------------------------------------------------------------------


def test_sixteen_machines_answer_at_once(testbed: Callable[..., Testbed]) -> None:
    bed = testbed(16)
    bed.machines[5].power_off()
    remotes = [SSHConnector(one, f"machine {rank}", 1) for rank, one in enumerate(hosts(bed).machines)]
    said = each(remotes, lambda one: one.run(["sh", "-c", "echo $HOME"]).out.decode().strip())
    assert isinstance(said.pop(5), Unreachable)
    assert said == [str(one.home) for one in bed.machines if one.number != 5]
    each(remotes, lambda one: one.close())


@pytest.mark.parametrize("jump", [False, True])
def test_openssh_goes_the_same_way_by_the_jobs_own_configuration(beds: Testbed, home: Path, jump: bool) -> None:
    gate = beds.machines[2]
    beds.known_hosts(home / ".ssh/known_hosts")
    more = {"jump": f"root@{gate.address}:{gate.port}"} if jump else {}
    config = home / "run folder" / "ssh_config"
    write_ssh_config(hosts(beds, **more), config)
    before = gate.log.count("Accepted")
    for rank in (0, 1):
        words = openssh_argv(config, rank, ["sh", "-c", 'echo "$HOME" "$1"', "x", "a 'b"], tty=False)
        ran = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
        assert ran.stdout == f"{beds.machines[rank].home} a 'b\n", ran
    assert gate.log.count("Accepted") - before == (2 if jump else 0)
    assert openssh_argv(config, 2) == ["ssh", "-F", str(config), "-t", "machine-2"]
