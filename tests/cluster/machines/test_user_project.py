"""The user's project: its folder, the files that are copied, a job's copy; what a recipe needs beside it; our code.

Both go to the machines in one archive.
"""

import io
import os
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.local_connector import LocalConnector
from support.specs import TINY

from cluster.errors import BadInput, ClusterError
from cluster.machines import code_archive, requirements, user_project
from cluster.state.spec import UserProject
from train.recipe import Command, Model, Optim, Recipe

OWN_MODEL = replace(TINY, model=Model(name="nets:small"))


def write(path: Path, content: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def write_all(folder: Path, *names: str) -> None:
    for name in names:
        write(folder / name)


def git(root: Path, *arguments: str) -> None:
    config = ["-c", "user.name=me", "-c", "user.email=me@localhost", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *config, "-C", str(root), *arguments], check=True, capture_output=True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and a module beside it. Commands are typed in another folder."""
    write(tmp_path / "mine/recipe.py")
    write(tmp_path / "mine/nets.py")
    monkeypatch.setenv("HOME", str(write(tmp_path / "home/.profile").parent))
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "mine"


def find(place: Path, name: str = "recipe.py") -> UserProject:
    project = user_project.find_project(OWN_MODEL, str(place / name))
    assert project
    return project


def test_project_outside_git_is_the_launch_folder_if_that_has_the_modules(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place / "recipes/deep.py")
    monkeypatch.chdir(place)
    assert find(place, "recipes/deep.py") == UserProject(folder=str(place), search=("recipes", "."))
    assert find(place) == UserProject(folder=str(place), search=(".",))
    monkeypatch.setenv("HOME", str(place))  # the home would be too much
    (place / "nets.py").rename(place / "recipes/nets.py")
    assert find(place, "recipes/deep.py") == UserProject(folder=str(place / "recipes"), search=(".",))
    (place / "recipes/nets.py").rename(place / "nets.py")
    with pytest.raises(BadInput, match=r"is not copied for a job, .* a folder of their own"):
        find(place)


def test_project_is_the_git_repository_with_what_git_would_track(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(place, "init")
    write(place / ".gitignore", "data/\n*.pt\n")
    write_all(place, "experiments/first.py", "committed.py", "gone.py", "settings/job.json", "data/train/a.jpg")
    write_all(place, "weights.pt", "other/.git/HEAD", "runs/job-1/job.json", "runs/job-1/user_project/nets.py")
    git(place, "add", "committed.py", "gone.py")
    (place / "gone.py").unlink()
    project = find(place, "experiments/first.py")
    assert project == UserProject(folder=str(place), search=("experiments", "."))
    assert set(user_project.list_files(place)) == {
        *("recipe.py", "nets.py", "committed.py", "experiments/first.py", ".gitignore", "settings/job.json")
    }
    assert user_project.describe_project(project).startswith(f"your code travels to the machines: 6 files of {place}")
    for folder in (".git", str(place / ".git")):  # as git sets it for the hooks of a repository
        monkeypatch.setenv("GIT_DIR", folder)
        project = user_project.find_command_project(Command(argv=["python", "first.py"]), place / "experiments")
        assert project == UserProject(folder=str(place), workdir="experiments"), folder


def test_files_of_submodules_and_of_clones_in_the_repository_are_copied(place: Path) -> None:
    folders = ("library", "library/deeper", "clone")
    for inner in folders:
        write_all(place / inner, "code.py", "weights.pt")
        git(place / inner, "init")
        write(place / inner / ".gitignore", "*.pt\n")
        git(place / inner, "add", "code.py", ".gitignore")
        git(place / inner, "commit", "-m", "first")
    git(place / "library", "-c", "protocol.file.allow=always", "submodule", "add", "./deeper")
    git(place, "init")
    git(place, "-c", "protocol.file.allow=always", "submodule", "add", "./library")
    copied = {f"{inner}/{name}" for inner in folders for name in ("code.py", ".gitignore")}
    own = {"library/.gitmodules", ".gitmodules", "recipe.py", "nets.py"}
    assert set(user_project.list_files(place)) == copied | own


def test_folder_that_python_runs_is_found_by_its_main_file(place: Path) -> None:
    command = Command(argv=["python", "package", "x"])
    (place / "package").mkdir()
    with pytest.raises(BadInput, match=r"package/__main__\.py: there is no such file in"):
        user_project.find_command_project(command, place)
    write(place / "package/__main__.py")
    assert user_project.find_command_project(command, place).folder == str(place)


def test_module_in_a_package_that_would_not_be_copied_is_named(place: Path) -> None:
    git(place, "init")
    write(place / "mine/deep/small.py", "def net(classes): ...")
    write(place / "mine" / "__init__.py")  # a package; mine.deep is a namespace package
    recipe = replace(OWN_MODEL, model=Model(name="mine.deep.small:net"))
    project = user_project.find_project(recipe, str(place / "recipe.py"))
    assert project
    requirements.require_functions(recipe, project)
    with pytest.raises(BadInput, match=rf"model, name: there is no module mine.deep.gone in mine of {place}; correct"):
        requirements.require_functions(replace(recipe, model=Model(name="mine.deep.gone:net")), project)
    write(place / ".gitignore", "small.py\n")
    with pytest.raises(BadInput, match=rf"{place}/mine/deep/small.py: would not be copied .* correct .gitignore"):
        user_project.find_project(recipe, str(place / "recipe.py"))


def test_repository_that_git_refuses_is_not_copied_as_a_plain_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = "#!/bin/sh\necho fatal: detected dubious ownership in repository >&2; exit 128\n"
    write(tmp_path / "bin/git", refusal).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    with pytest.raises(BadInput, match=r"git cannot say which files it ignores: fatal: detected dubious ownership"):
        find(place)


def test_plain_folder_is_copied_without_data_results_and_environments_and_the_data_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = UserProject(folder=str(place))
    write_all(place, "runs/job-1/job.json", "parts/__pycache__/x.pyc", "env/pyvenv.cfg", "env/lib/x.py")
    write_all(place, ".secret", ".cache/x")
    write(place / "parts/head.py")
    (place / "empty").mkdir()
    os.mkfifo(place / "pipe")
    (place / "broken").symlink_to("nowhere")
    assert user_project.describe_left_out(project) == ""
    write_all(place, "data/x.jpg", "birds/train/a/1.jpg", "birds/val/a/1.jpg", "birds-sz/64/1.jpg")
    write(place / "weights.pt", "w" * 1_000_001)
    assert set(user_project.list_files(place)) == {"recipe.py", "nets.py", "parts/head.py", "broken"}
    line = user_project.describe_left_out(project)
    left_out = "birds/, birds-sz/, data/ and 1 more"
    assert line.startswith(f"not copied, because {place} is not a git repository: {left_out};")
    monkeypatch.setattr(user_project, "MAX_PLAIN_FILES", 2)
    with pytest.raises(BadInput, match=r"more than 2 files .*git init"):
        find(place)
    git(place, "init")
    assert user_project.describe_left_out(project) == ""


def test_too_large_project_names_the_largest_files(place: Path) -> None:
    git(place, "init")
    for name, size in {"model.pt": 60e6, "b.bin": 50e6, "c.bin": 3e6, "small": 2e6}.items():
        with (place / name).open("wb") as file:
            file.truncate(int(size))
    with pytest.raises(BadInput) as raised:
        find(place)
    message = str(raised.value)
    assert "model.pt (60 MB), b.bin (50 MB), c.bin (3 MB)" in message and "small" not in message and "\n" not in message


def test_copy_is_replaced_as_a_whole_and_kept_when_the_project_is_gone(place: Path, tmp_path: Path) -> None:
    (place / "run.sh").touch(mode=0o755)
    write(place / "removed.py")
    project, copy = find(place), tmp_path / "run/user_project"
    user_project.copy_project(project, copy)
    assert (copy / "removed.py").exists() and os.access(copy / "run.sh", os.X_OK)
    (place / "removed.py").unlink()
    (place / "nets.py").write_text("new")
    user_project.copy_project(project, copy)
    place.rename(tmp_path / "moved")
    user_project.copy_project(project, copy)
    assert (copy / "nets.py").read_text() == "new" and not (copy / "removed.py").exists()
    assert [path.name for path in copy.parent.iterdir()] == ["user_project"]
    place.mkdir()  # without files
    user_project.copy_project(project, copy)
    assert [*copy.iterdir()] == []


@pytest.mark.parametrize("is_repository", [False, True])
def test_links_lead_to_the_copy_or_count_as_what_they_lead_to(place: Path, tmp_path: Path, is_repository: bool) -> None:
    if is_repository:
        git(place, "init")
    write(place / "src/real.py", "first")
    write(tmp_path / "shared.py", "outside")
    write(tmp_path / "library/helper.py")
    targets = {"absolute.py": str(place / "src/real.py"), "alias.py": "nets.py", "linked.py": "../shared.py"}
    for name, target in {**targets, "loop.py": "loop.py", "library": "../library", "gone.py": "../gone.py"}.items():
        (place / name).symlink_to(target)
    project, copy = find(place), tmp_path / "run/user_project"
    user_project.copy_project(project, copy)
    write(place / "src/real.py", "edited")
    assert (copy / "absolute.py").read_text() == "first" and (copy / "alias.py").readlink() == Path("nets.py")
    assert (copy / "linked.py").read_text() == "outside" and not (copy / "linked.py").is_symlink()
    assert not {"library", "gone.py"} & {path.name for path in copy.iterdir()}
    with (tmp_path / "weights.pt").open("wb") as file:
        file.truncate(user_project.MAX_PROJECT_BYTES)
    (place / "weights").symlink_to("../weights.pt")
    if is_repository:
        with pytest.raises(BadInput, match=r"weights \(100 MB\)"):
            find(place)
    else:
        assert "weights" not in user_project.list_files(place)


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp", "a/../../b"])
def test_search_folder_outside_of_the_project_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must name folders of the project"):
        UserProject(folder="/home/me/project", search=(".", name))


# --- what a recipe needs beside it ------------------------------------------------------------------------------------


def recipe_with(model: str = "resnet10_tiny", weights: str | None = None, **optim: str) -> Recipe:
    return replace(TINY, model=Model(name=model, weights=weights), optim=Optim(**optim))  # type: ignore[arg-type]


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_missing_requirements_names_missing_library(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_with(f"{library}:resnet18")
    monkeypatch.setattr(requirements, "_is_importable", lambda name: False)
    assert requirements.model_library(recipe) == library
    assert requirements.requirements_not_sent(recipe, None) == []  # the machines install it themselves
    assert requirements.missing_requirements(recipe) == [
        f"model, name: {library}:resnet18 needs {library}, which is not installed here; "
        f"install it: pip install {library}"
    ]


def test_missing_requirements_looks_in_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_with("nets.small:tiny", name="nets.opt:make", loss="nets:loss")
    recipe = replace(recipe, transform="nets:augment")
    lines = requirements.missing_requirements(recipe)
    assert [line.partition(":")[0] for line in lines] == ["model, name", "optim, name", "optim, loss", "transform"]
    assert "no module nets.small here" in lines[0] and str(tmp_path) in lines[0]
    assert len(requirements.requirements_not_sent(recipe, None)) == 4
    project = UserProject(folder=str(tmp_path), search=("code",))
    (tmp_path / "code").mkdir()
    assert len(requirements.requirements_not_sent(recipe, project)) == 4
    (tmp_path / "code/nets.py").write_text("raise SystemExit('imported by a check that must not run it')")
    assert len(requirements.missing_requirements(recipe)) == 4
    assert requirements.missing_requirements(recipe, project) == []
    assert requirements.requirements_not_sent(recipe, project) == []
    (tmp_path / "code/nets.py").rename(tmp_path / "nets.py")
    assert requirements.missing_requirements(recipe) == []


@pytest.mark.parametrize(("code", "is_found"), [
    ("def small(): ...", True),
    ("if True:\n    small = large = print", True),
    ("from somewhere import large as small", True),
    ("def __getattr__(name): return print", True),
    ("globals()['sm' + 'all'] = print", True),
    ("def", True),  # the trainer says where
    ("raise SystemExit('imported by a check that must not run it')\ndef smal(): ...", False),
])  # fmt: skip
def test_function_of_a_module_is_looked_up_without_running_it(code: str, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "nets.py"
    file.write_text(code)
    project = UserProject(folder=str(tmp_path), search=(".",))
    recipe = recipe_with("mine.nets:small", loss="elsewhere:loss")
    if is_found:
        return requirements.require_functions(recipe, project)
    with pytest.raises(BadInput) as caught:
        requirements.require_functions(recipe, project)
    assert str(caught.value) == f"model, name: mine.nets has no function small; correct the recipe, or {file}"


def test_missing_requirements_names_weights_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_with(weights="own.pt")
    assert requirements.missing_requirements(recipe) == [f"model, weights: {tmp_path}/own.pt: there is no such file"]
    (line,) = requirements.missing_requirements(recipe_with("resnet50", weights="own.pt"))
    assert "torchvision.models.resnet50(weights='DEFAULT').state_dict(), 'own.pt')" in line and str(tmp_path) in line
    assert "give the whole path" in requirements.requirements_not_sent(recipe, None)[0]
    (tmp_path / "own.pt").write_bytes(b"")
    assert requirements.missing_requirements(recipe) == []
    assert len(requirements.requirements_not_sent(recipe_with(weights="~/own.pt"), None)) == 1


@pytest.mark.parametrize(("text", "new_text", "option", "problem"), [
    ("resnet10_tiny", "nowhere:net", "--yes", "model, name: there is no module nowhere here"),
    ("recipe = Recipe(", 'recipe = Recipe(transform="no:f", ', "--yes", "transform: there is no module no here"),
    ("recipe = Recipe(", 'recipe = Recipe(comm="fp16", ', "--exact", "the comm hook fp16, which rounds"),
])  # fmt: skip
def test_launch_without_what_the_recipe_needs_is_refused(
    sandbox: Any, text: str, new_text: str, option: str, problem: str
) -> None:
    recipe = Path(sandbox.write_recipe(1))
    recipe.write_text(recipe.read_text().replace(text, new_text, 1))
    launched = sandbox.cli("launch", "--local", "-y", option, recipe)
    assert launched.code == 2 and launched.err.count("\n") == 1, launched
    assert (launched.out + launched.err).count(problem) == 1 and "job-1" not in sandbox.cli("ls").out
    if option == "--yes":
        planned = sandbox.cli("plan", recipe)
        assert planned.code == 0 and f"note: {problem}" in planned.out


# --- the code that is sent with it ------------------------------------------------------------------------------------

PYPROJECT = '[project]\ndependencies = ["click>=8"]\n'


def make_tree(root: Path) -> Path:
    """Make a project: the four packages, a script, a link, and files that must not be sent."""
    for name in (*code_archive.CODE_PACKAGES, "docs", "cluster/__pycache__"):
        (root / name).mkdir(parents=True)
    for name in code_archive.CODE_PACKAGES:
        (root / name / "__init__.py").write_text(f'"""{name}."""\n')
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "cluster/__pycache__/x.pyc").write_bytes(b"compiled")
    (root / "train/link.py").symlink_to("__init__.py")
    (root / "docs/page.md").write_text("")
    (root / "train/run").write_text("#!/bin/sh\n")
    (root / "train/run").chmod(0o755)
    return root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "checkout")


def archive_members(archive_bytes: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive_bytes)) as opened:
        return {member.name: member for member in opened}


def test_pack_code_has_packages_pyproject_and_the_copy_of_the_users_project(checkout: Path, tmp_path: Path) -> None:
    (checkout / "cluster/.swap").symlink_to("nowhere")
    project = tmp_path / "user_project"
    for name in ("nets.py", "parts/new ä\n.py", "__pycache__/nets.pyc"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    without, with_project = code_archive.pack_code(checkout), code_archive.pack_code(checkout, project)
    packages = {f"{name}/__init__.py" for name in code_archive.CODE_PACKAGES}
    names = {*packages, "train/link.py", "train/run", "cluster/.swap", "pyproject.toml"}
    assert set(archive_members(without[0])) == names
    assert set(archive_members(with_project[0])) == names | {"user_project/nets.py", "user_project/parts/new ä\n.py"}
    assert without[1] != with_project[1] and code_archive.pack_code(checkout, tmp_path / "nowhere") == without


@pytest.mark.parametrize("change", [
    None,
    lambda path, link: path.write_text("changed"),
    lambda path, link: path.rename(path.with_name("other.py")),
    lambda path, link: path.chmod(0o755),
    lambda path, link: (link.unlink(), link.symlink_to("other.py")),
    lambda path, link: (link.unlink(), link.write_text("__init__.py")),
    lambda path, link: path.unlink(),
], ids=["times and owners", "content", "name", "x-bit", "link", "kind", "gone"])  # fmt: skip
def test_pack_code_hash_is_of_names_kinds_x_bits_and_contents(
    tmp_path: Path, change: Callable[[Path, Path], object] | None
) -> None:
    first, second = make_tree(tmp_path / "one"), make_tree(tmp_path / "other")
    for number, path in enumerate(second.rglob("*.py")):
        os.utime(path, (number, number), follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o600)
    if change:
        change(second / "cluster/__init__.py", second / "train/link.py")
    (archive, before), (_, after) = code_archive.pack_code(first), code_archive.pack_code(second)
    assert len(before) == 16 and set(before) <= set("0123456789abcdef") and (after != before) == bool(change)
    members = archive_members(archive).values()
    assert {(info.mtime, info.uid, info.gid, info.uname, info.gname) for info in members} == {(0, 0, 0, "", "")}


def test_pack_code_takes_less_memory_than_the_code(checkout: Path) -> None:
    for number in range(20):
        (checkout / f"train/large{number}").write_bytes(bytes(1_000_000))
    tracemalloc.start()
    try:
        code_archive.pack_code(checkout)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


# --- the code on a machine ------------------------------------------------------------------------------------------


def test_upload_code_places_tree_once_also_by_concurrent_calls(checkout: Path, tmp_path: Path) -> None:
    archive_bytes, name = code_archive.pack_code(checkout)
    folder = str(tmp_path / "a 'strange' $folder")

    def upload(_: int) -> str:
        return code_archive.upload_code(LocalConnector(), folder, archive_bytes, name)

    with ThreadPoolExecutor(6) as pool:
        (path,) = map(Path, set(pool.map(upload, range(24))))
    assert str(path) == code_archive.code_folder(folder, name) == f"{folder}/code/{name}"
    assert os.access(path / "train/run", os.X_OK) and not os.access(path / "pyproject.toml", os.X_OK)
    assert (path / "train/link.py").readlink() == Path("__init__.py")
    assert (path / "pyproject.toml").read_text() == PYPROJECT
    begin = (checkout / "pyproject.toml").stat().st_mtime
    assert (path / "pyproject.toml").stat().st_mtime >= begin - 1, "a scratch disk is cleaned of old files"
    assert [path.name for path in path.parent.iterdir()] == [name]


def test_upload_code_broken_archive_leaves_nothing(checkout: Path, tmp_path: Path) -> None:
    archive_bytes, name = code_archive.pack_code(checkout)
    with pytest.raises(ClusterError, match=r"^box-1: the code cannot be unpacked into .*[^\n]$"):
        code_archive.upload_code(LocalConnector("box-1"), str(tmp_path), archive_bytes[: len(archive_bytes) // 2], name)
    assert list((tmp_path / "code").iterdir()) == []
