"""Tests of the targets of notifications: what is accepted, and that a URL, which is a secret, is never shown whole."""

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from cluster.cli import launch
from cluster.errors import BadInput
from cluster.notifications.targets import chosen_targets, describe_target, parse_target
from cluster.planning.launch_options import LaunchOptions
from cluster.state.run_folder import Run
from train.tools.option_fields import OptionError

URL = "https://hooks.slack.com/services/T0/B0/s3cr3t"


@pytest.mark.parametrize("target", ["", "  ", "a\nb", "ftp://h/s3cr3t", "https:///s3cr3t", "https://h:1e9/s3cr3t"])
def test_wrong_target_is_refused_without_showing_a_url(target: str) -> None:
    with pytest.raises(OptionError, match="'--notify': ") as error:
        LaunchOptions(notify=(target,))
    assert "s3cr3t" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        (URL, "https://hooks.slack.com/..."),
        ("https://me:s3cr3t@host:81/s3cr3t?key=s3cr3t", "https://host:81/..."),
        ("true", "true"),
        ("curl -sf -d @- https://chat.googleapis.com/s3cr3t", "curl ..."),
        ("KEY=s3cr3t /home/me/tell", "..."),
    ],
)
def test_url_is_shown_by_its_host_and_a_command_by_its_program(target: str, shown: str) -> None:
    assert describe_target(target) == shown


@pytest.mark.parametrize("target", [URL, "curl -d @- https://chat.googleapis.com/s3cr3t"])
@pytest.mark.parametrize("form", ["--notify {}", "--notify={}"])
def test_command_of_a_launch_is_kept_without_its_targets(
    target: str, form: str, hand_made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the job.json that the machines get, and in the report."""

    @dataclass(frozen=True)
    class PlanWithSpec:
        spec: Any

    spec = replace(Run.read(hand_made().run_folder.path).spec, notify=(target,))
    words = [word.replace("{}", target) for word in form.split()]
    monkeypatch.setattr("sys.argv", ["imgnet-cluster", "launch", *words, "recipe.py"])
    command = launch._with_command(cast(Any, PlanWithSpec(spec)), is_only=True).spec.command
    assert "s3cr3t" not in command and command.startswith("imgnet-cluster launch ") and "recipe.py" in command


def test_none_drops_configured_targets_and_words_of_the_shell_are_accepted() -> None:
    assert chosen_targets((URL, "none")) == ()
    accepted = ("exec true", "X=1 true", "$HOME/tell", "cat > /dev/null", "echo a://b 'a job'", URL)
    assert LaunchOptions(notify=accepted).notify == accepted
    assert chosen_targets((*accepted, URL)) == accepted


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no-such-program x", "no program no-such-program"),
        ("./tell.sh", "give the whole path, .*: /"),
        ("echo 'a", "is no command: No closing quotation"),
    ],
)
def test_command_that_could_not_run_is_refused_before_the_launch(target: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        chosen_targets([target])


def test_targets_of_a_job_are_in_one_file_that_others_cannot_read(hand_made: Any) -> None:
    run = hand_made()
    spec = Run.read(run.run_folder.path).spec
    run.run_folder.write_spec(type(spec)(**{**vars(spec), "notify": (parse_target(URL),)}))
    assert Run.read(run.run_folder.path).spec.notify == (URL,)
    files = [path for path in run.run_folder.path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert files == [run.run_folder.notify_path] and files[0].stat().st_mode & 0o077 == 0
    run.run_folder.write_spec(spec)
    assert Run.read(run.run_folder.path).spec.notify == ()
