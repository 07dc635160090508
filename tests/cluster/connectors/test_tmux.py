"""Sessions on the private server, by the real tmux: words arrive, and nobody else's session is touched."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors import tmux
from cluster.errors import ClusterError

Fixture = Any
TELL = (
    "import json, os, sys, time; from pathlib import Path; to = Path(sys.argv[1]); "
    "text = json.dumps({'argv': sys.argv[2:], 'environ': dict(os.environ), 'cwd': os.getcwd()}); "
    "Path(str(to) + '.part').write_text(text); Path(str(to) + '.part').rename(to); time.sleep(1000)"
)
WORDS = [
    *("", " ", "a b", "'", '"', 'it\'s "both"', "\\", "\\n", "$HOME", "${HOME}", "`id`", "$(id)", "*", "~", "!"),
    *(";", "\\;", "a;", "; kill-server", "|", "&", "#", "#{pane_id}", "#S", "#(id)", "%", "%1", "100%", "{", "}"),
    *("\n", "two\nlines", "\t", "-d", "--", "ä", "="),
]


@pytest.fixture
def told(place: Fixture) -> Any:
    """Start something in a session or a window that tells what it got, and return that."""

    def ask(name: str, run: Path, words: list[str], window: str = "first", more: bool = False) -> Any:
        to = place.path / f"told-{name}-{window}"
        argv = [sys.executable, "-c", TELL, str(to), *words]
        tmux.add_window(name, window, argv) if more else tmux.start_session(name, run, window, argv)
        place.wait_for(to.exists)
        return json.loads(to.read_text())

    return ask


def test_every_word_arrives_as_it_is_in_a_session_and_in_a_window(place: Fixture, told: Fixture) -> None:
    run = place.path / "runs/job-1"
    assert told("job-1", run, WORDS)["argv"] == WORDS
    assert told("job-1", run, WORDS, window="second", more=True)["argv"] == WORDS
    assert place.tmux("list-windows", "-t", "=job-1", "-F", "#W").split() == ["first", "second"]


@pytest.mark.parametrize("word", ["", "a;", ";", "'", "#S"])
def test_the_last_word_arrives_too(place: Fixture, told: Fixture, word: str) -> None:
    assert told("job-1", place.path, ["first", word])["argv"] == ["first", word]


def test_a_session_is_found_by_its_whole_name_and_its_folder(place: Fixture, told: Fixture) -> None:
    run = place.path / "runs/job-1"
    told("job-1", run, [])
    assert tmux.is_owned_by("job-1", run)
    for name, folder in (("job-1", run.parent), ("job-", run), ("job", run), ("job-11", run), ("*", run)):
        assert not tmux.is_owned_by(name, folder)
        tmux.kill_session(name, folder)
    assert tmux.is_owned_by("job-1", run)
    told("job-11", run.with_name("job-11"), [])
    tmux.kill_session("job-1", run)
    assert not tmux.is_owned_by("job-1", run) and tmux.is_owned_by("job-11", run.with_name("job-11"))
    place.wait_for(lambda: len(place.at_work()) == 1)


def test_a_session_of_the_same_name_in_another_folder_is_not_taken_and_not_ended(place: Fixture, told: Fixture) -> None:
    run, other = place.path / "runs/job-1", place.path / "elsewhere/runs/job-1"
    told("job-1", run, [])
    before = place.at_work()
    with pytest.raises(ClusterError, match="job-1") as caught:
        tmux.start_session("job-1", other, "first", ["sleep", "1000"])
    assert "\n" not in str(caught.value)
    tmux.kill_session("job-1", other)
    assert tmux.is_owned_by("job-1", run) and place.at_work() == before


def test_nothing_is_ended_where_there_is_nothing(place: Fixture) -> None:
    tmux.kill_session("job-1", place.path)
    assert not tmux.is_owned_by("job-1", place.path)
    assert not place.pids("tmux"), "asking started a server"


def test_a_window_of_no_session_is_refused_in_one_line(place: Fixture, told: Fixture) -> None:
    told("job-1", place.path, [])
    for name in ("job-2", "job"):
        with pytest.raises(ClusterError) as caught:
            tmux.add_window(name, "more", ["sleep", "1000"])
        assert "\n" not in str(caught.value)


def test_a_session_has_the_environment_and_the_folder_of_who_started_it(
    place: Fixture, told: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTH", "of the first; $HOME #{x}")
    monkeypatch.setenv("OF_THE_FIRST", "1")
    first = told("job-1", place.path / "1", [])
    monkeypatch.delenv("OF_THE_FIRST")
    monkeypatch.setenv("BOTH", "of the second")
    monkeypatch.setenv("OF_THE_SECOND", "2")
    (place.path / "second").mkdir()
    monkeypatch.chdir(place.path / "second")
    second = told("job-2", place.path / "2", [])
    window = told("job-1", place.path / "1", [], window="later", more=True)
    for one in (first, window):
        assert one["environ"]["BOTH"] == "of the first; $HOME #{x}" and one["environ"]["OF_THE_FIRST"] == "1"
        assert "OF_THE_SECOND" not in one["environ"]
    assert second["environ"]["BOTH"] == "of the second" and second["environ"]["OF_THE_SECOND"] == "2"
    assert "OF_THE_FIRST" not in second["environ"]
    assert (first["cwd"], second["cwd"]) == (str(place.path), str(place.path / "second"))


def test_a_command_that_ends_at_once_is_no_error(place: Fixture) -> None:
    tmux.start_session("job-1", place.path, "first", ["true"])
    place.wait_for(lambda: not tmux.is_owned_by("job-1", place.path))


def test_a_configuration_of_the_user_ends_nothing(place: Fixture, told: Fixture) -> None:
    lines = ["default-shell /bin/false", "destroy-unattached on", "exit-unattached on", "remain-on-exit on"]
    (Path(place.env["HOME"]) / ".tmux.conf").write_text("".join(f"set -g {one}\n" for one in [*lines, "base-index 1"]))
    assert told("job-1", place.path, ["a"])["argv"] == ["a"]
    assert told("job-1", place.path, ["b"], "second", more=True)["argv"] == ["b"]
    assert tmux.is_owned_by("job-1", place.path)


@pytest.mark.parametrize("name", ["a;", "#{pane_id}", "#S", "it's", "ä b"])
def test_the_folder_of_a_session_may_have_any_name(
    place: Fixture, told: Fixture, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.path / name).mkdir()
    monkeypatch.chdir(place.path / name)
    assert told("job-1", place.path, [])["cwd"] == str(place.path / name)


def test_a_server_that_does_not_answer_is_one_line_and_no_wait_for_ever(
    place: Fixture, told: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tmux, "SERVER_TIMEOUT_SECONDS", 0.3)
    told("job-1", place.path, [])
    server = int(place.tmux("display-message", "-p", "#{pid}"))
    os.kill(server, signal.SIGSTOP)
    try:
        with pytest.raises(ClusterError, match="does not answer"):
            tmux.kill_session("job-1", place.path)
    finally:
        os.kill(server, signal.SIGCONT)
    assert tmux.is_owned_by("job-1", place.path)


def test_another_server_of_the_user_is_left_alone(place: Fixture, told: Fixture) -> None:
    told("job-1", place.path, [])
    assert place.tmux("list-sessions").startswith("job-1:")
    assert [path.name for path in Path(place.tmux_folder).rglob("*") if path.is_socket()] == ["imgnet"]


def test_attach_shows_exactly_this_session(place: Fixture, told: Fixture) -> None:
    words = tmux.attach_argv("job-1")
    assert words[:3] == ["tmux", "-L", "imgnet"] and words[-1].startswith("=job-1")


def test_without_tmux_one_line_says_what_to_install(place: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place.path))
    for call in (tmux.require_tmux, lambda: tmux.start_session("job-1", place.path, "first", ["true"])):
        with pytest.raises(ClusterError, match="tmux is missing; install it") as caught:
            call()
        assert "\n" not in str(caught.value)
    tmux.kill_session("job-1", place.path)
    assert os.environ["PATH"] == str(place.path)
