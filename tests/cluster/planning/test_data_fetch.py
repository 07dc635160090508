"""What a job fetches, from where to where: the plan, the words for its machines, the commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.packed_sets import content, make_set

from cluster.agent.data import fetch_command
from cluster.errors import BadInput, ClusterError
from cluster.planning import data_fetch
from cluster.planning.data_fetch import list_parts
from cluster.planning.resolve import plan
from cluster.state import timeline
from cluster.state.spec import JobSpec
from train.data.manifest import FetchError
from train.recipe import Data, Model, Phase, Recipe

Fixture = Any


def recipe(*copies: int | None) -> Recipe:
    """A recipe with a phase for each of these copies."""
    phases = [Phase(epochs=(i, i + 1), size=32, batch=2, lr=0.1, copy=copy) for i, copy in enumerate(copies)]
    data = Data(name="d", root="/nowhere", train=1000, val=10)
    return Recipe(name="tiny", data=data, model=Model(name="resnet10_tiny"), gpus=1, phases=phases)


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set with copies of 32 and 64 pixels."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make_set(tmp_path / "set", images=30, each=2000)
    for short in (32, 64):
        make_set(tmp_path / f"set-sz/{short}", images=30, each=10 * short)
    return tmp_path / "set"


# --- the plan --------------------------------------------------------------------------------------------------------


def test_a_job_that_fetches_trains_on_what_it_has_fetched(sets: Path) -> None:
    spec = plan(recipe(32, 64), data="set", fetch="disk").spec
    assert (spec.data_source, spec.copies_source) == (str(sets), "")
    assert spec.data == str(sets.parent / "disk/set") and spec.copies == str(sets.parent / "disk/set-sz")
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    plain = plan(recipe(32), data="set").spec
    assert (plain.data_source, plain.data, plain.copies) == ("", str(sets), f"{sets}-sz")


def test_the_images_are_those_of_the_manifest(sets: Path) -> None:
    assert plan(recipe(32), data="set", fetch="disk").schedule.images == 30
    assert plan(recipe(32), data="set").schedule.images == 30, "where they are read as they lie, too"


def test_the_plan_says_how_much_comes_from_where_to_where(sets: Path) -> None:
    note = plan(recipe(32, 64, 32), data="set", fetch="/disk").notes[0]
    assert note.startswith("data: 32: 1") and note.endswith(
        f" kB, index only; fetched from {sets} to /disk/set of each machine before it trains"
    )
    assert note.count(" kB") == 3
    assert " kB; fetched" in plan(recipe(32, None), data="set", fetch="/disk").notes[0], "the images, too"
    lacking = plan(recipe(32, 96), data="set", fetch="/disk").notes[0]
    assert "96: not there; full: " in lacking and "index only" not in lacking


@pytest.mark.parametrize("copies, words", [
    ((None,), "--sizes full --else-full"),
    ((32, None), "--sizes full,32 --else-full"),
    ((64, 32, 64), "--sizes full,32,64 --else-full --index-only"),
])  # fmt: skip
def test_a_machine_fetches_what_the_phases_read(sets: Path, copies: tuple[int | None, ...], words: str) -> None:
    spec = plan(recipe(*copies), data="set", fetch="disk").spec
    assert " ".join(fetch_command(spec)) == f"data fetch {sets} {spec.data} {words}"


def test_copies_that_lie_elsewhere_are_fetched_from_there(sets: Path) -> None:
    sets.with_name("set-sz").rename(sets.with_name("small"))
    one = plan(recipe(32), data="set", copies="small", fetch="disk")
    assert fetch_command(one.spec)[-2:] == ["--copies", str(sets.with_name("small"))]
    assert one.spec.copies == str(sets.parent / "disk/set-sz") and "not there" not in one.notes[0]


def test_s3_is_fetched_to_the_fast_disk_of_rented_machines(sets: Path) -> None:
    rent = {"offline": True}
    one = plan(
        recipe(160), backend="aws", data="s3://bucket/sets/imagenet", rental_options={**rent, "type": "p4d.24xlarge"}
    )
    assert one.spec.data_source == "s3://bucket/sets/imagenet"
    assert (one.spec.data, one.spec.copies) == ("~/.imgnet/data/imagenet", "~/.imgnet/data/imagenet-sz")
    assert one.schedule.images == 1000, "nobody was asked"
    assert one.notes[0].startswith("data: 160; full: index only; fetched from s3://bucket/sets/imagenet to ~/.imgnet/d")
    assert one.spec.recipe.data.name == "imagenet"
    shared = plan(
        recipe(160), backend="aws", data="imagenet", fetch="/mnt/x", rental_options={**rent, "type": "p4d.24xlarge"}
    ).spec
    assert (shared.data_source, shared.data) == ("~/.imgnet/shared/imagenet", "/mnt/x/imagenet")


@pytest.mark.parametrize("place, name", [("s3://bucket/a/b/", "b"), ("s3://bucket", "bucket"), ("s3://b/", "b")])
def test_a_target_has_the_last_name_of_its_source(place: str, name: str) -> None:
    assert data_fetch.fetch_target(place, "/disk", "ssh") == Path("/disk") / name


def test_the_recipe_may_name_a_place_in_s3(sets: Path) -> None:
    from dataclasses import replace

    one = recipe(None)
    one = replace(one, data=replace(one.data, root="s3://b/imagenet"))
    assert plan(one, backend="plan").spec.data_source == "s3://b/imagenet"


def test_what_cannot_be_fetched_is_one_line_before_anything_starts(sets: Path) -> None:
    with pytest.raises(BadInput, match="s3://b/x: is fetched to the machines' disks first; say where to: --fetch DIR"):
        plan(recipe(32), data="s3://b/x")
    with pytest.raises(BadInput, match="the built-in set is drawn where it is read"):
        plan(recipe(32), data="sample", fetch="disk")
    with pytest.raises(BadInput, match=r"--fetch disk: is on the machines; say an absolute path"):
        plan(
            recipe(32),
            backend="aws",
            data="set",
            fetch="disk",
            rental_options={"offline": True, "type": "p4d.24xlarge"},
        )
    with pytest.raises(ClusterError, match="nowhere: there is no such folder"):
        plan(recipe(32), data="nowhere", fetch="disk")
    (sets / "files/train/a").mkdir(parents=True)
    with pytest.raises(ClusterError, match="has single files"):
        plan(recipe(32), data=sets / "files", fetch="disk")


# --- what a command fetches ------------------------------------------------------------------------------------------


def test_the_smallest_comes_first_and_an_index_before_all(sets: Path) -> None:
    target = Path("/disk/set")
    found = list_parts("set", target, [64, None, 32])
    assert [(one.source.name, str(one.target)) for one in found] == [
        (f"{sets}-sz/32", "/disk/set-sz/32"), (f"{sets}-sz/64", "/disk/set-sz/64"), (str(sets), "/disk/set"),
    ]  # fmt: skip
    assert [one.index_only for one in list_parts(str(sets), target, [64, None, 32], index_only=True)] == [
        True,
        False,
        False,
    ]


def test_full_size_images_take_the_place_of_a_copy_that_is_not_there_when_told_so(sets: Path) -> None:
    said: list[str] = []
    found = list_parts("set", Path("/t"), [32, None, 96], index_only=True, full_if_missing=True, say=said.append)
    assert [(one.target.name, one.index_only) for one in found] == [("32", False), ("t", False)]
    assert said == [f"{sets}-sz/96: is not there; the full-size images are fetched in place of 96"]
    with pytest.raises(FetchError, match=r"set-sz/96: there is no such folder"):
        from train.data.fetch.fetch import fetch_sets

        fetch_sets(list_parts("set", Path("/t"), [96]))


def test_the_command_fetches_checks_and_says_how_fast(place: Fixture) -> None:
    make_set(place.path / "set", images=30, each=20_000, shard=200_000)
    make_set(place.path / "set-sz/64", images=30, each=500)
    ran = place.cli("data", "fetch", "set", "disk/set", "--sizes", "full,64")
    assert ran.code == 0 and " fetched in " in ran.out and " MB/s), 0 bytes were there" in ran.out, ran
    assert content(place.path / "disk/set") == content(place.path / "set")
    assert content(place.path / "disk/set-sz/64") == content(place.path / "set-sz/64")
    assert "(100 %)" in ran.err and "kB of 8" in ran.err
    again = place.cli("data", "fetch", "set", "disk/set", "--sizes", "full,64")
    assert again.code == 0 and "0 bytes fetched, " in again.out and again.err.count("is there already") == 2
    alone = place.cli("data", "fetch", "set", "other", "--index-only")
    assert alone.code == 0 and not list((place.path / "other").rglob("*.bin"))


@pytest.mark.parametrize("words, code, said", [
    (("nowhere", "t"), 1, "nowhere: there is no such folder"),
    (("set", "t", "--sizes", "full,x"), 2, "--sizes: must be full, or whole numbers of 32 or more"),
    (("set", "t", "--sizes", "full,16"), 2, "--sizes: must be full"),
    (("set", "t", "--sizes", "128"), 1, "set-sz/128: there is no such folder"),
    (("s3://", "t"), 1, "s3://: is no place in S3"),
    (("set", "set/manifest.json"), 1, "set/manifest.json: File exists"),
])  # fmt: skip
def test_what_the_command_cannot_do_is_one_line(place: Fixture, words: tuple[str, ...], code: int, said: str) -> None:
    make_set(place.path / "set")
    (place.path / "set/manifest.json").touch()
    ran = place.cli("data", "fetch", *words)
    assert (ran.code, ran.out) == (code, "") and said in ran.err and ran.err.count("\n") == 1, ran


# --- its seconds -----------------------------------------------------------------------------------------------------


def test_the_seconds_of_fetching_stand_in_the_machines_way_to_its_first_step(hand_made: Fixture) -> None:
    run = hand_made()
    states = ("setup", "fetching", "warming", "waiting", "starting", "joining", "warming", "training")
    run.history(*((state, 100.0 + 10 * number) for number, state in enumerate(states)))
    run.folders.path.joinpath("logs").mkdir()
    home = run.folders.path / "logs/agent-0.jsonl"
    home.write_text((run.folders.shared / "logs/agent-0.jsonl").read_text())
    assert timeline.startup_seconds(run.folders.path, "0")["fetch"] == 10
    assert run.job.machine_details()["0"]["seconds"]["fetch"] == 10
    run.says("fetching", doing="fetching s3://b/x", progress="fetching s3://b/x: 1 MB of 2 MB (50 %)", phase="warming")
    with run.agent_at_work():
        status = run.job.status()
    assert (status["state"], status["doing"], status["progress"][-6:]) == ("setup", "fetching s3://b/x", "(50 %)")
