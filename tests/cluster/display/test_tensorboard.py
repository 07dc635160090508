"""TensorBoard as we start it: a finished job's scalars over HTTP, on this computer only, nothing left afterwards."""

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
def copy(place: Fixture, finished: Fixture) -> Any:
    """A place with a finished job of its own."""
    shutil.copytree(finished.path / "runs", place.path / "runs")
    return place


@pytest.fixture
def start(copy: Fixture) -> Any:
    """Serve all jobs of the place, from Python, and return the address."""
    started = []

    def serve() -> str:
        words = [sys.executable, "-c", "from cluster.display.tensorboard import serve_all; serve_all(0)"]
        with (copy.path / "board").open("wb") as said:
            started.append(subprocess.Popen(words, stdout=said, stderr=said, cwd=copy.path, env=copy.env))
        text = copy.wait_for((copy.path / "board").read_text)
        assert text.startswith("http://127.0.0.1:") and f"all jobs of {copy.path / 'runs'}, until" in text, text
        return str(text.split()[0])

    yield serve
    for one in started:
        one.send_signal(signal.SIGINT)
        assert one.wait(20) == 0
    assert (copy.path / "board").read_text().endswith("TensorBoard stopped; the job goes on\n")


def listening(port: int) -> list[str]:
    """The addresses, in hexadecimal, at which somebody listens on a port."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [words[1].split(":")[0] for words in lines if words[1].endswith(f":{port:04X}") and words[3] == "0A"]


def test_the_scalars_of_a_job_are_served_with_the_images_seen_as_step(copy: Fixture) -> None:
    board = copy.start("tensorboard", "job-1", "--port", "0")
    url = copy.wait_for(lambda: copy.said().count("\n") and copy.said().split()[0])
    assert url.startswith("http://127.0.0.1:") and "until Ctrl-C" in copy.said()
    port = int(url.rstrip("/").rsplit(":", 1)[1])
    assert listening(port) == ["0100007F"], "it listens beyond this computer"

    def ask(path: str, **words: str) -> Any:
        with urlopen(f"{url}{path}?{urlencode(words)}", timeout=30) as answer:
            return json.load(answer)

    tags = copy.wait_for(lambda: ask("data/plugin/scalars/tags"), 30)
    (run,) = tags
    assert {"train/loss", "sizes/lr", "times/images_per_second", "val/loss", "val/top1"} <= tags[run].keys()
    for tag in tags[run]:
        served = [(step, value) for _, step, value in ask("data/plugin/scalars/scalars", run=run, tag=tag)]
        measured = copy.job().scalars(tag)
        assert [step for step, _ in served] == [images for images, _ in measured] and served[-1][0] == 180
        assert [value for _, value in served] == pytest.approx([value for _, value in measured], rel=1e-6)

    board.send_signal(signal.SIGINT)
    assert board.wait(20) == 0
    assert copy.said().endswith("TensorBoard stopped; the job goes on\n") and "Traceback" not in copy.said()
    copy.wait_for(lambda: not copy.pids(), 5)
    assert not listening(port)


def test_all_jobs_are_served_side_by_side_with_their_settings_and_accuracies(copy: Fixture, start: Fixture) -> None:
    runs = copy.path / "runs"
    shutil.copytree(runs / "job-1", runs / "job-3")
    (runs / "job-3/job.json").write_text((runs / "job-1/job.json").read_text().replace("job-1", "job-3"))
    (runs / "job-2").mkdir()  # of a launch that was killed
    url = start()

    def ask(path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode() if body else None
        request = Request(f"{url}data/{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=30) as answer:
            return json.load(answer)

    copy.wait_for(lambda: set(ask("runs")) == {"job-1", "job-3"}, 30)
    experiment = ask("plugin/hparams/experiment", {"experimentName": "0"})
    names = {one["name"] for one in experiment["hparamInfos"]}
    assert {"model", "lr", "batch_first", "momentum", "world"} <= names
    assert [one["name"]["tag"] for one in experiment["metricInfos"]] == ["val/top1", "val/top5"]
    asked = {
        "experimentName": "0", "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_RUNNING"],
        "colParams": [], "startIndex": 0, "sliceSize": 10,
    }  # fmt: skip
    groups = ask("plugin/hparams/session_groups", asked)["sessionGroups"]
    result = copy.job().result
    assert sorted(one["name"] for one in groups) == ["job-1", "job-3"]
    for one in groups:
        assert one["hparams"] == copy.job().hparams and one["hparams"]["world"] == 2
        values = {metric["name"]["tag"]: metric["value"] for metric in one["metricValues"]}
        assert values == {"val/top1": pytest.approx(result["top1"]), "val/top5": pytest.approx(result["top5"])}
        assert one["sessions"][0]["status"] == "STATUS_SUCCESS"

    shutil.copytree(runs / "job-1", runs / "job-4")
    shutil.rmtree(runs / "job-3")
    copy.wait_for(lambda: sorted(path.name for path in (runs / ".board").iterdir()) == ["job-1", "job-4"], 10)


def test_without_jobs_there_is_nothing_to_serve(place: Fixture) -> None:
    with pytest.raises(NoSuchJob, match="there are none"):
        tensorboard.serve_all(0)
    assert not (place.path / "runs").exists() and not place.pids()


def test_killing_the_command_leaves_no_server(copy: Fixture) -> None:
    board = copy.start("tensorboard", "--port", "0")
    copy.wait_for(lambda: copy.pids("tensorboard.main"))
    board.kill()
    board.wait()
    copy.wait_for(lambda: not copy.pids(), 5)


def test_a_port_that_is_taken_is_one_line_that_names_another(copy: Fixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = copy.cli("tensorboard", "--port", str(port))
    assert ran.code == 1 and ran.err.startswith(f"error: port {port} is taken") and ran.err.count("\n") == 1
    assert f"--port {port + 1}" in ran.err and ran.out == "" and not copy.pids()
