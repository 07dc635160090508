"""The pages: their commands parse, and the targets, files, modules, names and links that they mention exist."""

import ast
import dataclasses
import importlib
import itertools
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import click
import pytest

import train.recipe
from cluster import errors
from cluster.cli.app import cli
from train.engine.options import RunOptions

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [README, ROOT / "ARCHITECTURE.md"]}
PAGES |= {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
DEVELOPER_PAGES = (
    "ARCHITECTURE.md",
    *(f"docs/{name}.md" for name in ("adding-a-backend", "adding-a-model", "contributing", "life-of-a-job")),
)
README_MAX_LINES = 150
EVERYDAY_COMMANDS = {
    *("plan", "launch", "stop", "resume", "ls", "status", "logs", "attach", "top", "tensorboard", "report"),
    *("rehearse-loss", "eval", "up", "down", "cost", "gc", "data check", "data resize", "data pack"),
}
# Options of other programs, and of `python -m train`, `.ci/run` and the benchmarks.
FOREIGN_OPTIONS = {
    # of sbatch and srun
    *("--constraint", "--exclusive", "--no-requeue", "--overlap", "--oversubscribe"),
    *("--out", "--resume", "--nproc-per-node", "--quick", "--count", "--dist"),
    *("--cifar", "--images", "--parts", "--report"),
    *("--ipc", "--aws-service-name", "--podman", "--address", "--elapsed", "--image"),
    *("--index-url", "--constraint", "--no-deps"),  # of pip
    *("--service-code", "--quota-code", "--desired-value"),  # of aws service-quotas
    *("--query", "--name", "--instance-id", "--logs"),  # of aws and cloud-init
    *("--lr", "--small"),  # of published programs, in the page of papers
    *("--dist-url", "--dist-backend", "--no-accel", "--cpu"),  # of training scripts of other projects
    *("--output_dir", "--checkpointing_steps", "--resume_from_checkpoint"),
}
# A file that a reader writes, those that `make peers` makes and fetches, and one that a script of others writes.
FOREIGN_FILES = {
    *("myrecipe.py", "benchmarks/.venv"),
    *("complete_nlp_example.py", "imagenet/main.py", "main.py", "multigpu_torchrun.py", "transformer.py"),
    *("snapshot.pt", "train.py"),
}

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def fences(text: str, *languages: str) -> list[str]:
    """Return the fenced code blocks of a page in these languages, at any indentation."""
    return [match["body"] for match in FENCE.finditer(text) if match["language"] in languages]


def inline_code(text: str) -> list[str]:
    """Return what stands between backticks in a page, outside its fenced code blocks."""
    spans = INLINE_CODE.findall(FENCE.sub("", text))
    return [re.sub(r"\s+", " ", span).replace(r"\|", "|") for span in spans]


def shell_lines(text: str, program: str) -> list[list[str]]:
    """Return the words of each line of a page that calls a program, up to a pipe or `&&`."""
    lines = [line for body in fences(text, "", "sh", "bash") for line in body.replace("\\\n", " ").splitlines()]
    commands = []
    for line in [*lines, *inline_code(text)]:
        if not re.match(rf"\s*([A-Z_]+=\S* )*([\w./]*/)?{program} ", line):
            continue
        words = shlex.split(line, comments=True)
        words = list(itertools.takewhile(lambda word: word not in ("|", "&&", ">", ";"), words))
        while "=" in words[0]:  # a variable for this command
            words.pop(0)
        commands.append(words)
    return commands


def parse(words: list[str]) -> list[click.Command]:
    """Parse the words as the command line would, and run nothing. Returns the groups and the command.

    A command without any argument is only mentioned: then it must exist, and need not be complete.
    """
    command: click.Command = cli
    path, name, rest = [command], words[0], words[1:]
    while isinstance(command, click.Group):
        found_name, found, rest = command.resolve_command(click.Context(command, info_name=name), rest)
        assert found_name and found
        name, command = found_name, found
        path.append(command)
    if rest:
        command.make_context(name, rest)
    return path


def all_commands(group: click.Group = cli, prefix: str = "") -> dict[str, click.Command]:
    """Return all commands by the words that call them."""
    commands: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            commands |= all_commands(command, f"{prefix}{name} ")
        else:
            commands[prefix + name] = command
    return commands


COMMANDS = all_commands()


def options_of(command: click.Command) -> set[str]:
    """Return the options of a command as they are typed."""
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"-h", "--help"}


