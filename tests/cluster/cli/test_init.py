"""`init`: the files that it writes, and that it replaces none. tests/end_to_end/test_own_project.py trains them."""

from pathlib import Path
from typing import Any

from cluster.machines.user_project import list_files

FILES = {"recipe.py", "nets.py", "losses.py", "README.md", ".gitignore"}


def test_init_writes_a_project_that_can_be_planned(sandbox: Any) -> None:
    ran = sandbox.cli("init", "birds")
    assert ran.code == 0 and ran.err == "train it: cd birds; imgnet-cluster launch --local recipe.py\n", ran
    assert {Path(line).name for line in ran.out.splitlines()} == FILES
    assert {path.name for path in (sandbox.path / "birds").iterdir()} == FILES
    planned = sandbox.cli("launch", "--local", "--dry-run", "birds/recipe.py")
    assert planned.code == 0 and "birds: nets:small" in planned.out and "note" not in planned.out, planned
    rented = sandbox.cli("launch", "--dry-run", "birds/recipe.py")
    assert rented.code == 0 and "rents 1 x g6.xlarge (1 x L4 each)" in rented.out, "as many GPUs as the recipe is for"
    assert set(list_files(sandbox.path / "birds")) == FILES - {".gitignore"}


def test_init_replaces_no_file(sandbox: Any) -> None:
    (sandbox.path / "losses.py").write_text("mine")
    ran = sandbox.cli("init", ".")
    assert (ran.code, ran.out) == (2, "") and ran.err.startswith("error: losses.py: exists already"), ran
    assert (sandbox.path / "losses.py").read_text() == "mine" and not (sandbox.path / "recipe.py").exists()
    (sandbox.path / "losses.py").unlink()
    (sandbox.path / "photo.jpg").touch()
    assert "kept as it was: " in (ran := sandbox.cli("init")).err and "photo.jpg" in ran.err
    (sandbox.path / "file").write_text("")
    ran = sandbox.cli("init", "file/below")
    assert ran.code == 1 and ran.err == "error: file/below: Not a directory\n", ran
