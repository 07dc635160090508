import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.script import container
from cluster.script.container import ContainerError

FAKE_DOCKER = """#!/bin/sh
echo "$*" >>"$DOCKER_LOG"
case "$1" in
info) echo "$DOCKER_RUNTIMES" ;;
image) test -n "$DOCKER_HAS_IMAGE" ;;
pull) test -z "$DOCKER_PULL_ERROR" || { echo "$DOCKER_PULL_ERROR" >&2; exit 1; } ;;
ps) echo aaa; echo bbb ;;
run) env ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A program docker that notes its arguments, and a function that returns them."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(FAKE_DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("DOCKER_RUNTIMES", '{"nvidia":{},"runc":{}}')
    return lambda: (tmp_path / "log").read_text().splitlines()


def argv(**changes: object) -> list[str]:
    options: dict[str, object] = {
        "name": container.container_name("job-1-aa", "0", 3),
        "machine_label": "job-1-aa-0",
        "workdir": Path("/w/project"),
        "mounts": [Path("/w"), Path("/w")],
        "read_only_mounts": [Path("/data")],
        "variables": {"TOKEN": "hunter2", "RANK": "3", "PATH": "/opt"},
        "has_nvidia": False,
    }
    return container.run_argv("img:1", ["python", "train.py"], **{**options, **changes})  # type: ignore[arg-type]


def test_prepare_pulls_an_image_that_is_not_here(
    docker: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert container.prepare("pytorch/pytorch:2.9") is True
    assert docker()[-1] == "pull --quiet pytorch/pytorch:2.9"
    monkeypatch.setenv("DOCKER_HAS_IMAGE", "1")
    monkeypatch.setenv("DOCKER_RUNTIMES", '{"runc":{}}')
    assert container.prepare("pytorch/pytorch:2.9") is False
    assert docker()[-1].startswith("image inspect")


@pytest.mark.parametrize("image", ["", "--privileged", "a b", "-v=/:/x", "x" * 500])
def test_text_that_names_no_image_is_refused(image: str) -> None:
    with pytest.raises(ContainerError, match="is not the name of an image"):
        container.prepare(image)


def test_image_that_cannot_be_pulled_and_missing_docker_are_one_line(
    docker: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_PULL_ERROR", "Using default tag\nError: manifest for nope:1 not found\nhelp")
    with pytest.raises(
        ContainerError, match=r"^the image nope:1 cannot be pulled: docker pull: Error: manifest.*found$"
    ):
        container.prepare("nope:1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ContainerError, match="docker is missing on this machine; install Docker there"):
        container.prepare("img:1")


def test_container_has_the_folders_the_network_and_values_from_the_environment_only(
    docker: Callable[[], list[str]],
) -> None:
    words = argv()
    text = " ".join(words)
    assert text.endswith("img:1 python train.py")
    assert text.count("--volume /w:/w ") == 1 and "--volume /data:/data:ro" in text
    assert "--network host --ipc host" in text and "--rm" in text and "--name imgnet-job-1-aa-0-3" in text
    assert "--env RANK" in text and "--env PATH" not in text
    assert "nvidia" not in text and "--runtime nvidia --gpus all" in " ".join(argv(has_nvidia=True))
    output = subprocess.run(words, env={**os.environ, "TOKEN": "hunter2"}, capture_output=True, text=True).stdout
    assert "TOKEN=hunter2" in output and "hunter2" not in text + docker()[-1]


def test_containers_of_a_machine_are_removed(docker: Callable[[], list[str]]) -> None:
    container.remove_containers("job-1-aa-0")
    assert docker() == ["ps --all --quiet --filter label=imgnet-cluster.machine=job-1-aa-0", "rm --force aaa bbb"]