def options_in(text: str) -> set[str]:
    """Return the long options that a text names."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def unknown_options(span: str) -> set[str]:
    """Return the options in inline code such as `launch --local` that its command does not have."""
    words = span.removeprefix("imgnet-cluster ").split()
    for length in (2, 1):
        command = COMMANDS.get(" ".join(words[:length]))
        if command:
            return options_in(span.partition(" -- ")[0]) - options_of(command)
    return set()


def expand_braces(path: str) -> list[str]:
    """Return the paths that `cluster/backends/{local,ssh}.py` stands for."""
    match = re.search(r"\{([^{}]+)\}", path)
    if not match:
        return [path]
    return [full for part in match[1].split(",") for full in expand_braces(path.replace(match[0], part.strip(), 1))]


@cache
def tracked_files() -> frozenset[str]:
    """Return the files of the repository, without what git ignores."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:  # a copy of the tree without git
        return frozenset(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if ".venv" not in path.parts)
    return frozenset(path for path in listing.stdout.splitlines() if (ROOT / path).exists())


def named_paths(text: str) -> set[str]:
    """Return the files and folders of the repository that a page names, and the bare file names in its code."""
    folders = "benchmarks|cluster|docs|experiments|infra|recipes|tests|train|\\.ci"
    paths = set()
    for path in re.findall(rf"(?<![\w/.\-:~>])(?:{folders})/[\w./{{}},-]*", text):
        paths |= set(expand_braces(path.rstrip(".,")))
    spans = [word for span in inline_code(text) for word in span.split()]
    paths |= {word.partition("::")[0] for word in spans if re.fullmatch(r"[\w-]+\.(py|sh)(::\w+|:\d+)?", word)}
    return {re.sub(r":\d+$", "", path) for path in paths}


def is_in_repository(path: str) -> bool:
    """Whether a path exists, or a bare file name belongs to some file of the repository."""
    if "NAME" in path or path in FOREIGN_FILES:
        return True
    if "/" not in path:
        return any(file.rpartition("/")[2] == path for file in tracked_files())
    return (ROOT / path).exists() or (ROOT / f"{path}.py").exists()


def missing_module_part(dotted: str) -> str:
    """Return the first part of a dotted name such as `cluster.errors.ClusterError` that does not exist, or ""."""
    path, parts = ROOT, dotted.split(".")
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    path = path / f"{parts.pop(0)}.py" if parts and (path / f"{parts[0]}.py").exists() else path / "__init__.py"
    return "" if not parts or re.search(rf"\b{parts[0]}\b", path.read_text()) else parts[0]


def dotted_names(text: str) -> set[str]:
    """Return the modules of this project, and their members, that a page names in code."""
    code = "\n".join([*inline_code(text), *fences(text, "", "sh", "bash", "python")])
    names = re.findall(r"(?<![\w/.\-\"])(?:cluster|infra|train)(?:\.[a-zA-Z_]\w*)+", code)
    return {name for name in names if not name.endswith((".py", ".log", ".jsonl"))}


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


@cache
def words_of_code() -> frozenset[str]:
    """Return all words of the repository's Python files."""
    text = "\n".join((ROOT / path).read_text() for path in tracked_files() if path.endswith(".py"))
    return frozenset(re.findall(r"\w+", text))


