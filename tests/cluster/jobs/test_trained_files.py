"""The network of a finished job comes home: what is asked for, what is refused, and which file a command then takes."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.local_connector import LocalConnector
from support.train_records import make_epoch

from cluster.backends.ssh import SshBackend
from cluster.connectors import untrusted
from cluster.errors import BadInput, ClusterError
from cluster.jobs import checkpoints
from cluster.machines import trained_files
from cluster.script.snapshot import newest_version, remove_version
from cluster.state.states import JobState
from cluster.state.status import JobResult
from train.tools.records import encode
from train.weights.safetensors_file import BLANK_SHA256, header_bytes


def weights_file(note: str = "") -> bytes:
    blank = header_bytes({}, {"note": note})
    return blank.replace(BLANK_SHA256.encode(), hashlib.sha256(blank).hexdigest().encode(), 1)


def write_network(folder: Path) -> None:
    """Write the files of a network below a shared folder or a run folder."""
    files = {
        "model.safetensors": weights_file("last"),
        "model-best.safetensors": weights_file("best"),
        "classes.json": b"{}\n",
        "confusion.json": b"{}\n",
    }
    (folder / "network").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / "network" / name).write_bytes(content)


class CountingConnector(LocalConnector):
    """This computer as a machine, which sends files in small pieces and records what is read from it.

    `before_read` is called with the path and the offset of each piece.
    """

    name = "machine 0"

    def __init__(self, before_read: Callable[[str, int], None] = lambda *_: None) -> None:
        self.reads: list[str] = []
        self.before_read = before_read

    def read_from(self, path: str, offset: int, limit: int = 40) -> bytes:
        self.reads.append(path.rpartition("/")[2])
        self.before_read(path, offset)
        return super().read_from(path, offset, 40)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_download_network_brings_the_known_files_once(tmp_path: Path, home: Path) -> None:
    machine = tmp_path / "machine"
    write_network(machine)
    (machine / "network" / "notes.txt").write_text("not asked for")
    connector, calls = CountingConnector(), list[tuple[int, int]]()
    for _ in range(2):
        trained_files.download_network(connector, str(machine), home, lambda *call: calls.append(call))
    expected = {path.name: path.read_bytes() for path in (machine / "network").iterdir() if path.suffix != ".txt"}
    assert {path.name: path.read_bytes() for path in (home / "network").iterdir()} == expected
    size = len(expected["model.safetensors"])
    assert (size, size) in calls and connector.reads.count("classes.json") == 1
    (home / "network" / "model.safetensors").write_bytes(b"cut")
    trained_files.download_network(connector, str(machine), home, lambda *_: None)
    assert (home / "network" / "model.safetensors").read_bytes() == weights_file("last")


@pytest.mark.parametrize("download, listing, content, error", [
    (trained_files.download_network, {"model.safetensors": 10**15}, b"", "it has a file model.safetensors of 1e.06 GB"),
    (trained_files.download_network, {"model.safetensors": 5}, bytes(1 << 20), "it sent a damaged model.safetensors"),
    (trained_files.download_network, {"model.safetensors": len(weights_file()) + 1}, weights_file() + b"x",
     "it sent a damaged model.safetensors"),
    (trained_files.download_network, {"classes.json": 9}, b"[" * 9, "it sent a damaged classes.json"),
    (trained_files.download_network, {"model.safetensors": 1 << 34}, b"", "No space left"),
    (trained_files.download_network, {"../../x.safetensors": 5, "/etc/x": 5, "notes.txt": 5}, b"x", ""),
    (trained_files.download_checkpoint, {"000001/step-1.pt": 10**15}, b"",
     "machine 0: its answer was dropped: it has a checkpoint .* of 1000000 GB"),
    (trained_files.download_checkpoint, {"000001/step-1.pt": untrusted.MAX_CHECKPOINT_BYTES}, b"", "No space left"),
    (trained_files.download_checkpoint, {"../../000001/step-1.pt": 5, "000001/step-" + "9" * 5000 + ".pt": 5,
                                         "000001/x/../step-1.pt": 5}, bytes(1 << 20), ""),
    (trained_files.download_checkpoint, {"000001/step-1.pt": 5}, bytes(1 << 20), ""),  # more than it said
    (trained_files.download_version, {"000001/save-00000001/a": 10**15}, b"", "has a checkpoint file of 1000000 GB"),
])  # fmt: skip
def test_download_from_a_lying_machine_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, download: Any, listing: dict[str, int], content: bytes, error: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=1 << 33))
    machine = LocalConnector("machine 0")
    monkeypatch.setattr(machine, "list_files", lambda folder: listing)
    monkeypatch.setattr(machine, "read_from", lambda path, offset: content[offset:])
    with pytest.raises((ClusterError, OSError), match=error) if error else contextlib.nullcontext():
        assert download(machine, "/shared", home, lambda *_: None) is None
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_download_network_follows_no_link_at_home(tmp_path: Path, home: Path) -> None:
    write_network(tmp_path / "machine")
    (tmp_path / "elsewhere").mkdir()
    (home / "network").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        trained_files.download_network(CountingConnector(), str(tmp_path / "machine"), home, lambda *_: None)
    assert not list((tmp_path / "elsewhere").iterdir())


def write_version(shared: Path, name: str, **files: str) -> None:
    for path, content in files.items():
        file = shared / "checkpoints" / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def files_below(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_download_version_brings_the_newest_complete_one_with_hidden_files_and_drops_older_ones(
    tmp_path: Path, home: Path
) -> None:
    machine = tmp_path / "machine"
    write_version(machine, "000001/save-00000009", old="1")
    write_version(machine, "000002/.new-1a2b", torn="x")
    connector, calls = CountingConnector(), list[tuple[int, int]]()
    assert trained_files.download_version(connector, str(tmp_path / "nowhere"), home, lambda *_: None) is None
    assert trained_files.download_version(connector, str(machine), home, lambda *_: None)
    write_version(machine, "000002/resume-00000009-1a2b3c4d", old="1")
    write_version(machine, "000002/save-00000010", **{"epoch 3/model": "m" * 100, "epoch 3/.metadata": "", "a": "2"})
    (machine / "checkpoints/000002/save-00000010/last").symlink_to("a")
    for _ in range(2):
        version = trained_files.download_version(connector, str(machine), home, lambda *call: calls.append(call))
    assert version == home / "checkpoints/000002/save-00000010" == newest_version(home)
    expected = {"epoch 3/model": "m" * 100, "epoch 3/.metadata": "", "a": "2", "last": "2"}
    assert files_below(home / "checkpoints") == {
        f"000002/save-00000010/{path}": text for path, text in expected.items()
    }
    assert calls[-1] == (102, 102) and sorted(calls) == calls
    assert connector.reads.count("model") == 3


def test_download_version_is_continued_and_of_one_that_is_replaced_meanwhile_the_newer_one_comes(
    tmp_path: Path, home: Path
) -> None:
    machine = tmp_path / "machine"
    first = "000001/save-00000001"
    write_version(machine, first, a="1", b="b" * 150)

    def cut(path: str, offset: int) -> None:
        if path.endswith("/b") and offset:
            raise ClusterError("machine 0: no answer")

    def replace_version(path: str, offset: int) -> None:
        if path.endswith("save-00000002/a") and offset:
            remove_version(machine / "checkpoints/000001/save-00000002")
            write_version(machine, "000001/save-00000003", a="3" * 250)

    with pytest.raises(ClusterError, match="no answer"):
        trained_files.download_version(CountingConnector(cut), str(machine), home, lambda *_: None)
    assert newest_version(home) is None
    connector = CountingConnector()
    assert trained_files.download_version(connector, str(machine), home, lambda *_: None)
    assert connector.reads.count("a") == 0 and files_below(home / "checkpoints" / first) == {"a": "1", "b": "b" * 150}

    write_version(machine, "000001/save-00000002", a="2" * 250)
    trained_files.download_version(CountingConnector(replace_version), str(machine), home, lambda *_: None)
    assert files_below(home / "checkpoints") == {"000001/save-00000003/a": "3" * 250}


def test_link_network_takes_files_only_and_copies_where_there_are_no_hard_links(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    trained_files.link_network(shared, home)
    assert not list(home.iterdir())
    write_network(shared)
    secret = tmp_path / "secret"
    secret.write_text("not for the run folder")
    (shared / "network" / "confusion.json").unlink()
    (shared / "network" / "confusion.json").symlink_to(secret)
    (shared / "network" / "model-best.safetensors").unlink()
    os.mkfifo(shared / "network" / "model-best.safetensors")
    for _ in range(2):
        trained_files.link_network(shared, home)
    assert sorted(path.name for path in (home / "network").iterdir()) == ["classes.json", "model.safetensors"]
    assert (home / "network" / "model.safetensors").samefile(shared / "network" / "model.safetensors")
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(1, "no hard links here")))
    (tmp_path / "copy").mkdir()
    trained_files.link_network(shared, tmp_path / "copy")
    assert files_below(tmp_path / "copy") == files_below(home)


def test_network_is_taken_for_a_jobs_only_beside_a_result(hand_made: Any) -> None:
    run = hand_made()
    write_network(run.run_folder.shared)
    for is_done in (False, True):
        if is_done:
            (run.run_folder.shared / "result.json").touch()
        run.job.backend.poll()
        assert (run.run_folder.network_folder / "model.safetensors").exists() == is_done, "it may be that of before"


def write_done(run: Any, *top1: float) -> None:
    epochs = tuple(make_epoch(epoch=number, top1=value, top5=90.0) for number, value in enumerate(top1, 1))
    result = JobResult(job="job-1", state=JobState.DONE, reason="", attempts=1, epochs=epochs)
    run.run_folder.result_path.write_text(json.dumps(encode(result)))


def test_trained_weights_of_a_finished_job_are_those_that_it_left(hand_made: Any) -> None:
    run = hand_made()
    run.write_checkpoint(1, 8)
    write_network(run.run_folder.shared)
    (run.run_folder.shared / "result.json").touch()
    write_done(run, 40.0, 60.0, 50.0)
    folder = run.run_folder.path / "network"
    assert checkpoints.trained_weights(run.job) == folder / "model.safetensors"
    assert checkpoints.trained_weights(run.job, is_best=True) == folder / "model-best.safetensors"
    (run.run_folder.shared / "network" / "model-best.safetensors").unlink()
    (folder / "model-best.safetensors").unlink()
    with pytest.raises(BadInput, match=r"job-1 has not kept its best network \(launch --keep best,last\): leave out"):
        checkpoints.trained_weights(run.job, is_best=True)
    write_done(run, 40.0, 50.0)
    assert checkpoints.trained_weights(run.job, is_best=True) == folder / "model.safetensors", "the last is the best"


def test_trained_weights_of_an_unfinished_job_are_its_newest_complete_checkpoint(hand_made: Any) -> None:
    run = hand_made()
    with pytest.raises(ClusterError, match=r"job-1 is \w+ and has saved nothing yet; see: imgnet-cluster status job-1"):
        checkpoints.trained_weights(run.job)
    for attempt, step, is_complete in ((1, 5, True), (2, 8, True), (2, 9, False)):
        run.write_checkpoint(attempt, step, is_complete)
    (run.run_folder.shared / "checkpoints" / "000003").mkdir()
    path = run.run_folder.shared / "checkpoints/000002/step-00000008.pt"
    assert checkpoints.trained_weights(run.job) == path
    begun_from = path.rename(path.with_name("resume-00000008-abc.pt"))
    assert checkpoints.trained_weights(run.job) == begun_from, "the attempt has saved nothing"
    with pytest.raises(BadInput, match=r"job-1 is \w+; its best network is known when it is done: leave out --best"):
        checkpoints.trained_weights(run.job, is_best=True)


def test_newest_checkpoint_of_a_remote_job_is_downloaded_once_or_is_the_local_copy(
    hand_made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the machine the newest file of the second attempt is damaged."""
    machine = hand_made("job-9")
    for attempt, step, is_complete in ((1, 50, True), (2, 7, True), (2, 8, True), (2, 9, False)):
        machine.write_checkpoint(attempt, step, is_complete)
    machine.write_shared("checkpoints/000002/resume-00000050-abc.pt", "x")
    machine.write_shared("checkpoints/000002/notes.txt", "x")
    connector = CountingConnector()

    class Fleet:
        """Machine 0 does not answer, machine 1 was never set up, machine 2 answers until `is_silent`."""

        connectors = dict.fromkeys("012", connector)
        is_silent = False

        @property
        def provisioner(self) -> "Fleet":
            return self

        def job_folder(self, name: str) -> str:
            if name == "0" or self.is_silent:
                raise ClusterError(f"machine {name}: does not answer")
            return {"2": str(machine.run_folder.shared)}[name]

    fleet = Fleet()
    monkeypatch.setattr(SshBackend, "open_fleet", lambda ssh_backend: fleet)
    run = hand_made(backend="ssh")
    name = "checkpoints/000002/step-00000008.pt"
    local_path = run.run_folder.shared / name
    for _ in range(2):
        assert checkpoints.newest_checkpoint(run.job) == local_path
    assert local_path.read_bytes() == (machine.run_folder.shared / name).read_bytes()
    assert connector.reads.count(local_path.name) <= local_path.stat().st_size // 40 + 2
    assert [path.name for path in run.run_folder.path.rglob("*.pt")] == [local_path.name]
    fleet.is_silent = True
    assert checkpoints.newest_checkpoint(run.job) == local_path
    local_path.unlink()
    with pytest.raises(ClusterError, match="its checkpoints are on its machines, and no machine sent one: machine 2"):
        checkpoints.newest_checkpoint(run.job)
