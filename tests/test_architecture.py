"""The architecture as tests: package layers, cycles, third-party packages, and what a command imports.

Each rule is one test; its message has a line for each module that breaks it.
"""

import ast
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
ROOT_PACKAGES = ("cluster", "infra", "recipes", "train")
FILES = [path for name in ROOT_PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
SLOW_TO_IMPORT = {
    *("torch", "numpy", "boto3", "botocore", "paramiko", "rich", "libtmux"),
    *("tensorboard", "PIL", "simplejpeg", "matplotlib", "jinja2"),
}
MAX_MODULES_PER_PACKAGE = 12
LONG_MODULE_LINES = 500

# Bottom up. A package may import from itself and from packages on earlier lines; of packages on one line, neither
# imports the other.
LAYERS = """
train.tools
infra.costs infra.errors infra.offers
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
cluster.backends.slurm
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
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in FILES}


def assert_none(found: Mapping[str, object]) -> None:
    """Fail when something was found in a module; the message names each such module and what was found there."""
    lines = [f"{name}: {sorted(what) if isinstance(what, Set) else what}" for name, what in found.items() if what]
    assert not lines, "\n".join(lines)


@cache
def nodes(name: str) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax tree; the first is the module."""
    return tuple(ast.walk(ast.parse(MODULES[name].read_text())))


def package_of(module: str) -> str:
    """The package that a module belongs to in `LAYERS`; a module that has its own entry there is its own package."""
    if module in LAYER or MODULES[module].name == "__init__.py":
        return module
    return module.rpartition(".")[0]


def is_for_typing(node: ast.AST) -> TypeGuard[ast.If]:
    """Whether a node is `if TYPE_CHECKING`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: no function bodies, nothing below `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_for_typing(node):
            continue
        yield node
        yield from run_at_import(node)


@cache
def imports(name: str, lazy: bool = True) -> frozenset[str]:
    """The modules that a module imports; with `lazy` also inside functions and for type checking.

    `from a import b` counts as `a.b` where that is a module of ours, and as `a` otherwise.
    """
    imported = set()
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    for node in nodes(name) if lazy else run_at_import(nodes(name)[0]):
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
    return [name for name in MODULES if name == package or name.startswith(package + ".")]


def test_layers_name_every_package() -> None:
    assert {package_of(name) for name in MODULES} - {"train", "infra"} == LAYER.keys()


MAY_IMPORT = {
    "infra": {"infra", "train"},
    "recipes": {"recipes", "train"},
    "train": {"train"},
    "cluster": {"cluster", "infra", "train"},
}


def test_module_imports_only_from_lower_layers_and_allowed_peers() -> None:
    found = {}
    for name in MODULES:
        own = package_of(name)
        others = {package_of(module) for module in imports(name) & MODULES.keys()} - {own}
        found[name] = {other for other in others if LAYER[other] >= LAYER[own]}
        found[name] |= top_levels(name) & set(ROOT_PACKAGES) - MAY_IMPORT[name.split(".")[0]]
    assert_none(found)


def test_module_is_in_no_import_cycle() -> None:
    graph = {name: (imports(name) & MODULES.keys()) - {name} for name in MODULES}
    reached: dict[str, set[str]] = {}
    for name in MODULES:
        reached[name], pending = set(), set(graph[name])
        while pending:
            module = pending.pop()
            reached[name].add(module)
            pending |= graph[module] - reached[name]
    assert_none({name: [other for other in graph[name] if name in reached[other]] for name in MODULES})


def test_recipe_imports_only_train_recipe() -> None:
    recipes = modules_in("recipes")
    allowed = {"train.recipe", *recipes, "collections.abc", "dataclasses", "itertools", "typing"}
    assert_none({name: imports(name) - allowed for name in recipes})


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


def test_third_party_package_is_imported_only_where_it_belongs() -> None:
    found = {}
    for package, allowed in THIRD_PARTY.items():
        others = MODULES.keys() - {name for folder in allowed for name in modules_in(folder)}
        found[package] = {name for name in others if package in top_levels(name)}
    assert_none(found)


# What is known of AWS outside its backend: the commands that need no job, its object store, and its tables.
OPEN_TO_OTHERS = {f"cluster.backends.aws.{name}" for name in ("admin", "s3_source", "shipped_tables")}


def test_aws_is_known_to_its_own_backend_only() -> None:
    """Jobs ask their backend for a capability. The self-test is one of AWS."""
    of_aws = {*modules_in("infra.aws"), *modules_in("cluster.backends.aws")} - OPEN_TO_OTHERS
    others = set(modules_in("cluster")) - of_aws - OPEN_TO_OTHERS - set(modules_in("cluster.selftest"))
    assert_none({name: imports(name) & of_aws for name in others})


def test_module_outside_the_trainer_needs_no_torch() -> None:
    need_torch = {name for name in MODULES if "torch" in loaded_with(name)}
    assert_none({name: imports(name) & need_torch for name in [*modules_in("cluster"), *modules_in("recipes")]})


def test_pure_modules_need_only_the_standard_library() -> None:
    tools = ("files", "text_files", "process", "errors")
    pure = [*modules_in("train.recipe"), *(f"train.tools.{name}" for name in tools)]
    pure += ["train.data.order.usage_log", "train.distributed.network"]
    known = {*sys.stdlib_module_names, "train"}
    assert_none({name: {module.split(".")[0] for module in loaded_with(name)} - known for name in pure})


def test_folder_with_modules_is_a_package() -> None:
    """setuptools finds packages by their __init__.py; a folder without one would be missing from the wheel."""
    assert_none({name: path for name, path in MODULES.items() if not (path.parent / "__init__.py").exists()})
    count = Counter(map(dotted, FILES))  # a module beside a package of its name would be counted twice
    assert_none({name: f"{number} files" for name, number in count.items() if number > 1})


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


def test_package_has_at_most_twelve_modules_and_none_is_too_long() -> None:
    sizes = Counter(name.rpartition(".")[0] for name, path in MODULES.items() if path.name != "__init__.py")
    assert_none({name: n for name, n in sizes.items() if n > MAX_MODULES_PER_PACKAGE and name != "recipes"})
    lines = {name: path.read_text().count("\n") for name, path in MODULES.items()}
    assert_none({name: count for name, count in lines.items() if count > LONG_MODULE_LINES})


COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
# Only launch looks for backends in all installed packages.
OTHERS = {"importlib.metadata", "cluster.backends.base", "cluster.state.spec", "cluster.jobs"}
UNWANTED_IMPORTS: dict[tuple[str, ...], set[str]] = {  # by the arguments of Python
    (COMMAND, "--help"): SLOW_TO_IMPORT | OTHERS,
    (COMMAND, "eval", "--help"): SLOW_TO_IMPORT | OTHERS,
    (COMMAND, "launch", "--help"): (SLOW_TO_IMPORT | OTHERS) - {"importlib.metadata"},
    (COMMAND, "--version"): SLOW_TO_IMPORT,
    # It shares tables with the report, which needs numpy and matplotlib.
    ("-c", "from cluster.display import cloud, plan, status"): SLOW_TO_IMPORT,
    (COMMAND, "plan", "-o", "json", str(ROOT / "recipes/quickstart.py")): {
        *("torch", "boto3", "paramiko", "tensorboard", "libtmux")
    },
}


def imported(*argv: str, **variables: str) -> tuple[frozenset[str], str]:
    """Run Python. Return the modules that it imports, as `-X importtime` lists them, their packages, and its stdout."""
    completed = subprocess.run(
        [sys.executable, "-X", "importtime", *argv], capture_output=True, text=True, env={**os.environ, **variables}
    )
    lines = completed.stderr.splitlines()
    names = {line.rsplit("|", 1)[1].strip() for line in lines if line.startswith("import time:")}
    assert completed.returncode == 0 and "cluster" in names, completed.stderr
    return frozenset(names | {name.split(".")[0] for name in names}), completed.stdout


def test_command_imports_no_large_package() -> None:
    assert_none({" ".join(argv[1:]): imported(*argv)[0] & names for argv, names in UNWANTED_IMPORTS.items()})


def test_completion_imports_no_large_package() -> None:
    found = {}
    for word, expected_output in {"la": "plain,launch", "launch --zone us-east-1": "plain,us-east-1b"}.items():
        words = ["imgnet-cluster", *word.split()]
        variables = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        modules, output = imported(COMMAND, **variables, _IMGNET_CLUSTER_COMPLETE="bash_complete")
        found[word] = modules & SLOW_TO_IMPORT if expected_output in output else f"printed {output}"
    assert_none(found)
