"""The tensorboard command: serves a finished job's scalars on this computer only, and leaves no process."""

import json
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from cluster.display import tensorboard
from train.recipe import Command


@pytest.fixture
def place_with_job(sandbox: Any, finished: Any) -> Any:
    shutil.copytree(finished.path / "runs", sandbox.path / "runs")
    return sandbox


@pytest.fixture
def serve(place_with_job: Any) -> Any:
    """Start TensorBoard with options; return its URL and what requests JSON of it. It ends on Ctrl-C, at the end."""
    servers = []

    def start(*options: str) -> tuple[str, Callable[..., Any]]:
        place_with_job.env.update(http_proxy="http://127.0.0.1:1", no_proxy="")  # it does not know this computer
        servers.append(place_with_job.start("tensorboard", *options, "--port", "0"))
        url = place_with_job.wait_for(
            lambda: "until Ctrl-C\n" in place_with_job.output() and place_with_job.output().split()[0]
        )

        def get_json(path: str, body: Any = None, **query: str) -> Any:
            data = json.dumps(body).encode() if body else None
            request = Request(f"{url}data/{path}?{urlencode(query)}", data, {"Content-Type": "application/json"})
            with urlopen(request, timeout=120) as response:
                return json.load(response)

        return url, get_json

    yield start
    (server,) = servers
    server.send_signal(signal.SIGINT)
    assert server.wait(120) == 0 and "Traceback" not in place_with_job.output()
    assert place_with_job.output().endswith("TensorBoard stopped\n")  # the jobs have ended
    place_with_job.wait_for(lambda: not place_with_job.pids())


def listening_addresses(port: int) -> list[str]:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [fields[1].split(":")[0] for fields in rows if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"]


def test_tensorboard_serves_a_jobs_scalars_by_images_seen(place_with_job: Any, serve: Any) -> None:
    url, get_json = serve("job-1")
    assert url.startswith("http://127.0.0.1:")
    port = int(url.rstrip("/").rsplit(":", 1)[1])
    assert listening_addresses(port) == ["0100007F"], "it listens beyond this computer"
    tags = place_with_job.wait_for(lambda: get_json("plugin/scalars/tags"))
    (run,) = tags
    assert run == "job-1" and sorted(tags[run])[0].startswith("accuracy/")
    assert {"loss/train", "sizes/lr", "times/images_per_second", "loss/val", "accuracy/val_top1"} <= tags[run].keys()
    for tag in tags[run]:
        served = [(step, value) for _, step, value in get_json("plugin/scalars/scalars", run=run, tag=tag)]
        measured = place_with_job.job().scalars(tag)
        assert [step for step, _ in served] == [images for images, _ in measured] and served[-1][0] == 180
        assert [value for _, value in served] == pytest.approx([value for _, value in measured], rel=1e-6)


def test_tensorboard_all_shows_all_jobs_with_hparams_and_metrics(place_with_job: Any, serve: Any) -> None:
    runs = place_with_job.path / "runs"
    shutil.copytree(runs / "job-1", runs / "job-3")
    (runs / "job-3/job.json").write_text((runs / "job-1/job.json").read_text().replace("job-1", "job-3"))
    (runs / "job-2").mkdir()  # left by a launch that was killed
    _, get_json = serve("--all")
    assert f"all jobs of {runs}, until" in place_with_job.output()
    place_with_job.wait_for(lambda: set(get_json("runs")) == {"job-1", "job-3"})
    experiment = get_json("plugin/hparams/experiment", {"experimentName": "0"})
    names = {info["name"] for info in experiment["hparamInfos"]}
    assert {"model", "lr", "batch_first", "momentum", "world"} <= names
    metrics = [info["name"]["tag"] for info in experiment["metricInfos"]]
    assert metrics[0].startswith("accuracy/") and {"accuracy/val_top1", "loss/val"} < set(metrics)
    query = {
        "experimentName": "0", "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_RUNNING"],
        "colParams": [], "startIndex": 0, "sliceSize": 10,
    }  # fmt: skip
    groups = get_json("plugin/hparams/session_groups", query)["sessionGroups"]
    assert sorted(group["name"] for group in groups) == ["job-1", "job-3"]
    for group in groups:
        assert group["hparams"] == place_with_job.job().hparams and group["hparams"]["world"] == 2
        values = {metric["name"]["tag"]: metric["value"] for metric in group["metricValues"]}
        assert values["accuracy/val_top1"] == pytest.approx(place_with_job.job().result.top1)
        assert group["sessions"][0]["status"] == "STATUS_SUCCESS"
    shutil.copytree(runs / "job-1", runs / "job-4")
    place_with_job.wait_for(lambda: "job-4" in get_json("runs"))


def test_arguments_of_a_command_are_written_once_beside_its_events(hand_made: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    job = hand_made(workload=Command(argv=["python", "train.py", "--lr", "0.25", "--wide"], name="mine")).job
    (tmp_path / "links").mkdir()
    tensorboard.link_event_folders(tmp_path / "links", [job])
    assert not (job.path / "events").exists()  # the script writes no events
    (job.path / "events").mkdir()
    for _ in range(2):
        tensorboard.link_event_folders(tmp_path / "links", [job])
    assert len(list((job.path / "events").iterdir())) == 1
    events = EventAccumulator(str(job.path / "events")).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    written = parse_session_start_info_plugin_data(content).hparams
    values = (written["lr"].number_value, written["wide"].number_value, written["command"].string_value)
    assert values == (0.25, 1, "mine")


def test_damaged_job_hides_no_curves(hand_made: Any, tmp_path: Path) -> None:
    runs = [hand_made("job-1"), hand_made("job-2", given_name="wide")]
    for run in runs:
        (run.run_folder.path / "events").mkdir()
    runs[0].run_folder.spec_path.write_text("{torn")
    (tmp_path / "links").mkdir()
    tensorboard.link_event_folders(tmp_path / "links", [run.job for run in runs])
    assert sorted(path.name for path in (tmp_path / "links").iterdir()) == ["job-1", "job-2 wide"]


def test_tensorboard_server_ends_when_the_command_is_killed(place_with_job: Any) -> None:
    server = place_with_job.start("tensorboard", "--port", "0")
    place_with_job.wait_for(lambda: place_with_job.pids("tensorboard.main"))
    server.kill()
    server.wait()
    place_with_job.wait_for(lambda: not place_with_job.pids())


def test_tensorboard_on_a_taken_port_suggests_another(place_with_job: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = place_with_job.cli("tensorboard", "--port", str(port))
    assert ran.code == 1 and ran.err.startswith(f"error: port {port} is taken") and ran.err.count("\n") == 1
    assert f"--port {port + 1}" in ran.err and ran.out == "" and not place_with_job.pids()
