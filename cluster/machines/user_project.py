"""The user's own project: the folder of the modules that a recipe names. A launch copies it into the run folder.

The trainers of the job import from the copy, on this computer and on every machine that it is sent to. So an edit
during the run, or while the job waits in a queue, changes nothing of the job.
"""

import contextlib
import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from cluster.errors import BadInput, ClusterError
from cluster.state.spec import UserProject
from train.recipe.command import Command
from train.recipe.recipe_files import RecipeError, import_folder
from train.recipe.schema import Recipe
from train.tools.files import PROJECT_ROOT

from .code_archive import CODE_PACKAGES
from .requirements import find_module, user_functions

MAX_PROJECT_BYTES = 100_000_000
GIT_TIMEOUT_SECONDS = 60
GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
# Outside git there is no .gitignore. Results, images, environments and hidden files are left out instead.
IGNORED_FOLDERS = ("__pycache__", "data", "node_modules", "runs")
MAX_PLAIN_FILE_BYTES = 1_000_000  # larger ones are weights and results rather than code
MAX_PLAIN_FILES = 5_000
RUN_FOLDER_PATTERN = re.compile(r"((?:.*/)?job-[0-9]+/)job\.json", re.DOTALL)


def find_project(recipe: Recipe, recipe_file: str) -> UserProject | None:
    """Return the project with the modules that a recipe names, None when it names no modules or they are elsewhere.

    The project is the git repository of the recipe file. Outside git it is the folder of the file or, when a module is
    there, the folder in which the command was typed. The user's home folder is never a project. Raises `BadInput` when
    the project is too large, and when a module would be left out of the copy.
    """
    modules = {module for _, module, _ in user_functions(recipe)}
    if not modules:
        return None
    try:
        recipe_folder = import_folder(recipe_file)
    except RecipeError:  # the recipe was made in Python
        recipe_folder = Path.cwd()
    if recipe_folder == PROJECT_ROOT:
        modules = {module for module in modules if module.partition(".")[0] not in CODE_PACKAGES}
    packages = {module.partition(".")[0] for module in modules}
    folder = _repository(recipe_folder) or _plain_folder(recipe_folder, packages)
    folders = dict.fromkeys(path for path in (recipe_folder, Path.cwd(), folder) if path.is_relative_to(folder))
    if not any(find_module(package, folders) for package in packages):
        return None
    specs = [find_module(module, folders) for module in sorted(packages | modules)]
    origins = [Path(spec.origin) for spec in specs if spec and spec.origin]
    if folder in _home_and_above():
        raise BadInput(
            f"{folder} is not copied for a job, because it is or has your home folder; move the recipe and its modules "
            "to a folder of their own"
        )
    sizes = list_files(folder)
    for origin in origins:
        if str(origin.relative_to(folder)) not in sizes:
            raise BadInput(
                f"{origin}: would not be copied for the job, because git ignores it, a link to another folder "
                "has it or, outside git, it is in a folder of data or above 1 MB; correct .gitignore, or move it"
            )
    return UserProject(folder=str(folder), search=tuple(str(path.relative_to(folder)) for path in folders))


def find_command_project(command: Command, folder: Path) -> UserProject:
    """Return the project in which a command runs: the git repository of a folder or, outside git, the folder itself.

    The command runs in the copy of `folder`. Raises `BadInput` when the folder, the script or the requirements of the
    command are not there, cannot be executed, or would be left out of the copy, and when the project is too large.
    """
    if not folder.is_dir():
        raise BadInput(f"--workdir {folder}: there is no such folder")
    folder = folder.resolve()
    if folder in _home_and_above():
        raise BadInput(
            f"{folder} is not copied for a job, because it is or has your home folder; type the command in the folder "
            "of your project, or pass --workdir"
        )
    top = _repository(folder) or folder
    names = list_files(top)
    if script := command.script:
        _check_script(script, command.argv[0] == script, folder, top, names)
    if command.requirements:
        _check_copied(command.requirements, folder, top, names, "--requirements")
    return UserProject(folder=str(top), workdir=str(folder.relative_to(top)))


def _check_script(script: str, is_program: bool, folder: Path, top: Path, names: Mapping[str, int]) -> None:
    if is_program and "/" not in script:
        return  # a program of the machines, which is searched in their PATH
    if not is_program and (folder / script).is_dir():
        script = f"{script}/__main__.py"  # by which Python runs a folder
    path = folder / script
    if Path(script).is_absolute() and not path.is_relative_to(top):
        return  # a file of the machines
    _check_copied(script, folder, top, names, "the command")
    if is_program and not os.access(path, os.X_OK):
        raise BadInput(f"{script}: is not executable; type: chmod +x {shlex.quote(script)}")


