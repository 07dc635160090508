"""Facts and findings of a machine, really probed, with fakes for GPUs and mounts; the record of its set-up."""

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.known import known
from support.waiting import wait_for

from cluster.connectors.local import visible_gpus
from cluster.errors import SetupFailed
from cluster.machines import checks, probe
from cluster.machines.checks import MachineFacts, SharedFolder, WorkFolder
from cluster.machines.setup_progress import SetupProgress, fold_by_machine, timed_step
from cluster.state.states import SetupStep
from cluster.state.supervisor_records import MachineSetup, SetupRecord
from train.tools import host
from train.tools.records import decode_json, read_record

AnswerT = TypeVar("AnswerT")
GPU = "NVIDIA A100-SXM4-40GB, GPU-{n}"
ONE_GPU = f"echo '{GPU.format(n=0)}'"
WORK_FOLDER = WorkFolder(path="/mnt/fast", writable=True, free_gb=100.0)
SHARED_FOLDER = SharedFolder(path="/s/job", type="ext4", options="rw", source="/dev/x", point="/", link=True)
FACTS = MachineFacts(
    time=0.0, tmux="3.4", gpus=(), nvidia="missing", shm_bytes=8 << 30, work=WORK_FOLDER, shared=SHARED_FOLDER
)
MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /srv rw shared:5 - autofs systemd-1 rw,fd=34
31 30 0:41 / /srv/nfs rw,noatime shared:6 - nfs4 server:/export rw,vers=4.1,hard,lookupcache=pos,acregmax=1,acdirmax=1
32 22 0:42 / /srv/nfs2 rw - nfs4 10.0.0.9:/two rw,vers=4.2,hard
33 22 0:43 / /with\\040space ro - fuse.sshfs me@host:/x rw
34 22 0:44 / /over rw - tmpfs tmpfs rw
35 22 0:45 / /over rw - xfs /dev/sdb1 rw
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of a program nvidia-smi on PATH, without the program."""
    monkeypatch.setenv("PATH", f"{tmp_path}/fakes:/usr/bin:/bin")
    (tmp_path / "fakes").mkdir()
    return tmp_path / "fakes/nvidia-smi"


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run_probe(answer_type: type[AnswerT], *arguments: object) -> AnswerT:
    """Run the probe as it is run on a machine, where no packages may be installed yet (-S)."""
    argv = [sys.executable, "-S", "-m", "cluster.machines.probe", *map(str, arguments)]
    root = Path(__file__).resolve().parents[3]
    completed = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0 and not completed.stderr, completed
    return decode_json(answer_type, completed.stdout.encode())


def findings_text(findings: list[checks.Finding]) -> str:
    assert all("\n" not in finding.what and finding.level in ("error", "warning") for finding in findings)
    return "; ".join(f"{finding.level}: {finding.what}" for finding in findings)


def problems_text(procs: int = 0, want_gb: float = 0, **changes: Any) -> str:
    return findings_text(checks.find_problems(replace(FACTS, **changes), procs, want_gb))


def test_machines_see_each_other_in_a_common_folder(tmp_path: Path) -> None:
    names, where = ["a", "b"], ["--shared", tmp_path, "--work", tmp_path / "not/yet", "--token", "t1"]
    before = time.time()
    for name in names:
        facts = run_probe(MachineFacts, *where, "--machine", name)
        assert before <= facts.time <= time.time() and 0.1 < facts.memory_gb < 1e5 and facts.work.free_gb > 0
        assert facts.tmux and facts.tmux[0].isdigit() and facts.shared.link and facts.shared.fsync_ms is not None
        findings = checks.find_problems(replace(facts, other_jobs=()), 0, 0.001)  # other tests may run jobs here
        assert not [finding for finding in findings if "/dev/shm" not in finding.what]
    answers = {name: run_probe(dict[str, bool], *where, "--machine", name, "--expect", "a,b") for name in names}
    assert answers["b"] == {"a": True, "b": True}
    assert checks.pairs_without_common_folder(answers) == []


def test_pairs_without_common_folder_finds_separate_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MARKER_TIMEOUT_SECONDS", 0.2)
    folders = {"a": tmp_path / "one", "b": tmp_path / "one", "c": tmp_path / "other"}
    for name, folder in folders.items():
        folder.mkdir(exist_ok=True)
        probe.folder_facts(folder, folder / "probe" / f"t-{name}")
    marker_names = {machine: f"t-{machine}" for machine in folders}
    answers = {name: probe.find_markers(folder / "probe", marker_names) for name, folder in folders.items()}
    assert checks.pairs_without_common_folder(answers) == [("a", "c"), ("b", "c")]
    answers["a"] = {}
    assert checks.pairs_without_common_folder(answers) == [("a", "b"), ("a", "c"), ("b", "c")]


@pytest.mark.parametrize(("path", "kind", "network"), [
    ("/home/x", "ext4", False),
    ("/srv/other", "autofs", False),
    ("/srv/nfs/deep/er", "nfs4", True),
    ("/srv/nfs2", "nfs4", True),
    ("/with space/x", "fuse.sshfs", True),
    ("/over/x", "xfs", False),
])  # fmt: skip
def test_mount_of_returns_deepest_and_last_mount(path: str, kind: str, network: bool) -> None:
    mount = host.mount_of(Path(path), MOUNTS)
    assert (mount.type, mount.network) == (kind, network)


@pytest.mark.parametrize(("options", "good"), [
    ("rw,vers=4.1,hard", False),
    ("rw,lookupcache=pos,acregmin=1,acregmax=1,acdirmin=1,acdirmax=1", True),
    ("rw,lookupcache=pos,acregmax=1,acdirmax=30", False),
    ("rw,lookupcache=pos", False),
    ("rw,lookupcache=none,acregmax=0,acdirmax=1", True),
    ("rw,lookupcache=all,actimeo=0", False),
    ("rw,lookupcache=pos,actimeo=1", True),
    ("rw,acregmax=1,acdirmax=1", False),
    ("rw,noac", True),
])  # fmt: skip
def test_find_problems_stale_nfs_mount_prints_mount_command(options: str, good: bool) -> None:
    shared = replace(SHARED_FOLDER, type="nfs4", options=options, source="srv:/e", point="/s")
    text = problems_text(shared=shared)
    assert (text == "") is good
    if not good:
        assert text.startswith("warning: /s/job: NFS shows") and text.endswith("acdirmax=1 srv:/e /s")
        assert "lookupcache=positive,acregmin=1" in text and ("vers=4.1," in text) is ("vers=4.1" in options)


@pytest.mark.parametrize(("make", "message"), [
    pytest.param(lambda folder: None, "does not exist on this machine", id="missing"),
    pytest.param(lambda folder: folder.touch(), "is not a folder", id="file"),
    pytest.param(lambda folder: (folder.mkdir(), (folder / "probe").touch()), "probe", id="probe is a file"),
    pytest.param(None, "no answer in 0.2 s", id="hangs"),
])  # fmt: skip
def test_find_problems_unusable_shared_folder_is_one_error(
    tmp_path: Path, make: Callable[[Path], object] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shared"
    if make:
        make(folder)
    else:
        monkeypatch.setattr(probe, "folder_facts", lambda *_: signal.pause())
        monkeypatch.setattr(probe, "FOLDER_TIMEOUT_SECONDS", 0.2)
    text = findings_text(checks.find_problems(probe.gather_facts(folder, tmp_path, folder / "probe/t-a"), 0, 0))
    assert text.startswith(f"error: {folder}") and message in text


def test_folder_facts_detects_missing_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    (tmp_path / "x").write_text("")
    assert probe.can_hard_link(tmp_path / "x", tmp_path / "y")
    monkeypatch.setattr(os, "link", refuse)
    facts = probe.folder_facts(tmp_path, tmp_path / "probe/t-a")
    assert not facts.link and [path.name for path in (tmp_path / "probe").iterdir()] == ["t-a"]
    assert "no hard links on" in problems_text(shared=facts)


@pytest.mark.parametrize(("text", "is_broken", "problem"), [
    pytest.param(f"{ONE_GPU}; echo 'Unable to determine the device handle'; exit 15", True,
                 "1 of 2 GPUs visible (nvidia-smi: Unable to determine the device handle); look", id="one lost"),
    pytest.param("echo 'No devices were found'; exit 6", True, "no GPU (nvidia-smi: No devices", id="all lost"),
    pytest.param("echo \"NVIDIA-SMI couldn't communicate with the driver.\"; exit 9", False,
                 "no GPU (nvidia-smi: NVIDIA-SMI couldn't communicate", id="no driver"),
    pytest.param(f"{ONE_GPU}; {ONE_GPU.replace('GPU-0', 'GPU-1')}", False, "", id="all there"),
    pytest.param("", False, "no GPU; install", id="nothing said"),
    pytest.param(None, False, "no GPU: nvidia-smi is missing; install the NVIDIA driver", id="no nvidia-smi"),
])  # fmt: skip
def test_lost_gpus_are_reported_and_tell_a_broken_machine_from_a_missing_driver(
    nvidia_smi: Path, text: str | None, is_broken: bool, problem: str
) -> None:
    if text is not None:
        write_program(nvidia_smi, text)
    gpus, complaint = probe.query_gpus()
    assert checks.is_broken(replace(FACTS, gpus=gpus, nvidia=complaint), 2) is is_broken
    assert problems_text(procs=0, gpus=gpus, nvidia=complaint) == ""
    found = problems_text(procs=2, gpus=gpus, nvidia=complaint)
    assert found.startswith(f"error: {problem}") if problem else found == ""


def test_query_gpus_kills_hanging_nvidia_smi(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "NVIDIA_SMI_TIMEOUT_SECONDS", 0.3)
    lock, began = nvidia_smi.with_name("lock"), nvidia_smi.with_name("began")
    write_program(nvidia_smi, f"flock {lock} sh -c 'touch {began}; exec sleep 600' & wait")
    while not began.exists():  # a busy computer may take longer to start the child, which holds the lock
        assert probe.query_gpus() == ((), "hangs")
    wait_for(lambda: subprocess.call(["flock", "-n", str(lock), "true"]) == 0)
    assert "no GPU: nvidia-smi does not answer; reboot" in problems_text(procs=8, nvidia="hangs")


@pytest.mark.parametrize(("variable", "names"), [
    ("", ()), ("-1", ()), ("0", ("0",)), ("0,1, 2", ("0", "1", "2")), ("GPU-1,GPU-2", ("GPU-1", "GPU-2")),
])  # fmt: skip
def test_visible_gpus_reads_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, variable: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == names


@pytest.mark.parametrize(("changes", "message"), [
    ({"tmux": None}, "error: tmux is missing; install it"),
    ({"shm_bytes": 64 << 20}, "warning: /dev/shm has only 67 MB, and loader workers"),
    ({"work": replace(WORK_FOLDER, writable=False)}, "error: /mnt/fast: cannot be written"),
    ({"work": replace(WORK_FOLDER, free_gb=9.5)}, "error: /mnt/fast: 9.5 GB free, 10 GB are needed"),
])  # fmt: skip
def test_find_problems_each_fault_is_one_line(changes: dict[str, Any], message: str) -> None:
    assert problems_text(want_gb=10, **changes).startswith(message)


def test_check_clock_warns_only_beyond_uncertainty() -> None:
    assert checks.clock_skew(100.0, 104.0, 102.5) == (0.5, 2.0)
    assert checks.check_clock(*checks.clock_skew(100.0, 104.0, 102.0)) == []
    assert checks.check_clock(31.0, 2.0) == []
    assert "its clock is 3600 s behind that of this computer" in findings_text(checks.check_clock(-3600.0, 0.1))
    assert "its clock is 40 s ahead of that of this computer" in findings_text(checks.check_clock(40.0, 2.0))


def test_find_other_jobs_names_each_job_once(tmp_path: Path) -> None:
    def write_process(pid: int, *words: str) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "cmdline").write_text("\0".join(words) + "\0")

    agent = ("python", "-m", "cluster.agent")
    write_process(1, "init")
    write_process(2, "sh", "-c", "$@", "log", *agent, "/shared/job-1-00000001", "/work", "0")
    write_process(3, *agent, "/shared/job-1-00000001", "/work", "0")
    write_process(4, *agent, "/shared/job-2-00000002", "/work", "0")
    write_process(5, *agent, "/home/me/runs/job-3/machine/shared", "/work", "0")
    write_process(6, "grep", "cluster.agent")
    (tmp_path / "7").mkdir()
    jobs = {job.uid: job for job in probe.find_other_jobs("job-2-00000002", tmp_path)}
    assert jobs.keys() == {"job-1-00000001", local := "/home/me/runs/job-3"}
    assert jobs[local].user == pwd.getpwuid(os.geteuid()).pw_name
    facts = replace(FACTS, other_jobs=tuple(jobs.values()))
    (warning,) = (finding for finding in checks.find_problems(facts, 0, 1.0) if "job-1" in finding.what)
    assert warning.level == "warning" and ": /home/me/runs/job-3, job-1-00000001; jobs on one" in warning.what


@pytest.fixture
def progress(tmp_path: Path) -> SetupProgress:
    progress = SetupProgress(tmp_path / "machines.json")
    progress.start_launch("first", {"0": "gpu1", "1": "gpu2"})
    return progress


def test_line_about_many_machines_names_some_of_them() -> None:
    hosts = {str(number): "gpu" for number in range(20)}
    lines = fold_by_machine([(name, "x") for name in hosts], hosts)
    assert lines == ["machines 0, 1, 2, 3, 4, 5, 6, 7 and 12 more: x"]


def test_setup_progress_concurrent_changes_are_all_kept(tmp_path: Path) -> None:
    progress = SetupProgress(tmp_path / "machines.json")
    names = [str(number) for number in range(16)]
    progress.start_launch("first", dict.fromkeys(names, "gpu"))

    def set_up(name: str) -> None:
        for _ in range(30):
            progress.set_step(name, SetupStep.CHECKS, 1.0)
            progress.add_note(name, str(len(progress.rows[name].notes)))
        progress.update(name, reason=f"reason {name}")

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(set_up, names))
    assert known(read_record(progress.path, SetupRecord)).machines == progress.rows
    notes = tuple(str(number) for number in range(30))
    assert {name: (row.seconds, row.notes, row.reason) for name, row in progress.rows.items()} == {
        name: ({SetupStep.CHECKS: 30}, notes, f"reason {name}") for name in names
    }


def test_start_launch_keeps_which_machines_the_job_has_reached(progress: SetupProgress) -> None:
    progress.update("1", was_reached=True, reason="no GPU")
    progress.start_launch("second", {"0": "gpu1", "1": "gpu2"})
    assert progress.rows == {"0": MachineSetup(host="gpu1"), "1": MachineSetup(host="gpu2", was_reached=True)}
    assert not progress.rows["0"].restarted, "no agent had run there"
    progress.mark_ready()
    for launch in ("resumed", "resumed", "resumed again"):  # and a supervisor was killed meanwhile
        progress.start_launch(launch, {"0": "gpu1", "1": "gpu2"})
        assert progress.rows["0"].restarted > 0
    progress.update_record(is_adopted=True)
    progress.start_launch("third", {"0": "gpu1"})
    assert progress.rows["0"].was_reached, "by the computer that launched the job"


def test_abandoned_set_up_goes_on_to_no_other_step(progress: SetupProgress) -> None:
    progress.is_abandoned = True
    with pytest.raises(SetupFailed, match="given up"), timed_step(progress, "1", SetupStep.CODE):
        raise AssertionError("not reached")
    progress.start_launch("second", {"1": "gpu2"})
    progress.set_step("1", SetupStep.CODE)
