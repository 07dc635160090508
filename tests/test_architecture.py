"""The architecture as tests: package layers, cycles, third-party packages, docstrings, and what a command imports."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOT_PACKAGES = ("cluster", "infra", "recipes", "train")
FILES = [path for name in ROOT_PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
SLOW_TO_IMPORT = {
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
    "jinja2",
}
MAX_MODULES_PER_PACKAGE = 12
LONG_MODULE_LINES = 500

# Bottom up. A package may import from itself and from packages on earlier lines; of packages on one line, neither
# imports the other.
LAYERS = """
train.tools
infra.costs infra.errors infra.rented_machine
infra.aws
infra.aws.market infra.aws.stack
infra.aws.instances
train.recipe
train.data
train.data.index
train.data.order train.data.packing train.data.fetch
train.data.loading
train.weights
train.models train.optim train.forecast
train.distributed
train.metrics
train.trackers
train.engine
train.evaluation
train.inference
train.__main__
recipes
cluster.errors
cluster.script
cluster.new_project
cluster.connectors
cluster.state
cluster.agent.processes
cluster.agent cluster.machines cluster.notifications
cluster.project_environment
cluster.backends
cluster.backends.rented cluster.backends.slurm
cluster.backends.aws.terms cluster.backends.aws.s3_source
cluster.backends.aws.planning cluster.backends.aws.renting
cluster.backends.aws
cluster.planning
cluster.jobs
cluster.plots cluster.records cluster.selftest
cluster.report
cluster.display
cluster.cli.completion
cluster.cli
cluster cluster.__main__
"""
LAYER = {name: number for number, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}


def dotted(path: Path) -> str:
    """The name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in FILES}


