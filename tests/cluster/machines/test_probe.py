"""What a machine says of itself, asked for real and with fakes for what is not here: GPUs, mounts, lost servers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.machines import checks, probe
from cluster.state import mounts

GPU = "NVIDIA A100-SXM4-40GB, 40960, 550.54.15, GPU-{n}, 8.0"
FACTS: dict[str, Any] = {
    "tmux": "3.4",
    "gpus": [],
    "nvidia": "missing",
    "shm_bytes": 8 << 30,
    "work": {"path": "/mnt/fast", "writable": True},
    "free_gb": {"work": 100.0, "shared": 50.0},
    "shared": {"path": "/s/job", "type": "ext4", "options": "rw", "source": "/dev/x", "point": "/", "link": True},
}
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
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put an nvidia-smi of this text on PATH."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(text: str) -> None:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
        (folder / "nvidia-smi").chmod(0o755)

    return write


def run(*words: object) -> dict[str, Any]:
    """Run the command as it is run on a machine."""
    argv = [sys.executable, "-m", "cluster.machines.probe", *map(str, words)]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and not ran.stderr, ran
    said: dict[str, Any] = json.loads(ran.stdout)
    return said


def whats(found: list[dict[str, str]]) -> str:
    assert all("\n" not in one["what"] and one["level"] in ("error", "warning") for one in found)
    return "; ".join(f"{one['level']}: {one['what']}" for one in found)


def judged(procs: int = 0, want_gb: float = 0, **changes: Any) -> str:
    return whats(checks.find_problems({**FACTS, **changes}, procs, want_gb))


# --- the whole ----------------------------------------------------------------------------------------------------


def test_three_machines_are_asked_twice_and_see_each_other(tmp_path: Path) -> None:
    names, where = ["a", "b", "c"], ["--shared", tmp_path, "--work", tmp_path / "not/yet", "--token", "t1"]
    before = time.time()
    first = {name: run(*where, "--machine", name, "--want-gb", 0.001) for name in names}
    for said in first.values():
        assert before <= said["time"] <= time.time() and said["hostname"] == socket.gethostname()
        assert said["cpus"] == len(os.sched_getaffinity(0)) and 0.1 < said["memory_gb"] < 1e5
        assert said["free_gb"]["work"] > 0 and said["free_gb"]["shared"] > 0
        assert said["address"]["lo"] == "127.0.0.1" and said["tmux"][0].isdigit()
        assert said["shared"]["link"] and said["shared"]["fsync_ms"] >= 0 and said["shared"]["write_ms"] >= 0
        assert not [one for one in said["findings"] if "/dev/shm" not in one["what"]]
    assert sorted(one.name for one in (tmp_path / "probe").iterdir()) == ["t1-a", "t1-b", "t1-c"]
    answers = {name: run(*where, "--machine", name, "--expect", "a,b,c") for name in names}
    assert answers["b"]["shared"]["seen"] == {"a": True, "b": True, "c": True}
    assert checks.pairs_without_common_folder(answers) == []
    for name in names:
        run(*where, "--machine", name, "--clean")
    assert list(tmp_path.iterdir()) == []


def test_machines_with_folders_of_their_own_under_one_name_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MARKER_TIMEOUT_SECONDS", 0.2)
    answers: dict[str, Any] = {}
    folders = {"a": tmp_path / "one", "b": tmp_path / "one", "c": tmp_path / "other"}
    for name, folder in folders.items():
        folder.mkdir(exist_ok=True)
        assert probe.folder_facts(folder, folder / "probe" / f"t-{name}")["link"]
    for name, folder in folders.items():
        answers[name] = {"shared": {"seen": probe.find_markers(folder / "probe", {one: f"t-{one}" for one in folders})}}
    assert checks.pairs_without_common_folder(answers) == [("a", "c"), ("b", "c")]
    answers["a"] = {"shared": {"error": "no answer"}}
    assert checks.pairs_without_common_folder(answers) == [("a", "b"), ("a", "c"), ("b", "c")]


def test_to_be_seen_is_not_enough() -> None:
    answers = {"a": {"shared": {"seen": {"b": True}}}, "b": {"shared": {"seen": {"a": False}}}}
    assert checks.pairs_without_common_folder(answers) == [("a", "b")]


def test_a_file_that_comes_late_is_seen(tmp_path: Path) -> None:
    command = ["sh", "-c", 'sleep 0.3; printf "t-b\\n" > "$1"', "late", str(tmp_path / "t-b")]
    with subprocess.Popen(command):
        assert probe.find_markers(tmp_path, {"b": "t-b"}) == {"b": True}


def test_another_probings_file_is_not_taken_for_this_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MARKER_TIMEOUT_SECONDS", 0.05)
    (tmp_path / "t-b").write_text("")
    assert probe.find_markers(tmp_path, {"b": "t-b"}) == {"b": False}


# --- the shared folder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, kind, network",
    [
        ("/home/x", "ext4", False),
        ("/srv/other", "autofs", False),
        ("/srv/nfs/deep/er", "nfs4", True),
        ("/srv/nfs", "nfs4", True),
        ("/srv/nfs2", "nfs4", True),
        ("/with space/x", "fuse.sshfs", True),
        ("/over/x", "xfs", False),
    ],
)
def test_the_mount_of_a_path_is_the_deepest_and_the_last(path: str, kind: str, network: bool) -> None:
    found = mounts.mount_of(Path(path), MOUNTS)
    assert (found["type"], found["network"]) == (kind, network)


def test_a_mounts_options_are_both_its_own_and_its_file_systems() -> None:
    found = mounts.mount_of(Path("/srv/nfs/x"), MOUNTS)
    assert found["options"].startswith("rw,noatime,rw,vers=4.1") and found["source"] == "server:/export"


@pytest.mark.parametrize(
    "options, good",
    {
        "rw,vers=4.1,hard": False,
        "rw,lookupcache=pos": False,
        "rw,lookupcache=pos,acregmin=1,acregmax=1,acdirmin=1,acdirmax=1": True,
        "rw,lookupcache=none,acregmax=0,acdirmax=1": True,
        "rw,lookupcache=pos,acregmax=1,acdirmax=30": False,
        "rw,lookupcache=pos,actimeo=1": True,
        "rw,acregmax=1,acdirmax=1": False,
        "rw,noac": True,
        "rw,lookupcache=all,actimeo=0": False,
    }.items(),
)
def test_nfs_must_show_new_files_at_once_or_the_mount_line_is_said(options: str, good: bool) -> None:
    shared = {**FACTS["shared"], "type": "nfs4", "options": options, "source": "srv:/e", "point": "/s"}
    said = judged(shared=shared)
    assert (said == "") is good
    if not good:
        assert said.startswith("warning: /s/job: NFS shows") and said.endswith("acdirmax=1 srv:/e /s")
        assert "lookupcache=positive,acregmin=1" in said and ("vers=4.1," in said) is ("vers=4.1" in options)


@pytest.mark.parametrize("fault", ["missing", "file", "not writable", "probe is a file"])
def test_a_shared_folder_that_cannot_be_used_is_one_error(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shared"

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    if fault == "file":
        folder.write_text("")
    elif fault != "missing":
        folder.mkdir()
    if fault == "not writable":
        monkeypatch.setattr(Path, "mkdir", refuse)
    if fault == "probe is a file":
        (folder / "probe").write_text("")
    facts = probe.call_with_timeout(10, lambda: probe.folder_facts(folder, folder / "probe/t-a"))
    said = judged(shared={"path": str(folder), **(facts or {})})
    words = {"missing": "does not exist on this machine", "file": "is not a folder", "not writable": "Permission denied"}
    assert said.startswith(f"error: {folder}") and words.get(fault, "probe") in said


def test_a_folder_without_hard_links_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    (tmp_path / "x").write_text("")
    assert probe.can_hard_link(tmp_path / "x", tmp_path / "y")
    monkeypatch.setattr(os, "link", refuse)
    facts = probe.folder_facts(tmp_path, tmp_path / "probe/t-a")
    assert not facts["link"] and [one.name for one in (tmp_path / "probe").iterdir()] == ["t-a"]
    assert "no hard links on" in judged(shared={**FACTS["shared"], **facts})


def test_a_link_that_replaces_what_is_there_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda *_: None)
    (tmp_path / "x").write_text("")
    assert not probe.can_hard_link(tmp_path / "x", tmp_path / "y")


def test_a_file_server_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(shared: Path, mark: Path) -> dict[str, Any]:
        signal.pause()
        return {}

    monkeypatch.setattr(probe, "folder_facts", hang)
    monkeypatch.setattr(probe, "FOLDER_TIMEOUT_SECONDS", 0.2)
    facts = probe.gather_facts(tmp_path, tmp_path, tmp_path / "probe/t-a")
    assert f"error: {tmp_path}: no answer in 0.2 s" in whats(checks.find_problems(facts, 0, 0))


def test_what_is_asked_in_a_process_of_its_own_comes_whole() -> None:
    assert probe.call_with_timeout(10, lambda: {"x": "y" * 1_000_000}) == {"x": "y" * 1_000_000}
    assert probe.call_with_timeout(10, lambda: {"x": 1 // 0}) == {"error": "integer division or modulo by zero"}


# --- GPUs ---------------------------------------------------------------------------------------------------------


def test_gpus_are_named_with_memory_driver_and_compute_capability(nvidia_smi: Any) -> None:
    nvidia_smi(f"echo '{GPU.format(n=0)}'; echo '{GPU.format(n=1)}'")
    found, complaint = probe.query_gpus()
    assert complaint == "" and len(found) == 2
    assert found[1] == {
        "name": "NVIDIA A100-SXM4-40GB",
        "memory_gb": 42.9,
        "driver": "550.54.15",
        "uuid": "GPU-1",
        "compute": "8.0",
    }
    assert judged(procs=2, gpus=found, nvidia="") == ""


def test_an_older_driver_that_knows_no_compute_capability_is_asked_again(nvidia_smi: Any) -> None:
    nvidia_smi("""case "$1" in *compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2;; esac
