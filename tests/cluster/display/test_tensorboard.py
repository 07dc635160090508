"""The tensorboard command: serves a finished job's scalars on this computer only, and leaves no process."""

import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from cluster.display import tensorboard
from cluster.errors import NoSuchJob

Fixture = Any


@pytest.fixture
def place_with_job(sandbox: Fixture, finished: Fixture) -> Any:
    """A sandbox with a copy of the finished job."""
    shutil.copytree(finished.path / "runs", sandbox.path / "runs")
    return sandbox


@pytest.fixture
def start(place_with_job: Fixture) -> Any:
    """Serve all jobs of the place with `serve_all`, and return the URL."""
    servers = []

    def serve() -> str:
        argv = [sys.executable, "-c", "from cluster.display.tensorboard import serve_all; serve_all(0)"]
        with (place_with_job.path / "board").open("wb") as output:
            servers.append(
                subprocess.Popen(argv, stdout=output, stderr=output, cwd=place_with_job.path, env=place_with_job.env)
            )
        text = place_with_job.wait_for((place_with_job.path / "board").read_text)
        assert text.startswith("http://127.0.0.1:") and f"all jobs of {place_with_job.path / 'runs'}, until" in text, (
            text
        )
        return str(text.split()[0])

    yield serve
    for server in servers:
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
    assert (place_with_job.path / "board").read_text().endswith("TensorBoard stopped; the job goes on\n")


def listening_addresses(port: int) -> list[str]:
    """The addresses, in hexadecimal, of sockets that listen on a port."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [fields[1].split(":")[0] for fields in lines if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"]


def test_tensorboard_serves_a_jobs_scalars_by_images_seen(place_with_job: Fixture) -> None:
    server = place_with_job.start("tensorboard", "job-1", "--port", "0")
    url = place_with_job.wait_for(lambda: place_with_job.output().count("\n") and place_with_job.output().split()[0])
    assert url.startswith("http://127.0.0.1:") and "until Ctrl-C" in place_with_job.output()
    port = int(url.rstrip("/").rsplit(":", 1)[1])
    assert listening_addresses(port) == ["0100007F"], "it listens beyond this computer"

    def get_json(path: str, **query: str) -> Any:
        with urlopen(f"{url}{path}?{urlencode(query)}", timeout=30) as response:
            return json.load(response)

    tags = place_with_job.wait_for(lambda: get_json("data/plugin/scalars/tags"), 30)
    (run,) = tags
    assert {"train/loss", "sizes/lr", "times/images_per_second", "val/loss", "val/top1"} <= tags[run].keys()
    for tag in tags[run]:
        served = [(step, value) for _, step, value in get_json("data/plugin/scalars/scalars", run=run, tag=tag)]
        measured = place_with_job.job().scalars(tag)
        assert [step for step, _ in served] == [images for images, _ in measured] and served[-1][0] == 180
        assert [value for _, value in served] == pytest.approx([value for _, value in measured], rel=1e-6)

    server.send_signal(signal.SIGINT)
    assert server.wait(20) == 0
    assert (
        place_with_job.output().endswith("TensorBoard stopped; the job goes on\n")
        and "Traceback" not in place_with_job.output()
    )
    place_with_job.wait_for(lambda: not place_with_job.pids(), 5)
    assert not listening_addresses(port)


def test_serve_all_shows_all_jobs_with_hparams_and_metrics(place_with_job: Fixture, start: Fixture) -> None:
    runs = place_with_job.path / "runs"
    shutil.copytree(runs / "job-1", runs / "job-3")
    (runs / "job-3/job.json").write_text((runs / "job-1/job.json").read_text().replace("job-1", "job-3"))
    (runs / "job-2").mkdir()  # left by a launch that was killed
    url = start()

    def get_json(path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode() if body else None
        request = Request(f"{url}data/{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=30) as response:
            return json.load(response)

    place_with_job.wait_for(lambda: set(get_json("runs")) == {"job-1", "job-3"}, 30)
    experiment = get_json("plugin/hparams/experiment", {"experimentName": "0"})
    names = {info["name"] for info in experiment["hparamInfos"]}
    assert {"model", "lr", "batch_first", "momentum", "world"} <= names
    assert [info["name"]["tag"] for info in experiment["metricInfos"]] == ["val/top1", "val/top5"]
    query = {
        "experimentName": "0", "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_RUNNING"],
        "colParams": [], "startIndex": 0, "sliceSize": 10,
    }  # fmt: skip
    groups = get_json("plugin/hparams/session_groups", query)["sessionGroups"]
    result = place_with_job.job().result
    assert sorted(group["name"] for group in groups) == ["job-1", "job-3"]
    for group in groups:
        assert group["hparams"] == place_with_job.job().hparams and group["hparams"]["world"] == 2
        values = {metric["name"]["tag"]: metric["value"] for metric in group["metricValues"]}
        assert values == {"val/top1": pytest.approx(result.top1), "val/top5": pytest.approx(result.top5)}
        assert group["sessions"][0]["status"] == "STATUS_SUCCESS"

    shutil.copytree(runs / "job-1", runs / "job-4")
    shutil.rmtree(runs / "job-3")
    place_with_job.wait_for(lambda: sorted(path.name for path in (runs / ".board").iterdir()) == ["job-1", "job-4"], 10)


def test_serve_all_without_jobs_is_refused(sandbox: Fixture) -> None:
    with pytest.raises(NoSuchJob, match="there is no job in"):
        tensorboard.serve_all(0)
    assert not (sandbox.path / "runs").exists() and not sandbox.pids()


def test_tensorboard_server_ends_when_the_command_is_killed(place_with_job: Fixture) -> None:
    server = place_with_job.start("tensorboard", "--port", "0")
    place_with_job.wait_for(lambda: place_with_job.pids("tensorboard.main"))
    server.kill()
    server.wait()
    place_with_job.wait_for(lambda: not place_with_job.pids(), 5)


def test_tensorboard_on_a_taken_port_suggests_another(place_with_job: Fixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = place_with_job.cli("tensorboard", "--port", str(port))
    assert ran.code == 1 and ran.err.startswith(f"error: port {port} is taken") and ran.err.count("\n") == 1
    assert f"--port {port + 1}" in ran.err and ran.out == "" and not place_with_job.pids()