def _check_copied(file: str, folder: Path, top: Path, names: Mapping[str, int], where: str) -> None:
    """Raise `BadInput` when the copy of the project will lack a file. `where` says what names it, for the message."""
    path = folder / file
    if not path.is_file():
        raise BadInput(f"{file}: there is no such file in {folder}; correct {where}, or pass --workdir")
    name = os.path.relpath(os.path.realpath(path.parent), top) + "/" + path.name
    if os.path.normpath(name) not in names:
        raise BadInput(
            f"{file}: would not be copied for the job, because git ignores it or, outside git, it is in a folder of "
            f"data, hidden or above 1 MB; correct .gitignore, or move it into {top}"
        )


def describe_project(project: UserProject) -> str:
    """Return one line about the files of a project that are sent to the machines."""
    sizes = list_files(Path(project.folder))
    total = sum(sizes.values())
    size = f"{total / 1e6:.1f} MB" if total >= 1e6 else f"{total / 1e3:.1f} kB"
    return f"your code travels to the machines: {len(sizes)} files of {project.folder}, {size}"


def describe_left_out(project: UserProject) -> str:
    """Return one line about data that is not copied of a project outside git, "" when there is none."""
    folder = Path(project.folder)
    if _names_known_to_git(folder):
        return ""
    copied_entries = {Path(name).parts[0] for name in list_files(folder)}
    names = []
    for path in sorted(folder.iterdir()):
        is_environment = path.name in ("__pycache__", "node_modules", "runs") or (path / "pyvenv.cfg").exists()
        if path.name in copied_entries or path.name.startswith(".") or is_environment:
            continue
        is_full_folder = False
        with contextlib.suppress(OSError):  # not a folder, or it cannot be read
            is_full_folder = any(path.iterdir())
        if path.is_file() or is_full_folder:
            names.append(f"{path.name}/" if is_full_folder else path.name)
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"not copied, because {folder} is not a git repository: {shown}; name data by --data, or type: git init"


def copy_project(project: UserProject, target: Path) -> None:
    """Replace a job's copy of a project. When the project is gone from here, the copy stays. Raises `ClusterError`."""
    folder = Path(project.folder)
    if not folder.is_dir():
        return
    new_copy = target.with_name(f".{target.name}.new")
    shutil.rmtree(new_copy, ignore_errors=True)
    new_copy.mkdir(parents=True)  # also of a folder without files
    for name in list_files(folder):
        copied_file = new_copy / name
        link_target = _target_in_project(folder, name)
        try:
            copied_file.parent.mkdir(parents=True, exist_ok=True)
            if link_target:
                copied_file.symlink_to(link_target)
            else:
                shutil.copy(folder / name, copied_file)
        except OSError as error:
            if not os.path.lexists(folder / name):  # it was removed after it had been listed
                continue
            shutil.rmtree(new_copy, ignore_errors=True)
            raise ClusterError(
                f"{error.filename or copied_file}: {error.strerror or error}, so your code cannot be copied for the job"
            ) from None
    shutil.rmtree(target, ignore_errors=True)
    new_copy.rename(target)


