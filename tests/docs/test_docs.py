"""The pages: their commands parse, and the targets, files, names and links that they mention exist."""

import ast
import dataclasses
import importlib
import itertools
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path

import click

import train.recipe
from cluster import errors
from cluster.cli.app import cli
from train.engine.options import RunOptions

ROOT = Path(__file__).resolve().parents[2]
PAGE_FILES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGE_FILES}
README_MAX_LINES = 150
# Options of other programs, and of `python -m train`, `.ci/run` and the benchmarks.
FOREIGN_OPTIONS = {
    *("--account", "--constraint", "--exclusive", "--no-requeue", "--overlap", "--oversubscribe"),  # of sbatch and srun
    *("--out", "--resume", "--nproc-per-node", "--quick", "--count", "--dist", "--cifar", "--images", "--parts"),
    *("--report", "--ipc", "--aws-service-name", "--podman", "--address", "--elapsed", "--image", "--search"),
    *("--index-url", "--no-deps"),  # of pip, as is --constraint
    *("--service-code", "--quota-code", "--desired-value"),  # of aws service-quotas
    *("--query", "--name", "--instance-id", "--instance-ids", "--logs"),  # of aws and cloud-init
    *("--role-name", "--tags", "--assume-role-policy-document", "--policy-name", "--policy-document"),  # of aws iam
    *("--instance-profile-name", "--account-id", "--budget", "--notifications-with-subscribers"),  # and aws budgets
    *("--lr", "--epochs", "--small"),  # of published programs, in the page of papers
    *("--dist-url", "--dist-backend", "--no-accel", "--cpu"),  # of training scripts of other projects
    *("--output_dir", "--checkpointing_steps", "--resume_from_checkpoint", "--save_steps", "--use_cpu", "--bf16"),
    *("--data-dir", "--val-split", "--experiment", "--device", "--no-prefetcher"),
    *("--model_name_or_path", "--dataset_name"),
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


def assert_none(found: Mapping[str, object]) -> None:
    """Fail when something was found in a page; the message names each such page and what was found there."""
    lines = [f"{page}: {sorted(what) if isinstance(what, Set) else what}" for page, what in found.items() if what]
    assert not lines, "\n".join(lines)


def fences(text: str, *languages: str) -> list[str]:
    return [match["body"] for match in FENCE.finditer(text) if match["language"] in languages]


def inline_code(text: str) -> list[str]:
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
    commands: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        words = prefix + name
        commands |= all_commands(command, f"{words} ") if isinstance(command, click.Group) else {words: command}
    return commands


COMMANDS = all_commands()


def options_of(command: click.Command) -> set[str]:
    params = command.get_params(click.Context(command))
    return {name for param in params for name in (*param.opts, *param.secondary_opts)} | {"-h"}


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def unknown_options(span: str) -> set[str]:
    """Return the options in inline code such as `launch --local` that its command does not have."""
    words = span.removeprefix("imgnet-cluster ").split()
    for length in (2, 1):
        if command := COMMANDS.get(" ".join(words[:length])):
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


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def usage_error(words: list[str]) -> str:
    try:
        return "" if len(parse(words)) > 1 else "no command"
    except (click.ClickException, click.exceptions.Exit) as error:
        return repr(error)


def test_every_command_and_option_says_what_it_is() -> None:
    for name, command in COMMANDS.items():
        assert "..." not in command.get_short_help_str(limit=61), f"{name}: the first sentence is cut off"
        params = command.get_params(click.Context(command))
        assert all(option.help for option in params if isinstance(option, click.Option)), name


def test_page_command_parses() -> None:
    lines = {page: shell_lines(text, "imgnet-cluster") for page, text in PAGES.items()}
    found = {page: {shlex.join(words): usage_error(words) for words in lines[page]} for page in PAGES}
    assert_none({page: {line: error for line, error in errors.items() if error} for page, errors in found.items()})


def test_page_inline_command_has_only_own_options() -> None:
    found = {page: {span: unknown_options(span) for span in inline_code(text)} for page, text in PAGES.items()}
    assert_none({page: {span: wrong for span, wrong in spans.items() if wrong} for page, spans in found.items()})


def test_page_option_belongs_to_a_command() -> None:
    known = FOREIGN_OPTIONS.union(*(options_of(command) for command in COMMANDS.values()))
    known |= {flag for option in RunOptions.options() for flag in option.flags}
    assert_none({page: options_in(LINK.sub("", text)) - known for page, text in PAGES.items()})


def test_page_make_target_exists() -> None:
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    found = defaultdict[str, list[str]](list)
    for page, text in PAGES.items():
        for words in shell_lines(text, "make"):
            named = {word for word in words[1:] if "=" not in word}
            found[page] += [] if named and named <= targets else [shlex.join(words)]
    assert_none(found)


def is_dead_link(page: str, link: str) -> bool:
    target, _, anchor = link.partition("#")
    path = (ROOT / page).parent / target if target else ROOT / page
    if not anchor or not path.exists():
        return not path.exists()
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return anchor not in map(slug, headings)


def test_page_link_leads_to_a_file_and_heading() -> None:
    links = {page: [link for link in LINK.findall(text) if "://" not in link] for page, text in PAGES.items()}
    assert_none({page: [link for link in links[page] if is_dead_link(page, link)] for page in PAGES})


def test_page_file_exists() -> None:
    """Old module paths are found by this test: they do not exist any more."""
    assert_none({page: [path for path in named_paths(PAGES[page]) if not is_in_repository(path)] for page in PAGES})


def test_page_python_block_uses_names_that_exist() -> None:
    found = defaultdict[str, set[str]](set)
    trees = [(page, ast.parse(block, page)) for page, text in PAGES.items() for block in fences(text, "python")]
    for page, node in ((name, node) for name, tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("cluster", "train"):
            module = importlib.import_module(str(node.module))
            found[page] |= {alias.name for alias in node.names if not hasattr(module, alias.name)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            constructor = getattr(train.recipe, node.func.id, None)
            if dataclasses.is_dataclass(constructor):
                fields = {field.name for field in dataclasses.fields(constructor)}
                found[page] |= {str(keyword.arg) for keyword in node.keywords} - fields
    assert_none(found)


def test_readme_is_short() -> None:
    assert PAGES["README.md"].count("\n") <= README_MAX_LINES


def test_readme_exit_codes_are_those_of_the_code() -> None:
    section = PAGES["README.md"].split("## Exit codes")[1].split("##")[0]
    listed = {int(code) for code in re.findall(r"\b(\d+) [a-z]", section)}
    assert listed == {value for value in vars(errors).values() if isinstance(value, int)}


def test_docs_readme_lists_every_page() -> None:
    links = set(LINK.findall(PAGES["docs/README.md"]))
    assert {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"} <= links
