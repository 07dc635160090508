import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.errors import BadInput, ClusterError
from cluster.script import container, secret_values
from cluster.script.container import ContainerError


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "job-1").mkdir()
    return tmp_path / "job-1"


@pytest.mark.parametrize("arguments, files, problem", [
    (["TOKEN"], [], "--env TOKEN: your environment has no such variable; type export TOKEN=VALUE"),
    (["1A=x"], [], "'1A' is not the name of an environment variable"),
    (["RANK=3"], [], "RANK is set for each process by the job itself"),
    ([], ["/nowhere/keys"], "--env-file /nowhere/keys: No such file"),
])  # fmt: skip
def test_collect_names_what_is_wrong(arguments: list[str], files: list[str], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        secret_values.collect(arguments, files, {})


@pytest.mark.parametrize("line, value", [
    ("K=plain", "plain"),
    ("export K = spaced  # comment", "spaced"),
    ("K=with#hash", "with#hash"),
    ("K='single $HOME \\n'", "single $HOME \\n"),
    ('K="two\\nlines \\"x\\" \\d" # end', 'two\nlines "x" \\d'),
    ("K=", ""),
    ("# comment\n\nK=1", "1"),
])  # fmt: skip
def test_env_file_is_read_like_dotenv(line: str, value: str) -> None:
    assert secret_values.parse_env_file(line, "keys") == {"K": value}


@pytest.mark.parametrize("line", ["no equals hunter2", "K='hunter2", "K='hunter2' hunter2"])
def test_error_in_an_env_file_names_the_line_and_shows_no_value(line: str) -> None:
    with pytest.raises(BadInput, match="--env-file keys, line 2: ") as error:
        secret_values.parse_env_file(f"A=1\n{line}", "keys")
    assert "hunter2" not in str(error.value)


def test_kept_values_can_be_read_by_their_user_only(state_home: Path, run_folder: Path) -> None:
    secret_values.keep("job-1-aa", run_folder, {"TOKEN": "hunter2"})
    assert secret_values.kept_values("job-1-aa") == {"TOKEN": "hunter2"} and secret_values.kept_values("other") == {}
    (file,) = (path for path in state_home.rglob("*") if path.is_file())
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert not list(run_folder.iterdir())


def test_keep_removes_values_of_jobs_that_are_done_or_gone(run_folder: Path, tmp_path: Path) -> None:
    done = tmp_path / "job-2"
    done.mkdir()
    for uid, run in (("stopped", run_folder), ("done", done), ("gone", tmp_path / "job-3")):
        secret_values.keep(uid, run, {"TOKEN": "1"})
    (run_folder / "result.json").write_text(json.dumps({"state": "stopped"}))
    (done / "result.json").write_text(json.dumps({"state": "done"}))
    secret_values.keep("new", run_folder, {"TOKEN": "2"})
    assert {path.stem for path in secret_values.secrets_folder().iterdir()} == {"stopped", "new"}


def test_machine_reads_what_was_sent_once(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for _ in range(2):  # the second after the agent died before it had read the first
        subprocess.run(
            ["sh", "-c", secret_values.SEND_SCRIPT, "sh", str(work)],
            input=secret_values.sent_bytes({"A": "1", "B": "2\n"}),
            check=True,
        )
    assert (work / secret_values.SENT_FILE).stat().st_mode & 0o777 == 0o600
    assert secret_values.receive(("B",), work, "uid", "job-1") == {"B": "2\n"}
    assert not list(work.iterdir())


def test_machine_of_the_launching_computer_reads_what_is_kept(tmp_path: Path, run_folder: Path) -> None:
    secret_values.keep("uid", run_folder, {"A": "1"})
    assert secret_values.receive(("A",), tmp_path, "uid", "job-1") == {"A": "1"}
    assert secret_values.receive((), tmp_path, "other", "job-1") == {}
    with pytest.raises(ClusterError, match="type imgnet-cluster resume job-1 --env A --env B"):
        secret_values.receive(("A", "B"), tmp_path, "other", "job-1")


def test_resume_takes_new_values_of_the_jobs_variables_only(run_folder: Path) -> None:
    secret_values.keep("uid", run_folder, {"A": "1", "B": "2"})
    assert secret_values.new_values(["A=3"], ("A", "B"), "uid", "job-1") == {"A": "3", "B": "2"}
    with pytest.raises(BadInput, match="--env C: is no secret variable of job-1, which has A, B"):
        secret_values.new_values(["C=3"], ("A", "B"), "uid", "job-1")


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
        "variables": ("TOKEN", "RANK", "PATH"),
        "given_variables": ("TOKEN",),
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
    with pytest.raises(ContainerError, match=r"^the image nope:1 cannot be pulled: docker pull: Error: man.*found$"):
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
    assert "--env RANK" in text and "--env PATH" not in text and "--env HOME=/w/project " in text
    of_user = " ".join(argv(variables=("PYTHONPATH", "HOME"), given_variables=("PYTHONPATH", "HOME")))
    assert "--env HOME --env PYTHONPATH " in of_user and "HOME=" not in of_user
    assert "nvidia" not in text and "--runtime nvidia --gpus all" in " ".join(argv(has_nvidia=True))
    output = subprocess.run(words, env={**os.environ, "TOKEN": "hunter2"}, capture_output=True, text=True).stdout
    assert "TOKEN=hunter2" in output and "hunter2" not in text + docker()[-1]


def test_containers_of_a_machine_are_removed(docker: Callable[[], list[str]]) -> None:
    container.remove_containers("job-1-aa-0")
    assert docker() == ["ps --all --quiet --filter label=imgnet-cluster.machine=job-1-aa-0", "rm --force aaa bbb"]