def package_of(module: str) -> str:
    """The package that a module belongs to in `LAYERS`; a module that has its own entry there is its own package."""
    if module in LAYER or MODULES[module].name == "__init__.py":
        return module
    return module.rpartition(".")[0]


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: no function bodies, nothing below `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from run_at_import(node)


@cache
def imports(name: str, lazy: bool = True) -> frozenset[str]:
    """The modules that a module imports; with `lazy` also inside functions and for type checking.

    `from a import b` counts as `a.b` where that is a module of ours, and as `a` otherwise.
    """
    path, imported = MODULES[name], set()
    tree = ast.parse(path.read_text())
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree) if lazy else run_at_import(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            members = {f"{base}.{alias.name}" for alias in node.names}
            imported |= {member for member in members if member in MODULES}
            imported |= {base} if not members <= MODULES.keys() else set()
    return frozenset(imported)


def top_levels(name: str) -> set[str]:
    """The top-level packages that a module imports."""
    return {module.split(".")[0] for module in imports(name)}


@cache
def loaded_with(name: str) -> frozenset[str]:
    """All modules that are loaded when one of ours is imported."""
    loaded: set[str] = set()
    pending = {name}
    while pending:
        module = pending.pop()
        loaded.add(module)
        parents = {module.rsplit(".", count)[0] for count in range(1, module.count(".") + 1)}
        own = imports(module, lazy=False) if module in MODULES else frozenset()
        pending |= (own | (parents & MODULES.keys())) - loaded
    return frozenset(loaded)


def modules_in(package: str) -> list[str]:
    """The modules of a package and of the packages below it."""
    return [name for name in MODULES if name == package or name.startswith(package + ".")]


def test_imports_sees_module_level_lazy_and_relative_imports() -> None:
    assert {"click", "cluster.cli.launch", "cluster.cli.options"} <= imports("cluster.cli.app")
    assert "cluster.jobs.store" in imports("cluster.cli.launch")
    assert "cluster.jobs.store" not in imports("cluster.cli.launch", lazy=False)
    assert "torch" in loaded_with("train.engine.run") and "numpy" in loaded_with("train.data.index.open")


def test_layers_name_every_package() -> None:
    assert {package_of(name) for name in MODULES} - {"train", "infra"} == LAYER.keys()


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_only_from_lower_layers(name: str) -> None:
    own = package_of(name)
    others = {package_of(module) for module in imports(name) & MODULES.keys()} - {own}
    assert not {other for other in others if LAYER[other] >= LAYER[own]}


MAY_IMPORT = {
    "infra": {"infra", "train"},
    "recipes": {"recipes", "train"},
    "train": {"train"},
    "cluster": {"cluster", "infra", "train"},
}


@pytest.mark.parametrize("name", MODULES)
def test_root_package_imports_only_its_allowed_peers(name: str) -> None:
    assert top_levels(name) & set(ROOT_PACKAGES) <= MAY_IMPORT[name.split(".")[0]]


@pytest.mark.parametrize("name", MODULES)
def test_module_is_in_no_import_cycle(name: str) -> None:
    reached: set[str] = set()
    pending = set(imports(name)) - {name}
    while pending:
        module = pending.pop()
        reached.add(module)
        pending |= (imports(module) if module in MODULES else frozenset()) - reached
    assert name not in reached


@pytest.mark.parametrize("name", [name for name in modules_in("cluster") if not name.startswith("cluster.cli")])
def test_module_outside_the_cli_imports_no_sibling_late(name: str) -> None:
    """A late import of a sibling hides a cycle; the CLI imports late so that `--help` starts fast."""
    late = imports(name) - imports(name, lazy=False)
    tree = ast.parse(MODULES[name].read_text())
    typing_only = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    hidden = {
        module
        for module in late & MODULES.keys()
        if package_of(module) == package_of(name) and module.rpartition(".")[2] not in typing_only
    }
    assert not hidden or name in ("cluster", "cluster.jobs", "cluster.report")


@pytest.mark.parametrize("name", modules_in("recipes"))
def test_recipe_imports_only_train_recipe(name: str) -> None:
    allowed = {"train.recipe", *modules_in("recipes"), "collections.abc", "dataclasses", "itertools", "typing"}
    assert imports(name) <= allowed


THIRD_PARTY = {
    "torch": ["train"],
    "boto3": ["infra.aws"],
    "botocore": ["infra.aws"],
    "paramiko": ["cluster.connectors"],
    "click": ["cluster.cli"],
    "rich": ["cluster.display"],
    "libtmux": ["cluster.connectors"],
    "matplotlib": ["cluster.plots", "cluster.report"],
    "jinja2": ["cluster.report"],
    "packaging": [],  # cluster.machines.python_env imports it by name, or pip's own copy
}


@pytest.mark.parametrize("package, allowed", THIRD_PARTY.items())
def test_third_party_package_is_imported_only_where_it_belongs(package: str, allowed: list[str]) -> None:
    modules = {name for folder in allowed for name in modules_in(folder)}
    assert {name for name in MODULES if package in top_levels(name)} <= modules


@pytest.mark.parametrize("name", modules_in("cluster"))
def test_cloud_is_known_to_its_own_backend_only(name: str) -> None:
    """Others ask for a capability; cluster/backends/catalog.py names the modules of a cloud as text."""
    of_aws = {module for module in imports(name) if f"{module}.".startswith(("infra.aws.", "cluster.backends.aws."))}
    assert not of_aws or name.startswith("cluster.backends.aws")


@pytest.mark.parametrize("name", [*modules_in("cluster"), *modules_in("recipes")])
def test_module_outside_the_trainer_needs_no_torch(name: str) -> None:
    assert not {module for module in imports(name) & MODULES.keys() if "torch" in loaded_with(module)}


@pytest.mark.parametrize(
    "name",
    [
        *modules_in("train.recipe"),
        *("train.tools.filesystem", "train.tools.process", "train.tools.errors"),
        *("train.data.order.usage_log", "train.distributed.network"),
    ],
)
def test_pure_modules_need_only_the_standard_library(name: str) -> None:
    third_party = {module.split(".")[0] for module in loaded_with(name)} - set(sys.stdlib_module_names) - {"train"}
    assert not third_party


def test_repository_has_four_import_packages() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(ROOT_PACKAGES) and not list(ROOT.glob("*.py"))
    others = (*ROOT.glob("tests/**/__init__.py"), *ROOT.glob("benchmarks/**/__init__.py"))
    assert not [path for path in others if ".venv" not in path.parts]  # benchmarks/.venv: made by benchmarks/peers.sh


def test_folder_with_modules_is_a_package() -> None:
    """setuptools finds packages by their __init__.py; a folder without one would be missing from the wheel."""
    assert not [name for name, path in MODULES.items() if not (path.parent / "__init__.py").exists()]


def test_data_files_of_packages_are_in_the_wheel() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package_data = pyproject["tool"]["setuptools"]["package-data"]
    in_wheel = {
        path
        for package, globs in package_data.items()
        for glob in globs
        for path in ROOT.glob(f"{package.replace('.', '/')}/{glob}")
    }
    files = {path for name in ROOT_PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    assert {path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts} == in_wheel


@pytest.mark.parametrize("package", sorted({package_of(name) for name in MODULES} - {"recipes"}))
def test_package_has_at_most_twelve_modules(package: str) -> None:
    modules = [
        name for name, path in MODULES.items() if path.name != "__init__.py" and name.rpartition(".")[0] == package
    ]
    assert len(modules) <= MAX_MODULES_PER_PACKAGE


@pytest.mark.parametrize("name", ROOT_PACKAGES)
def test_package_name_belongs_to_our_distribution_only(name: str) -> None:
    assert set(importlib.metadata.packages_distributions().get(name, [])) <= {"imgnet-cluster"}


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_module_is_documented_and_named_by_its_concept(path: Path) -> None:
    text = path.read_text()
    if text.count("\n") > LONG_MODULE_LINES:
        warnings.warn(f"{dotted(path)} has more than {LONG_MODULE_LINES} lines", UserWarning, stacklevel=1)
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)
    assert path.stem not in ("utils", "util", "helpers", "misc")
    tree = ast.parse(text)
    undocumented = [
        node.name
        for scope in ast.walk(tree)
        if isinstance(scope, ast.Module | ast.ClassDef)
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_" and not ast.get_docstring(node)
    ]
    assert ast.get_docstring(tree) or not text.strip()
    assert not undocumented


def annotated_with_any(tree: ast.AST) -> Iterator[int]:
    """The lines with an `Any` in the type of a parameter, of a return value or of a field, in order of the tree."""
    for node in ast.walk(tree):
        annotations: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotations.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            annotations.append(node.annotation)
        yield from (
            part.lineno
            for annotation in annotations
            if annotation
            for part in ast.walk(annotation)
            if isinstance(part, ast.expr) and ast.unparse(part).strip("'").removeprefix("typing.") == "Any"
        )


def test_annotated_with_any_sees_signatures_fields_and_variables() -> None:
    text = """
def f(a: Any, *b: dict[str, Any]) -> int: ...
async def g() -> "Any": ...
class C:
    field: typing.Any = 1
    def method(self) -> list[str]:
        local: Any = 1
x = Any
"""
    assert sorted(annotated_with_any(ast.parse(text))) == [2, 2, 3, 5, 7]


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_any_in_an_annotation_has_its_reason_on_its_line(path: Path) -> None:
    """`Any` turns the type checker off. An alias (`State = dict[str, Any]`) says the reason once for all its users."""
    lines = path.read_text().splitlines()
    tree = ast.parse(path.read_text())
    aliases = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for part in ast.walk(node.value)
        if isinstance(part, ast.Name) and part.id == "Any"
    ]
    unexplained = {number for number in [*annotated_with_any(tree), *aliases] if "# " not in lines[number - 1]}
    assert not unexplained


# --- start-up time: what a command imports ------------------------------------------------------------------------

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")


def imported_modules(argv: list[str], **variables: str) -> tuple[set[str], str]:
    """Run Python. Return the modules that it imports, as `-X importtime` lists them, and its stdout."""
    completed = subprocess.run(
        [sys.executable, "-X", "importtime", *argv], capture_output=True, text=True, env={**os.environ, **variables}
    )
    lines = [line for line in completed.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rsplit("|", 1)[1].strip() for line in lines}
    assert completed.returncode == 0 and "cluster" in names, completed.stderr
    return names, completed.stdout


def imported_packages(argv: list[str], **variables: str) -> tuple[set[str], str]:
    """Run Python. Return the top-level packages that it imports, and its stdout."""
    names, output = imported_modules(argv, **variables)
    return {name.split(".")[0] for name in names}, output


@pytest.mark.parametrize("command", ["ls", "stop", "eval", "plan", "cost"])
def test_only_launch_looks_for_backends_of_other_packages(command: str) -> None:
    """The search reads the metadata of every installed package."""
    modules, _ = imported_modules([COMMAND, command, "--help"])
    assert not modules & {"cluster.backends.registry", "importlib.metadata", "cluster.state.spec"}
    assert "importlib.metadata" in imported_modules([COMMAND, "launch", "--help"])[0]


def test_launch_help_imports_no_job() -> None:
    modules, _ = imported_modules([COMMAND, "launch", "--help"])
    assert not modules & {"cluster.state.spec", "cluster.state.membership", "train.recipe", "cluster.jobs"}


@pytest.mark.parametrize(
    "argv", [["-c", "import cluster"], [COMMAND, "--help"], [COMMAND, "launch", "--help"], [COMMAND, "--version"]]
)
def test_help_imports_no_large_package(argv: list[str]) -> None:
    assert not imported_packages(argv)[0] & SLOW_TO_IMPORT


@pytest.mark.parametrize(
    ("shell_request", "expected_output"),
    [
        ("bash_source", "complete -o nosort"),
        ("zsh_source", "#compdef"),
        ("bash_complete la", "plain,launch"),
        ("bash_complete stop j", "plain,job-1"),
        ("bash_complete launch re", "file,re"),
        ("bash_complete launch --zone us-east-1", "plain,us-east-1b"),
    ],
)
def test_completion_imports_no_large_package(shell_request: str, expected_output: str, tmp_path: Path) -> None:
    (tmp_path / "job-1").mkdir()
    (tmp_path / "job-1" / "job.json").write_text("{}")
    instruction, *words = shell_request.split()
    packages, output = imported_packages(
        [COMMAND],
        _IMGNET_CLUSTER_COMPLETE=instruction,
        COMP_WORDS=" ".join(["imgnet-cluster", *words]),
        COMP_CWORD=str(len(words)),
        IMGNET_RUNS=str(tmp_path),
    )
    assert expected_output in output and not packages & SLOW_TO_IMPORT


def test_plan_imports_no_torch() -> None:
    packages, _ = imported_packages([COMMAND, "plan", "-o", "json", str(ROOT / "recipes/quickstart.py")])
    assert not packages & {"torch", "boto3", "paramiko", "tensorboard", "libtmux"}


@pytest.mark.parametrize("module", ["cluster.backends.local", "cluster.backends.ssh", "cluster.backends.slurm.backend"])
def test_backend_loads_without_large_packages(module: str) -> None:
    assert not loaded_with(module) & SLOW_TO_IMPORT