echo 'Tesla V100, [N/A], 418.87, GPU-0'""")
    assert probe.query_gpus()[0] == [
        {"name": "Tesla V100", "memory_gb": 0.0, "driver": "418.87", "uuid": "GPU-0", "compute": ""}
    ]


def test_a_gpu_that_is_lost_is_counted_and_its_complaint_is_kept(nvidia_smi: Any) -> None:
    rows = "; ".join(f"echo '{GPU.format(n=n)}'" for n in range(7))
    nvidia_smi(f"{rows}; echo 'Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error'; exit 15")
    found, complaint = probe.query_gpus()
    said = judged(procs=8, gpus=found, nvidia=complaint)
    assert said.startswith("error: 7 of 8 GPUs visible (nvidia-smi: Unable to determine") and "ask for 7" in said


def test_no_driver_is_said_only_when_gpus_are_asked_for(nvidia_smi: Any) -> None:
    found, complaint = probe.query_gpus()
    assert (found, complaint) == ([], "missing")
    assert judged(procs=0, nvidia=complaint) == ""
    assert judged(procs=1, nvidia=complaint).startswith(
        "error: no GPU: nvidia-smi is missing; install the NVIDIA driver"
    )


def test_a_driver_that_does_not_run_is_said_in_its_own_words(nvidia_smi: Any) -> None:
    nvidia_smi("echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9")
    found, complaint = probe.query_gpus()
    assert "no GPU (nvidia-smi: NVIDIA-SMI has failed because" in judged(procs=1, gpus=found, nvidia=complaint)


def test_an_nvidia_smi_that_hangs_is_ended_and_said(nvidia_smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "NVIDIA_SMI_TIMEOUT_SECONDS", 0.3)
    nvidia_smi(f"sleep 600 & echo $! > {os.environ['PATH'].split(':')[0]}/pid; wait")
    start = time.monotonic()
    assert probe.query_gpus() == ([], "hangs")
    assert time.monotonic() - start < 30
    pid = int(Path(os.environ["PATH"].split(":")[0], "pid").read_text())
    while Path(f"/proc/{pid}").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() - start < 30, "what it had started still runs"
    assert "no GPU: nvidia-smi does not answer; reboot" in judged(procs=8, nvidia="hangs")


# --- what it means ------------------------------------------------------------------------------------------------


def test_all_is_well_is_nothing_to_say() -> None:
    assert judged(want_gb=99) == ""


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tmux": None}, "error: tmux is missing; install it"),
        ({"shm_bytes": 64 << 20}, "warning: /dev/shm has only 67 MB, and loader workers"),
        ({"shm_bytes": 0}, "warning: /dev/shm has only 0 MB"),
        ({"work": {"path": "/mnt/fast", "writable": False}}, "error: /mnt/fast: cannot be written"),
        ({"free_gb": {"work": 9.5}}, "error: /mnt/fast: 9.5 GB free, 10 GB are needed"),
        ({"shared": {"error": "/s: no answer in 20 s"}}, "error: /s: no answer"),
    ],
)
def test_each_fault_is_one_line(changes: dict[str, Any], said: str) -> None:
    assert judged(want_gb=10, **changes).startswith(said)


def test_without_tmux_and_with_a_full_disk_both_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = run("--shared", tmp_path, "--work", tmp_path, "--token", "t", "--want-gb", 1e9, "--procs", 1)
    assert said["tmux"] is None and said["gpus"] == []
    for word in ("tmux is missing", "1e+09 GB are needed", "nvidia-smi is missing"):
        assert word in whats(said["findings"])


def test_a_clock_is_wrong_only_when_that_is_sure() -> None:
    assert checks.clock_skew(100.0, 104.0, 102.5) == (0.5, 2.0)
    assert checks.check_clock(*checks.clock_skew(100.0, 104.0, 102.0)) == []
    assert checks.check_clock(31.0, 2.0) == []
    assert "its clock is 3600 s behind ours" in whats(checks.check_clock(-3600.0, 0.1))
    assert "its clock is 40 s ahead of ours" in whats(checks.check_clock(40.0, 2.0))


def test_memory_is_read_from_meminfo() -> None:
    assert probe.memory_gb("MemTotal:       1000000 kB\nMemFree: 1 kB\n") == 1.0
    assert probe.memory_gb("") == 0.0
