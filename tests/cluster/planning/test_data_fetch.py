"""Data fetch: its plan, what a machine of a job fetches, and the command itself."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.packed_sets import content, make_set

from cluster.errors import ClusterError
from cluster.planning.data_fetch import sets_of_job
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import plan
from cluster.state.spec import JobSpec
from train.recipe import Data, Model, Phase, Recipe


def recipe(*copies: int | None) -> Recipe:
    """A recipe with a phase for each of these copy sizes (None: full size)."""
    phases = [Phase(epochs=(i, i + 1), size=32, batch=2, lr=0.1, copy=copy) for i, copy in enumerate(copies)]
    data = Data(name="d", root="/nowhere", train=1000, val=10)
    return Recipe(name="tiny", data=data, model=Model(name="resnet10_tiny"), gpus=1, phases=phases)


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make_set(tmp_path / "set", images=30, each=2000)
    for short_side in (32, 64):
        make_set(tmp_path / f"set-sz/{short_side}", images=30, each=10 * short_side)
    return tmp_path / "set"


def test_plan_with_fetch_trains_on_the_target_folder(sets: Path) -> None:
    planned = plan(recipe(32, 64), make_launch_options(data="set", fetch="disk"))
    spec = planned.spec
    assert (spec.data_source, spec.copies_source, planned.recipe_schedule.images) == (str(sets), "", 30)
    assert spec.train.data == str(sets.parent / "disk/set") and spec.train.copies == str(sets.parent / "disk/set-sz")
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    plain = plan(recipe(32), make_launch_options(data="set"))
    assert (plain.spec.data_source, plain.spec.train.data, plain.spec.train.copies) == ("", str(sets), f"{sets}-sz")
    assert plain.recipe_schedule.images == 30, "also without a fetch"


@pytest.mark.parametrize(("copies", "sizes"), [
    ((32, 64, 32), r"32: 1\S* kB; 64: \S+ kB; full: \S+ kB, index only"),
    ((32, 96), r"32: 1\S* kB; 96: not found; full: \S+ kB"),
])  # fmt: skip
def test_plan_note_names_source_target_and_sizes(sets: Path, copies: tuple[int | None, ...], sizes: str) -> None:
    planned = plan(recipe(*copies), make_launch_options(data="set", fetch="/disk"))
    assert re.match(f"data: {sizes}; each machine fetches it from {sets} to /disk/set", planned.notes[0])


def test_plan_s3_is_fetched_to_the_instances_fast_disk(sets: Path) -> None:
    def planned(**options: Any) -> Any:
        options = {"backend": "aws", "types": ["p4d.24xlarge"], **options}
        return plan(recipe(160), make_launch_options(**options), offline=True)

    fetched = planned(data="s3://bucket/sets/imagenet")
    train = fetched.spec.train
    assert fetched.spec.data_source == "s3://bucket/sets/imagenet" and fetched.spec.recipe.data.name == "imagenet"
    assert (train.data, train.copies) == ("~/.imgnet/data/imagenet", "~/.imgnet/data/imagenet-sz")
    assert fetched.recipe_schedule.images == 1000, "AWS was not asked"
    assert fetched.notes[0].startswith("data: 160; full: index only; each machine fetches it from s3://bucket/sets/")
    for source, name in (("s3://bucket/a/b/", "b"), ("s3://bucket", "bucket")):
        assert planned(data=source).spec.train.data == f"~/.imgnet/data/{name}"
    shared = planned(data="imagenet", fetch="/mnt/x").spec
    assert (shared.data_source, shared.train.data) == ("~/.imgnet/shared/imagenet", "/mnt/x/imagenet")


@pytest.mark.parametrize(("options", "message"), [
    ({"data": "s3://b/x"},
     r"s3://b/x: the machines copy this data set to their own disks .*; name the folder there: --fetch DIR"),
    ({"data": "sample", "fetch": "disk"}, "--fetch does not work with the built-in data set"),
    ({"data": "set", "fetch": "disk", "backend": "aws", "types": ["p4d.24xlarge"]},
     r"--fetch disk: is a folder on the machines; give an absolute path"),
    ({"data": "nowhere", "fetch": "disk"}, "nowhere: there is no such folder"),
    ({"data": "set/files", "fetch": "disk"}, "has single files"),
])  # fmt: skip
def test_plan_impossible_fetches_are_refused(sets: Path, options: Any, message: str) -> None:
    (sets / "files/train/a").mkdir(parents=True)
    with pytest.raises(ClusterError, match=message):
        plan(recipe(32), make_launch_options(**options), offline=True)


@pytest.mark.parametrize(("copies", "expected", "message"), [
    ((None,), ["set"], ""),
    ((32, None), ["small/32", "set"], ""),
    ((64, 32, 64), ["set, index only", "small/32", "small/64"], ""),
    ((32, 96), ["small/32", "set"], "small/96: not found; fetching the full-size images instead of 96"),
])  # fmt: skip
def test_sets_of_job_are_what_the_phases_read_with_an_index_first(
    sets: Path, copies: tuple[int | None, ...], expected: list[str], message: str
) -> None:
    sets.with_name("set-sz").rename(sets.with_name("small"))
    spec = plan(recipe(*copies), make_launch_options(data="set", copies="small", fetch="disk")).spec
    said: list[str] = []
    parts = sets_of_job(spec, said.append)
    names = [str(Path(part.source.name).relative_to(sets.parent)) for part in parts]
    assert [name + ", index only" * part.index_only for name, part in zip(names, parts, strict=True)] == expected
    targets = [str(part.target.relative_to(sets.parent / "disk")) for part in parts]
    assert targets == [name.replace("small", "set-sz") for name in names]
    assert "".join(said) == (f"{sets.parent}/{message}" if message else "")


def test_fetch_cli_copies_the_set_once_and_prints_the_rate(sandbox: Any) -> None:
    make_set(sandbox.path / "set", images=30, each=20_000, shard=200_000)
    make_set(sandbox.path / "set-sz/64", images=30, each=500)
    ran, again = (sandbox.cli("data", "fetch", "set", "disk/set", "--sizes", "full,64") for _ in range(2))
    assert ran.code == 0 and " fetched in " in ran.out and " MB/s), 0 bytes already present" in ran.out, ran
    assert content(sandbox.path / "disk/set") == content(sandbox.path / "set")
    assert content(sandbox.path / "disk/set-sz/64") == content(sandbox.path / "set-sz/64")
    assert again.code == 0 and "0 bytes fetched, " in again.out and again.err.count("is there already") == 2


def test_startup_seconds_include_the_fetch(hand_made: Any) -> None:
    run = hand_made()
    states = ("setup", "fetching", "warming", "waiting", "starting", "joining", "warming", "training")
    run.write_state_log(*((state, 100.0 + 10 * number) for number, state in enumerate(states)))
    run.copy_logs()
    assert run.job.machine_details()["0"].seconds["fetching"] == 10
    run.write_status("fetching", doing="fetching s3://b/x", progress="s3://b/x: 1 MB of 2 MB (50 %)", phase="warming")
    with run.hold_agent_lock():
        status = run.job.status()
    assert (status.state, status.doing, status.progress[-6:]) == ("setup", "fetching s3://b/x", "(50 %)")