def list_files(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of the files of a project that a launch copies, by relative path, without run folders.

    In a git repository these are the files that git tracks or would track. Raises `BadInput` when they are too large.
    """
    known_names = _names_known_to_git(folder)
    if known_names:  # deleted files, which git lists too, have no size
        sizes = {name: size for name in known_names if (size := _copied_size(folder, name)) is not None}
    else:
        sizes = _sizes_in_plain_folder(folder)
    run_folders = tuple(match[1] for name in sizes if (match := RUN_FOLDER_PATTERN.fullmatch(name)))
    sizes = {name: size for name, size in sizes.items() if not name.startswith(run_folders)}
    total = sum(sizes.values())
    if total > MAX_PROJECT_BYTES:
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
        largest_text = ", ".join(f"{name} ({sizes[name] / 1e6:.0f} MB)" for name in largest)
        raise BadInput(
            f"{folder}: {total / 1e6:.0f} MB to copy as code, the limit is {MAX_PROJECT_BYTES / 1e6:.0f} MB; "
            f"put files that are not code into .gitignore: {largest_text}"
        )
    return sizes


def _repository(folder: Path) -> Path | None:
    """Return the top of the git repository that tracks, or would track, files of a folder; None when there is none."""
    top = _git(folder, "rev-parse", "--show-toplevel").decode(errors="surrogateescape").rstrip("\n")
    # A folder that git ignores, such as a virtual environment, does not belong to the repository.
    is_repository = top and Path(top) not in _home_and_above() and _names_known_to_git(folder)
    return Path(top) if is_repository else None


def _plain_folder(recipe_folder: Path, modules: Iterable[str]) -> Path:
    launch_folder = Path.cwd()
    if not recipe_folder.is_relative_to(launch_folder) or launch_folder in _home_and_above():
        return recipe_folder
    is_needed = any(find_module(name, [launch_folder]) and not find_module(name, [recipe_folder]) for name in modules)
    return launch_folder if is_needed else recipe_folder


def _home_and_above() -> list[Path]:
    home = Path.home().resolve()
    return [home, *home.parents]


def _git(folder: Path, *arguments: str) -> bytes:
    """Return what a git command prints; nothing outside a repository, and without git.

    Raises `BadInput` when git refuses it, as another user's: as a plain folder, ignored files would be copied.
    """
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=GIT_TIMEOUT_SECONDS,
            # GIT_DIR and others, which git sets for its hooks, name another repository than that of the folder.
            env={name: value for name, value in os.environ.items() if name not in GIT_VARIABLES} | {"LC_ALL": "C"},
        )
    except OSError:
        return b""
    except subprocess.TimeoutExpired:
        raise BadInput(f"{folder}: git does not answer within {GIT_TIMEOUT_SECONDS} s") from None
    if completed.returncode and b"not a git repository" not in completed.stderr:
        reason = (completed.stderr.decode(errors="replace").strip() or f"code {completed.returncode}").splitlines()[0]
        raise BadInput(f"{folder}: git cannot say which files it ignores: {reason}; see: git -C {folder} status")
    return b"" if completed.returncode else completed.stdout


def _names_known_to_git(folder: Path) -> list[str]:
    """Return the files that git tracks or would track, with those of repositories inside, which git only names."""
    output = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names: list[str] = []
    for name in (os.fsdecode(name).rstrip("/") for name in output.split(b"\0") if name):
        is_repository = (folder / name / ".git").exists() and not (folder / name).is_symlink()
        names += [f"{name}/{inner}" for inner in _names_known_to_git(folder / name)] if is_repository else [name]
    return names


def _copied_size(folder: Path, name: str) -> int | None:
    """Return how many bytes the copy of a file or a link takes. None: it is not copied.

    Of a link to a file outside the project, the file is copied. A link to a folder outside is not.
    """
    path = folder / name
    try:
        status = path.lstat() if _target_in_project(folder, name) else path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode) else None


def _target_in_project(folder: Path, name: str) -> str | None:
    """Return where a link leads to in the project, relative to the link; None for other links, and for no link."""
    if not (folder / name).is_symlink():
        return None
    top, target = (Path(os.path.realpath(path)) for path in (folder, folder / name))
    return os.path.relpath(target, (top / name).parent) if target.is_relative_to(top) else None


def _sizes_in_plain_folder(folder: Path) -> dict[str, int]:
    """Return the bytes of the files outside git that may be code, by relative path. Raises `BadInput` for too many."""
    sizes = {}
    for parent, folder_names, file_names in os.walk(folder):
        folder_names[:] = sorted(name for name in folder_names if not _is_ignored_folder(Path(parent, name)))
        for path in (Path(parent, name) for name in file_names if not name.startswith(".")):
            name = str(path.relative_to(folder))
            size = _copied_size(folder, name)
            if size is not None and size <= MAX_PLAIN_FILE_BYTES:
                sizes[name] = size
        if len(sizes) > MAX_PLAIN_FILES:
            raise BadInput(
                f"{folder}: more than {MAX_PLAIN_FILES} files to copy as code; make it a git repository (git init) "
                "whose .gitignore names what is not code, or move the recipe and its modules to a folder of their own"
            )
    return sizes


def _is_ignored_folder(path: Path) -> bool:
    """Whether a folder outside git holds no code: hidden, an environment, results, or an image set and its copies."""
    if path.name.startswith(".") or path.name in IGNORED_FOLDERS or path.name.endswith("-sz"):
        return True
    is_image_set = (path / "train").is_dir() and (path / "val").is_dir()
    return is_image_set or (path / "pyvenv.cfg").exists()