def each(values_by_page: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Return (page, value) for the values of each page, sorted and without duplicates."""
    return [(page, value) for page, values in values_by_page.items() for value in sorted(set(values))]


SHELL_COMMANDS = each(
    {page: [shlex.join(words) for words in shell_lines(text, "imgnet-cluster")] for page, text in PAGES.items()}
)
MAKE_COMMANDS = each({page: [shlex.join(words) for words in shell_lines(text, "make")] for page, text in PAGES.items()})
PATHS = each({page: sorted(named_paths(text)) for page, text in PAGES.items()})
LINKS = each({page: [link for link in LINK.findall(text) if "://" not in link] for page, text in PAGES.items()})
PYTHON_BLOCKS = [(page, block) for page, text in PAGES.items() for block in fences(text, "python")]


@pytest.mark.parametrize(("page", "line"), SHELL_COMMANDS)
def test_page_command_parses(page: str, line: str) -> None:
    assert len(parse(shlex.split(line))) > 1


@pytest.mark.parametrize(
    "line",
    [
        "imgnet-cluster lunch x.py",
        "imgnet-cluster launch --lokal x.py",
        "imgnet-cluster data resize a",
        "imgnet-cluster launch --machines N x.py",
    ],
)
def test_parse_wrong_command_raises_usage_error(line: str) -> None:
    with pytest.raises(click.UsageError):
        parse(shlex.split(line))


def test_shell_lines_finds_indented_fences_and_inline_code() -> None:
    text = "- a\n  ```sh\n  A=1 prog one  # why\n  prog two | head\n  ```\n\nsay `prog three` or `.venv/bin/prog 4`"
    assert [words[1] for words in shell_lines(text, "prog")] == ["one", "two", "three", "4"]


@pytest.mark.parametrize("page", PAGES)
def test_page_inline_command_has_only_own_options(page: str) -> None:
    wrong = {span: unknown_options(span) for span in inline_code(PAGES[page])}
    assert not {span: options for span, options in wrong.items() if options}


@pytest.mark.parametrize("page", PAGES)
def test_page_option_belongs_to_a_command(page: str) -> None:
    known = set().union(*(options_of(command) for command in COMMANDS.values()))
    known |= {flag for option in RunOptions.options() for flag in option.flags}
    assert options_in(LINK.sub("", PAGES[page])) <= known | FOREIGN_OPTIONS


@pytest.mark.parametrize(("page", "line"), MAKE_COMMANDS)
def test_page_make_target_exists(page: str, line: str) -> None:
    targets = [word for word in shlex.split(line)[1:] if "=" not in word]
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_page_link_leads_to_a_file_and_heading(page: str, link: str) -> None:
    target, _, anchor = link.partition("#")
    path = (ROOT / page).parent / target if target else ROOT / page
    assert path.exists()
    if anchor:
        headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
        assert anchor in map(slug, headings)


@pytest.mark.parametrize(("page", "path"), PATHS)
def test_page_file_exists(page: str, path: str) -> None:
    """Old module paths are found by this test: they do not exist any more."""
    assert is_in_repository(path)


@pytest.mark.parametrize("page", PAGES)
def test_page_module_exists(page: str) -> None:
    names = dotted_names(PAGES[page])
    assert not {name: missing_module_part(name) for name in names if missing_module_part(name)}


@pytest.mark.parametrize("page", DEVELOPER_PAGES)
def test_developer_page_identifier_occurs_in_the_code(page: str) -> None:
    code = " ".join(re.sub(r"[\w{},-]+(/[\w.{},-]*)+", "", span) for span in inline_code(PAGES[page]))
    identifiers = set(re.findall(r"\b(?:[A-Z][a-z]+[A-Z]\w*|[A-Z]+_[A-Z_]+|[a-z]+_[a-z_]+)\b", code))
    assert identifiers <= words_of_code()


@pytest.mark.parametrize(("page", "block"), PYTHON_BLOCKS, ids=[page for page, _ in PYTHON_BLOCKS])
def test_page_python_block_uses_names_that_exist(page: str, block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("cluster", "train"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            constructor = getattr(train.recipe, node.func.id, None)
            if dataclasses.is_dataclass(constructor):
                fields = {field.name for field in dataclasses.fields(constructor)}
                assert {keyword.arg for keyword in node.keywords} <= fields


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_named_in_a_page(command: str) -> None:
    assert any(re.search(rf"(imgnet-cluster |`){command}\b", text) for text in PAGES.values())


@pytest.mark.parametrize("command", sorted(EVERYDAY_COMMANDS))
def test_everyday_command_is_named_in_the_readme(command: str) -> None:
    assert command in COMMANDS
    assert re.search(rf"(imgnet-cluster |`){command}\b", PAGES["README.md"])


def test_readme_is_short() -> None:
    assert PAGES["README.md"].count("\n") <= README_MAX_LINES


def test_readme_exit_codes_are_those_of_the_code() -> None:
    section = PAGES["README.md"].split("## Exit codes")[1].split("##")[0]
    listed = {int(code) for code in re.findall(r"\b(\d+) [a-z]", section)}
    assert listed == {value for value in vars(errors).values() if isinstance(value, int)}


def test_docs_readme_lists_every_page() -> None:
    links = set(LINK.findall(PAGES["docs/README.md"]))
    assert {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"} <= links
