"""The network of a finished job comes home: what is asked for, what is refused, and which file a command then takes."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_connector import LocalConnector

from cluster.errors import BadInput, ClusterError
from cluster.jobs import checkpoints
from cluster.machines import trained_files
from cluster.script.snapshot import newest_version, remove_version
from train.weights.safetensors_header import BLANK_SHA256, header_bytes

Fixture = Any
EPOCH: dict[str, Any] = {
    "size": 32, "global_batch": 8, "lr": 0.05, "steps": 8, "seconds": 11.5, "train_seconds": 10.0, "val_seconds": 1.5,
    "train_loss": 2.5, "train_top1": 20.0, "train_top5": 60.0, "train_images": 60, "images_per_second": 6.0,
}  # fmt: skip


def weights_file(note: str = "") -> bytes:
    """A file of weights without tensors, with its right checksum."""
    blank = header_bytes({}, {"note": note})
    return blank.replace(BLANK_SHA256.encode(), hashlib.sha256(blank).hexdigest().encode(), 1)


def write_network(folder: Path, **changes: bytes) -> None:
    """Write the files of a network below a shared folder or a run folder."""
    files = {
        "model.safetensors": weights_file("last"),
        "model-best.safetensors": weights_file("best"),
        "classes.json": b"{}\n",
        "confusion.json": b"{}\n",
    }
    (folder / "network").mkdir(parents=True, exist_ok=True)
    for name, content in {**files, **changes}.items():
        (folder / "network" / name).write_bytes(content)


class CountingConnector(LocalConnector):
    """This computer as a machine, which records what is read from it."""

    name = "machine 0"

    def __init__(self) -> None:
        self.reads: list[str] = []

    def read_from(self, path: str, offset: int, limit: int = 100) -> bytes:
        self.reads.append(path.rpartition("/")[2])
        return super().read_from(path, offset, 100)


def test_download_network_brings_the_known_files_once(tmp_path: Path) -> None:
    machine, home = tmp_path / "machine", tmp_path / "home"
    home.mkdir()
    write_network(machine)
    (machine / "network" / "notes.txt").write_text("not asked for")
    connector = CountingConnector()
    progress: list[tuple[int, int]] = []
    for _ in range(2):
        trained_files.download_network(
            connector, str(machine), home, lambda done, total: progress.append((done, total))
        )
    names = ["classes.json", "confusion.json", "model-best.safetensors", "model.safetensors"]
    assert sorted(path.name for path in (home / "network").iterdir()) == names
    for name in names:
        assert (home / "network" / name).read_bytes() == (machine / "network" / name).read_bytes()
    size = (machine / "network" / "model.safetensors").stat().st_size
    assert (size, size) in progress and connector.reads.count("classes.json") == 1
    (home / "network" / "model.safetensors").write_bytes(b"cut")
    trained_files.download_network(connector, str(machine), home, lambda *_: None)
    assert (home / "network" / "model.safetensors").read_bytes() == weights_file("last")


@pytest.mark.parametrize("listing, content, error", [
    ({"model.safetensors": 10**15}, b"", "it has a file model.safetensors of 1e.06 GB"),
    ({"model.safetensors": 5}, bytes(1 << 20), "it sent a damaged model.safetensors"),
    ({"model.safetensors": len(weights_file()) + 1}, weights_file() + b"x", "it sent a damaged model.safetensors"),
    ({"classes.json": 9}, b"[" * 9, "it sent a damaged classes.json"),
    ({"model.safetensors": 1 << 34}, b"", "No space left"),
    ({"../../x.safetensors": 5, "/etc/x": 5, "notes.txt": 5}, b"x", ""),
])  # fmt: skip
def test_download_network_of_a_lying_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: Mapping[str, int], content: bytes, error: str
) -> None:
    class LyingConnector(LocalConnector):
        name = "machine 0"

        def list_files(self, folder: str, with_hidden: bool = False) -> dict[str, int]:
            return dict(listing)

        def read_from(self, path: str, offset: int, limit: int = 0) -> bytes:
            return content[offset:]

    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=1 << 33))
    home = tmp_path / "home"
    home.mkdir()
    if error:
        with pytest.raises((ClusterError, OSError), match=error):
            trained_files.download_network(LyingConnector(), "/shared", home, lambda *_: None)
    else:
        trained_files.download_network(LyingConnector(), "/shared", home, lambda *_: None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_download_network_follows_no_link_at_home(tmp_path: Path) -> None:
    machine, home, elsewhere = tmp_path / "machine", tmp_path / "home", tmp_path / "elsewhere"
    write_network(machine)
    home.mkdir()
    elsewhere.mkdir()
    (home / "network").symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        trained_files.download_network(CountingConnector(), str(machine), home, lambda *_: None)
    assert not list(elsewhere.iterdir())


# --- the checkpoint folder of a command ---------------------------------------------------------------------------


def write_version(shared: Path, name: str, **files: str) -> None:
    """Write a version of a checkpoint folder below a shared folder."""
    for path, content in files.items():
        file = shared / "checkpoints" / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def files_below(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_download_version_brings_the_newest_complete_one_with_hidden_files_and_drops_older_ones(tmp_path: Path) -> None:
    machine, home = tmp_path / "machine", tmp_path / "home"
    write_version(machine, "000001/save-00000009", old="1")
    write_version(machine, "000002/.new-1a2b", torn="x")
    connector = CountingConnector()
    assert trained_files.download_version(connector, str(tmp_path / "nowhere"), home, lambda *_: None) is None
    assert trained_files.download_version(connector, str(machine), home, lambda *_: None)
    write_version(machine, "000002/resume-00000009-1a2b3c4d", old="1")
    write_version(machine, "000002/save-00000010", **{"epoch 3/model": "m" * 250, "epoch 3/.metadata": "", "a": "2"})
    (machine / "checkpoints/000002/save-00000010/last").symlink_to("a")
    progress: list[tuple[int, int]] = []
    for _ in range(2):
        version = trained_files.download_version(
            connector, str(machine), home, lambda done, total: progress.append((done, total))
        )
    assert version == home / "checkpoints/000002/save-00000010" == newest_version(home)
    expected = {"epoch 3/model": "m" * 250, "epoch 3/.metadata": "", "a": "2", "last": "2"}
    assert files_below(home / "checkpoints") == {
        f"000002/save-00000010/{path}": text for path, text in expected.items()
    }
    assert progress[-1] == (252, 252) and connector.reads.count("model") == 3 and sorted(progress) == progress


def test_download_version_takes_over_what_an_interrupted_one_has_left(tmp_path: Path) -> None:
    class CutConnector(CountingConnector):
        def read_from(self, path: str, offset: int, limit: int = 100) -> bytes:
            if path.endswith("/b") and offset:
                raise ClusterError("machine 0: no answer")
            return super().read_from(path, offset, limit)

    machine, home = tmp_path / "machine", tmp_path / "home"
    write_version(machine, "000001/save-00000001", a="1", b="b" * 150)
    with pytest.raises(ClusterError, match="no answer"):
        trained_files.download_version(CutConnector(), str(machine), home, lambda *_: None)
    assert newest_version(home) is None
    connector = CountingConnector()
    assert trained_files.download_version(connector, str(machine), home, lambda *_: None)
    assert "a" not in connector.reads and files_below(home / "checkpoints/000001/save-00000001")["b"] == "b" * 150


def test_download_version_that_is_replaced_meanwhile_brings_the_newer_one(tmp_path: Path) -> None:
    class BusyConnector(CountingConnector):
        def read_from(self, path: str, offset: int, limit: int = 100) -> bytes:
            content = super().read_from(path, offset, limit)
            if "save-00000001" in path:
                remove_version(machine / "checkpoints/000001/save-00000001")
                write_version(machine, "000001/save-00000002", a="2" * 250)
            return content

    machine, home = tmp_path / "machine", tmp_path / "home"
    write_version(machine, "000001/save-00000001", a="1" * 250)
    trained_files.download_version(BusyConnector(), str(machine), home, lambda *_: None)
    assert files_below(home / "checkpoints") == {"000001/save-00000002/a": "2" * 250}


def test_download_version_of_an_impossible_size_is_refused(tmp_path: Path) -> None:
    class LyingConnector(LocalConnector):
        name = "machine 0"

        def list_files(self, folder: str, with_hidden: bool = False) -> dict[str, int]:
            return {"000001/save-00000001/a": 10**15}

    with pytest.raises(ClusterError, match="has a checkpoint file of 1000000 GB"):
        trained_files.download_version(LyingConnector(), "/shared", tmp_path, lambda *_: None)
    assert not list(tmp_path.rglob("*"))


def test_link_network_takes_files_only(tmp_path: Path) -> None:
    shared, home = tmp_path / "shared", tmp_path / "home"
    home.mkdir()
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


def test_link_network_copies_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    shared, home = tmp_path / "shared", tmp_path / "home"
    home.mkdir()
    write_network(shared)
    monkeypatch.setattr(os, "link", refuse)
    trained_files.link_network(shared, home)
    assert (home / "network" / "model.safetensors").read_bytes() == weights_file("last")
    assert len(list((home / "network").iterdir())) == 4


# --- which file a command takes -----------------------------------------------------------------------------------


def write_done(run: Any, *top1: float) -> None:
    """Write the result of a job that is done, with the accuracies of its epochs."""
    epochs = [{**EPOCH, "epoch": number, "top1": value} for number, value in enumerate(top1, 1)]
    result = {"job": "job-1", "state": "done", "reason": "", "attempts": 1, "epochs": epochs}
    (run.run_folder.path / "result.json").write_text(json.dumps(result))


def test_trained_weights_of_a_finished_job_are_those_that_it_left(hand_made: Fixture) -> None:
    run = hand_made()
    run.write_checkpoint(1, 8)
    write_network(run.run_folder.shared)
    write_done(run, 40.0, 60.0, 50.0)
    folder = run.run_folder.path / "network"
    assert checkpoints.trained_weights(run.job) == folder / "model.safetensors"
    assert checkpoints.trained_weights(run.job, is_best=True) == folder / "model-best.safetensors"


def test_trained_weights_best_is_the_last(hand_made: Fixture) -> None:
    run = hand_made()
    write_network(run.run_folder.shared)
    (run.run_folder.shared / "network" / "model-best.safetensors").unlink()
    write_done(run, 40.0, 50.0)
    path = checkpoints.trained_weights(run.job, is_best=True)
    assert path == run.run_folder.path / "network" / "model.safetensors"
    write_done(run, 50.0, 40.0)
    with pytest.raises(BadInput, match=r"job-1 has not kept its best network \(launch --keep best,last\): leave out"):
        checkpoints.trained_weights(run.job, is_best=True)


def test_trained_weights_of_an_unfinished_job_are_its_checkpoint(hand_made: Fixture) -> None:
    run = hand_made()
    checkpoint = run.run_folder.shared / run.write_checkpoint(1, 8)
    assert checkpoints.trained_weights(run.job) == checkpoint
    with pytest.raises(BadInput, match=r"job-1 is \w+; its best network is known when it is done: leave out --best"):
        checkpoints.trained_weights(run.job, is_best=True)
