"""The law of the house: who may import whom, what is imported at the start, how large a room may be."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cluster", "infra", "recipes", "train")
FILES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
SLOW = {
    "torch",
    "numpy",
    "boto3",
    "botocore",
    "paramiko",
    "rich",
    "libtmux",
    "tensorboard",
    "PIL",
    "simplejpeg",
    "matplotlib",
}


def dotted(path: Path) -> str:
    """The name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in FILES}


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """What is run when a module is imported: neither the bodies of functions nor what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from at_import(node)


@cache
def imports(name: str, whole: bool = True) -> frozenset[str]:
    """The modules that a module names in imports, in its functions too if `whole`; `from a import b` names a, and a.b
    where that is a module of ours.
    """
    path, found = MODULES[name], set()
    tree = ast.parse(path.read_text())
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree) if whole else at_import(tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            inner = {f"{base}.{one.name}" for one in node.names}
            found |= {one for one in inner if one in MODULES} | ({base} if not inner <= MODULES.keys() else set())
    return frozenset(found)


def roots(name: str) -> set[str]:
    """The first words of what a module imports."""
    return {one.split(".")[0] for one in imports(name)}


@cache
def loads(name: str) -> frozenset[str]:
    """All modules that importing one of ours brings along."""
    done: set[str] = set()
    todo = {name}
    while todo:
        one = todo.pop()
        done.add(one)
        parents = {one.rsplit(".", count)[0] for count in range(1, one.count(".") + 1)}
        mine = imports(one, whole=False) if one in MODULES else frozenset()
        todo |= (mine | (parents & MODULES.keys())) - done
    return frozenset(done)


def of(package: str) -> list[str]:
    """Our modules in a package, or the module of this name."""
    return [name for name in MODULES if name == package or name.startswith(package + ".")]


def test_this_test_sees_imports_of_every_kind() -> None:
    assert {"click", "cluster.cli.data", "cluster.jobs.submit", "cluster.display.status"} <= imports("cluster.cli")
    assert "cluster.jobs.submit" not in imports("cluster.cli", whole=False)
    assert "torch" in loads("train.engine.run") and "numpy" in loads("train.data.index.open")


MAY_IMPORT = {
    "infra": {"infra"},
    "recipes": {"recipes", "train"},
    "train": {"train"},
    "cluster": {"cluster", "infra", "train"},
}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    ours = roots(name) & set(PACKAGES)
    assert ours <= MAY_IMPORT[name.split(".")[0]]


@pytest.mark.parametrize("name", of("recipes"))
def test_a_recipe_imports_the_words_of_recipes_and_nothing_else(name: str) -> None:
    assert imports(name) <= {"train.recipe", *of("recipes"), "collections.abc", "dataclasses", "itertools", "typing"}


@pytest.mark.parametrize(
    "foreign, rooms",
    {
        "torch": ("train",),
        "boto3": ("infra",),
        "botocore": ("infra",),
        "paramiko": ("cluster",),
        "click": (
            *("cluster.cli", "cluster.cli.cloud", "cluster.cli.data", "cluster.cli.evaluate", "cluster.cli.data_fetch"),
            *(
                "cluster.cli.inspect",
                "cluster.cli.plan",
                "cluster.cli.record",
                "cluster.cli.report",
                "cluster.cli.options",
            ),
        ),
        "rich": ("cluster.display.status", "cluster.display.top"),
        "libtmux": ("cluster.connectors.tmux",),
        "matplotlib": ("cluster.report",),
        "infra": ("infra", "cluster.backends"),
    }.items(),
)
def test_a_foreign_package_has_its_rooms(foreign: str, rooms: tuple[str, ...]) -> None:
    allowed = {name for room in rooms for name in of(room)}
    assert {name for name in MODULES if foreign in roots(name)} <= allowed


@pytest.mark.parametrize("name", [*of("cluster"), *of("recipes")])
def test_outside_the_trainer_nothing_that_is_imported_needs_torch(name: str) -> None:
    needing = {one for one in imports(name) & MODULES.keys() if "torch" in loads(one)}
    assert not needing


@pytest.mark.parametrize(
    "name",
    [f"train.{one}" for one in ("recipe", "recipe_file", "schedule", "files", "spawn", "ids", "links", "target")],
)
def test_what_is_pure_stays_free_of_torch(name: str) -> None:
    foreign = {one.split(".")[0] for one in loads(name)} - set(sys.stdlib_module_names) - {"train"}
    assert not foreign


@pytest.mark.parametrize("name", of("cluster"))
def test_the_command_line_stands_above_the_verbs_and_these_above_the_backends(name: str) -> None:
    words = (
        "cli cli_cloud cli_data cli_eval cli_fetch cli_look cli_plan cli_record cli_report command view view_cloud "
        "view_forecast view_top tensorboard"
    )
    show = {f"cluster.{one}" for one in words.split()}
    if name not in show | {"cluster.__main__"}:
        assert not imports(name) & show
    if name.startswith("cluster.backends"):
        assert not imports(name) & {
            "cluster.jobs.submit",
            "cluster.jobs.job",
            "cluster.planning.plan",
            "cluster.state.status",
        }


@pytest.mark.parametrize("name", MODULES)
def test_no_module_imports_itself_by_way_of_others(name: str) -> None:
    done: set[str] = set()
    todo = set(imports(name, whole=False))
    while todo:
        one = todo.pop()
        done.add(one)
        todo |= (imports(one, whole=False) if one in MODULES else frozenset()) - done
    assert name not in done


def test_there_are_four_import_packages_and_no_fifth() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == set(PACKAGES) and not list(ROOT.glob("*.py"))
    marks = (*ROOT.glob("tests/**/__init__.py"), *ROOT.glob("benchmarks/**/__init__.py"))
    assert not [path for path in marks if ".venv" not in path.parts]  # that of benchmarks/peers.sh


def test_the_list_of_packages_in_pyproject_is_complete() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(dotted(path) for path in FILES if path.name == "__init__.py")
    homeless = [name for name, path in MODULES.items() if not (path.parent / "__init__.py").exists()]
    assert not homeless


@pytest.mark.parametrize("name", PACKAGES)
def test_our_names_belong_to_our_distribution_only(name: str) -> None:
    assert set(importlib.metadata.packages_distributions().get(name, [])) <= {"imgnet-cluster"}


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_a_module_is_of_a_size_to_read_says_what_it_is_and_promises_nothing(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 330
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)
    assert path.stem not in ("utils", "util", "helpers", "common", "misc", "base", "core")
    tree = ast.parse(text)
    speechless = [
        node.name
        for scope in ast.walk(tree)
        if isinstance(scope, ast.Module | ast.ClassDef)
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_" and not ast.get_docstring(node)
    ]
    assert ast.get_docstring(tree) or not text.strip()
    assert not speechless


# One word per idea: these are other people's words for ours (machine, job, recipe, run folder).
OTHER_WORDS = r"\b(nodes?|hyper-?parameters?|experiment dir\w*|log ?dir|run ?dir|work ?dir|task definition)\b"
FOREIGN = r"--nproc-per-node|--logdir"  # options of other programs


@pytest.mark.parametrize("path", [*FILES, ROOT / "README.md", ROOT / "ARCHITECTURE.md"], ids=lambda path: path.name)
def test_one_word_is_used_for_one_idea(path: Path) -> None:
    assert not re.findall(OTHER_WORDS, re.sub(FOREIGN, "", path.read_text()), re.IGNORECASE)


# --- what is imported at the start --------------------------------------------------------------------------------

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")


def loaded(words: list[str], **env: str) -> tuple[set[str], str]:
    """The first words of all modules that a Python process imports, as Python tells them, and its output."""
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", *words], capture_output=True, text=True, env={**os.environ, **env}
    )
    lines = [line for line in ran.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rsplit("|", 1)[1].strip() for line in lines}
    assert ran.returncode == 0 and "cluster" in names, ran.stderr
    return {name.split(".")[0] for name in names}, ran.stdout


@pytest.mark.parametrize(
    "words", [["-c", "import cluster"], [COMMAND, "--help"], [COMMAND, "launch", "--help"], [COMMAND, "--version"]]
)
def test_help_waits_for_no_large_package(words: list[str]) -> None:
    assert not loaded(words)[0] & SLOW


@pytest.mark.parametrize(
    "asked, said",
    [("bash_source", "complete -o nosort"), ("zsh_source", "#compdef"), ("bash_complete", "plain,launch")],
)
def test_completion_waits_for_no_large_package(asked: str, said: str) -> None:
    names, out = loaded([COMMAND], _IMGNET_CLUSTER_COMPLETE=asked, COMP_WORDS="imgnet-cluster la", COMP_CWORD="1")
    assert said in out and not names & SLOW


def test_a_plan_needs_no_torch() -> None:
    names, _ = loaded([COMMAND, "plan", "-o", "json", str(ROOT / "recipes/quickstart.py")])
    assert not names & {"torch", "boto3", "paramiko", "tensorboard", "libtmux"}
