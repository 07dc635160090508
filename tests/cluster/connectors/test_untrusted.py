"""The rules for what machines send: no answer, however made, leads out of the run folder or past a bound."""

import contextlib
import os
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cluster.connectors import untrusted
from cluster.connectors.untrusted import ArrivalFolder, BadAnswer
from train.tools.agent_protocol import LOG_FOLDERS

MARK = "0123456789abcdef"
MACHINES = ("0", "1")
PATHS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(["..", ".", "", "a", "-rf", ".hid", "a b", "\0", "logs", "é", "a.log"]), max_size=6).map(
        "/".join
    ),
    st.builds(
        "{}/{}".format,
        st.sampled_from(["status", "attempts", *LOG_FOLDERS, "..", "/", "checkpoints"]),
        st.text(alphabet=string.ascii_letters + string.digits + "./-_\n\0", max_size=30),
    ),
)
# The text of a machine made of pieces that mean something to the parsers.
NOISE = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from(
            [b"\n", b"\0", b" ", b"end\n", b"more\n", f"{MARK}\n".encode(), b"logs/a\n", b"../x\n", b"9" * 30]
        ),
    ),
    max_size=12,
).map(b"".join)


@given(PATHS)
@example("logs/../../x")
@example("status/../0.json")
@example("attempts/000001.json\n")
@example("attempts/\u0660\u0660\u0660\u0660\u0660\u0661.json")
def test_mirrored_path_stays_below_the_run_folder(path: str) -> None:
    if untrusted.is_mirrored_path(path, MACHINES):
        parts = path.split("/")
        assert parts[0] in ("status", "attempts", *LOG_FOLDERS) and 2 <= len(parts) <= 4
        assert all(part[0] not in ".-" for part in parts[1:]) and path.isascii() and path.isprintable()
        assert Path(os.path.normpath(f"/run/{path}")) == Path(f"/run/{path}") and " " not in path
        assert parts[0] != "status" or path in ("status/0.json", "status/1.json")


@pytest.mark.parametrize(("path", "is_mirrored"), [
    *((path, True) for path in (
        "status/0.json", "attempts/000001.json", "metrics/000001.jsonl", "logs/000001/rank-0.log", "logs/setup-0.log",
        "logs/val-000002.json", "events/events.out.tfevents.1700000000.ip-10-0-0-1.ec2.internal.77.0",
        "ids/000002-rank-3.jsonl",
    )),
    *((path, False) for path in (
        "logs/evil.py", "logs/__pycache__/evil.pyc", "events/evil.abi3.so", "status/0.py",  # Python could import them
        "metrics/000001.jsonl/x", "ids/000001-rank-0.jsonl/x", "logs/agent-0.jsonl/a/b",  # folders in place of files
    )),
])  # fmt: skip
def test_paths_of_the_project_are_mirrored_and_others_are_not(path: str, is_mirrored: bool) -> None:
    assert untrusted.is_mirrored_path(path, MACHINES) is is_mirrored


@given(NOISE, st.dictionaries(st.sampled_from(["logs/a", "metrics/b"]), st.integers(0, 1 << 33)))
def test_parse_new_bytes_gives_mirrored_files_or_bad_answer(noise: bytes, known_sizes: dict[str, int]) -> None:
    with contextlib.suppress(BadAnswer):
        answer = untrusted.parse_new_bytes(noise, MARK, known_sizes, MACHINES)
        for path, content in answer.contents.items():
            assert untrusted.is_mirrored_path(path, MACHINES)
            assert known_sizes.get(path, 0) + len(content) <= untrusted.MAX_FILE_BYTES


@given(st.dictionaries(st.sampled_from(["status/0.json", "attempts/000001.json", "logs/a"]), st.binary(max_size=50)))
def test_parse_new_bytes_returns_what_an_intact_machine_prints(files: dict[str, bytes]) -> None:
    printed = b"Welcome!\n" + b"".join(f"{MARK}\n{path}\n".encode() + data for path, data in files.items())
    for trailer, is_complete in ((b"end\n", True), (b"more\n", False)):
        answer = untrusted.parse_new_bytes(printed + f"{MARK}\n".encode() + trailer, MARK, {}, MACHINES)
        assert (answer.contents, answer.is_complete) == (files, is_complete)
    if files:
        with pytest.raises(BadAnswer, match="ends in another form"):
            untrusted.parse_new_bytes(printed, MARK, {}, MACHINES)


def answer_of(*files: tuple[str, bytes]) -> bytes:
    return b"".join(f"{MARK}\n{path}\n".encode() + data for path, data in files) + f"{MARK}\nend\n".encode()


@pytest.mark.parametrize("stdout, rule", [
    (answer_of(("logs/a", b"1"), ("logs/a", b"2")), "has logs/a twice"),
    (answer_of(("status/0.json", bytes(untrusted.MAX_RECORD_BYTES + 1))), "makes status/0.json 0.1 MB long"),
    (answer_of(("attempts/000001.json", bytes(untrusted.MAX_RECORD_BYTES + 1))), "makes attempts/000001.json 0.1 MB"),
    (answer_of(("logs/full", b"1")), "makes logs/full 4295.0 MB long"),
    (answer_of(("logs/\x1b]0;evil\x07", b"1")), r"names the file 'logs/ \]0;evil', which is not one of the job's"),
    (answer_of(("status/2.json", b"{}")), "names the file 'status/2.json'"),
])  # fmt: skip
def test_parse_new_bytes_names_the_broken_rule(stdout: bytes, rule: str) -> None:
    with pytest.raises(BadAnswer, match=rule):
        untrusted.parse_new_bytes(stdout, MARK, {"logs/full": untrusted.MAX_FILE_BYTES}, MACHINES)


def test_parse_new_bytes_bounds_all_attempt_files_together() -> None:
    known_sizes = {f"attempts/{number:06d}.json": untrusted.MAX_RECORD_BYTES for number in range(1, 1025)}
    assert untrusted.parse_new_bytes(answer_of(("logs/a", b"1")), MARK, known_sizes, MACHINES).contents
    with pytest.raises(BadAnswer, match=r"makes the attempt files 67\.1 MB long together"):
        untrusted.parse_new_bytes(answer_of(("attempts/001025.json", b"{}")), MARK, known_sizes, MACHINES)


def test_parse_new_bytes_bounds_the_number_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "MAX_FILE_COUNT", 2)
    stdout = answer_of(("logs/b", b""), ("logs/c", b""))
    with pytest.raises(BadAnswer, match="has more than 2 files"):
        untrusted.parse_new_bytes(stdout, MARK, {"logs/a": 0}, MACHINES)
    stdout = answer_of(("status/0.json", b"{}"), ("logs/b", b"1"))
    assert len(untrusted.parse_new_bytes(stdout, MARK, {"logs/a": 0, "logs/b": 0}, MACHINES).contents) == 2


@given(NOISE)
def test_parse_listing_gives_paths_below_or_bad_answer(noise: bytes) -> None:
    with contextlib.suppress(BadAnswer):
        for path, size in untrusted.parse_listing(noise).items():
            assert untrusted.is_below(path) and 0 <= size < 10**18


@pytest.mark.parametrize(
    "entry", ["5 ./../x", "5 ./a/../../x", "5 /etc/passwd", "5 .//etc", "x ./a", "-5 ./a", "5 ", f"{10**18} ./a"]
)
def test_parse_listing_refuses(entry: str) -> None:
    with pytest.raises(BadAnswer, match="which is not the size and path of a file in the folder"):
        untrusted.parse_listing(f"{entry}\0".encode())


@given(st.binary(max_size=60))
@example(b"1 5 5\n")
@example(b"1 -5 5\n")
@example(b"0 " + b"9" * 5000 + b" 1\n")
def test_parse_exit_gives_bounded_sizes_or_bad_answer(noise: bytes) -> None:
    with contextlib.suppress(BadAnswer):
        parsed = untrusted.parse_exit("abc", b"hello\nabc " + noise, 1000)
        if parsed:
            assert 0 <= parsed[0].stdout_bytes + parsed[0].stderr_bytes <= 1000 and parsed[1] > 0


def test_checkpoint_age_grows_with_time() -> None:
    names = ["000001/step-9.pt", "000002/resume-00000009-abc.pt", "000002/step-00000002.pt", "000002/step-10.pt"]
    assert sorted(reversed(names), key=lambda name: untrusted.checkpoint_age(name) or ()) == names


@given(st.binary(max_size=60))
def test_texts_are_one_printable_line(text: bytes) -> None:
    assert untrusted.one_line(text).isprintable()
    with contextlib.suppress(BadAnswer):
        path = untrusted.absolute_path(text)
        assert path[0] == "/" and path.isprintable()


# --- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [
    *("../x", "/x", "a/../../x", "a//b", "", ".", "a/.", "a\0b"),
    *("link/a", "link/deeper/a", "logs/link/a"),
])  # fmt: skip
def test_arrival_folder_writes_nothing_outside_of_itself(tmp_path: Path, path: str) -> None:
    victim, folder = tmp_path / "victim", ArrivalFolder(tmp_path / "run")
    victim.mkdir()
    (folder.path / "logs").mkdir(parents=True)
    for link in ("link", "logs/link"):
        (folder.path / link).symlink_to(victim)
    for write in (
        lambda: folder.append(path, 0, b"evil"),
        lambda: folder.overwrite(path, b"evil"),
        lambda: folder.create(path, lambda file: file.write(b"evil")),
    ):
        with pytest.raises((OSError, ValueError), match=r"symbolic link or not a regular file; remove it|stay below"):
            write()
    assert not list(victim.iterdir()) and folder.sizes(["logs", "link"]) == {}
    assert {found.name for found in tmp_path.rglob("*")} == {"victim", "run", "logs", "link"}


def test_arrival_folder_writes_into_regular_files_only(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    folder = ArrivalFolder(tmp_path / "run")
    (folder.path / "logs").mkdir(parents=True)
    (folder.path / "logs/link").symlink_to(victim)
    os.mkfifo(folder.path / "logs/fifo")  # its reader is not waited for
    for path in ("logs/link", "logs/fifo"):
        for write in (lambda path=path: folder.append(path, 0, b"x"), lambda path=path: folder.overwrite(path, b"x")):
            with pytest.raises(OSError, match="symbolic link or not a regular file"):
                write()
    assert folder.sizes(["logs"]) == {}
    folder.create("logs/link", lambda file: file.write(b"new"))  # replaces the link itself
    assert victim.read_bytes() == b"mine" and not (folder.path / "logs/link").is_symlink()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.data())
def test_append_in_any_order_writes_each_byte_once(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    folder = ArrivalFolder(tmp_path)
    (tmp_path / "a").unlink(missing_ok=True)
    for _ in range(10):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, len(content)))
        size = folder.append("a", start, content[start:end])
        assert (tmp_path / "a").read_bytes() == content[:size]
    folder.append("a", size, content[size:])
    assert (tmp_path / "a").read_bytes() == content


def test_create_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    folder = ArrivalFolder(tmp_path)
    folder.create("a/b", lambda file: file.write(b"old"))

    def fail(file: object) -> None:
        raise BadAnswer("lies")

    with pytest.raises(BadAnswer):
        folder.create("a/b", fail)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == {"b": b"old"}
