"""README and docs: code blocks run, shell lines parse, links lead somewhere, and tables are what was measured."""

import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bruno.cli.main import COMMANDS, app
from bruno.cli.options import parse_settings
from bruno.config import Recipe, from_dict, load_recipe
from bruno.fit import with_settings

ROOT = Path(__file__).parents[1]
README, COMMAND_LINE = ROOT / "README.md", ROOT / "docs" / "command-line.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PLACEHOLDER = re.compile(r"\b(DIR|FOLDER|FILE|IMAGE)\b")

# A shell line is run, not only parsed, unless it has a placeholder, reads standard input, or is one of these.
SLOW = ("bruno demo", "bruno study", "bruno anomaly measure")
CHEAPER = {  # appended to a line, to make it cheap; the last of two equal options counts
    "train": "--steps 3 --validate 0 --out {new}",
    "finetune": "--steps 3 --trials 0 --out {new} --set train.set_size=4",
    "evaluate": "--sets 4",
    "fewshot": "--trials 2",
    "anomaly watch": "--sets 100 --set-size 5",
    "anomaly batch": "--sets 100",
    "retrieve measure": "--queries 4",
    "inspect": "--sets 4",
}


def blocks(page, *languages):
    return [code for language, code in BLOCK.findall(page.read_text("utf-8")) if language in languages]


def shell_lines():
    return [
        (page, line)
        for page in PAGES
        for block in blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def words_of(line):
    """The arguments of `bruno` in a line such as ``… | .venv/bin/bruno train digits  # a comment``, if it has any."""
    words = shlex.split(line, comments=True)
    places = [i for i, word in enumerate(words) if word.removeprefix(".venv/bin/") == "bruno"]
    return words[places[-1] + 1 :] if places else None


def parse(words):
    """The name of the command and its parameters; raises click's UsageError for what is unknown or missing."""
    command, name = typer.main.get_command(app), []
    context = command.make_context("bruno", list(words))
    while hasattr(command, "resolve_command"):
        last, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        name.append(last)
        context = command.make_context(last, words, parent=context)
    return " ".join(name), context.params


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with examples/ and two small runs, as a reader of the docs has."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        table = "train table --set data.name=examples/machines.csv --set data.group=machine --steps 30"
        for words in ("train digits --steps 30 --validate 0", f"{table} --validate 0"):
            succeeds(words.split())
    return folder


@pytest.fixture
def in_workplace(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.delenv("BRUNO_DATA", raising=False)
    return workplace


def succeeds(words):
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0, f"bruno {' '.join(words)}\n{outcome.output}\n{outcome.exception!r}"


# --- code ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem
)
@pytest.mark.filterwarnings("default")  # examples may warn: they are short of data and of training
def test_python_blocks_of_a_page_run_one_after_the_other(page, in_workplace):
    names = {}
    for block in blocks(page, "python"):
        exec(compile(block, f"{page.name}, block", "exec"), names)


@pytest.mark.parametrize(("page", "line"), shell_lines(), ids=lambda value: getattr(value, "stem", None))
def test_shell_lines_are_valid(page, line):
    words = words_of(line)
    if words is not None:
        name, parameters = parse(words)
        assert name in COMMANDS
        if name == "train":
            with_settings(load_recipe(parameters["preset"]), parse_settings(parameters["settings"] or []))
        return
    first, *rest = shlex.split(line, comments=True)
    if first == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif first.endswith("torchrun"):
        parse(rest[rest.index("-m") + 2 :])
    else:
        assert first == "pip"
        extras = re.findall(r"\[([\w,]+)\]", line)
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {name for some in extras for name in some.split(",")} <= set(known)


def runnable():
    """Each line once, however many pages have it."""
    lines = {" ".join(words): words for _, line in shell_lines() if (words := words_of(line))}
    return [
        pytest.param(words, id=text)
        for text, words in lines.items()
        if not (PLACEHOLDER.search(text) or "-" in words or f"bruno {text}".startswith(SLOW))
    ]


@pytest.mark.parametrize("words", runnable())
@pytest.mark.filterwarnings("default")
def test_shell_lines_run(words, in_workplace, tmp_path):
    name, _ = parse(words)
    more = CHEAPER.get(name, "").format(new=tmp_path / "run")
    succeeds([*words, *more.split()])


@pytest.mark.parametrize(
    "block",
    [block for page in PAGES for block in blocks(page, "toml")],
    ids=lambda block: block.splitlines()[0],
)
def test_recipes_are_valid(block):
    assert from_dict(Recipe, tomllib.loads(block))


def test_every_block_is_of_a_language_that_is_tested():
    for page in PAGES:
        for language, code in BLOCK.findall(page.read_text("utf-8")):
            assert language in ("python", "sh", "toml", "text"), f"{page.name}: {code}"


# --- the command line ------------------------------------------------------------------------------------


def sections():
    """The text of each section of the command-line page, by its heading."""
    parts = re.split(r"^#+ (.+)$", COMMAND_LINE.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_page_names_every_option_of_every_command(name):
    section, shared = sections()[f"bruno {name}"], sections()["Options that several commands share"]
    command = typer.main.get_command(app)
    for part in name.split():
        command = command.commands[part]
    for parameter in command.params:
        options = [option for option in parameter.opts if option.startswith("--")]
        assert all(f"`{option}" in section or f"`{option}" in shared for option in options), options
    assert f"bruno {name}" in "".join(BLOCK.findall(section)[0])


# --- text ------------------------------------------------------------------------------------------------


def test_the_readme_is_short():
    assert len(README.read_text("utf-8").split()) <= 700


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


# --- numbers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def omniglot():
    return runpy.run_path(str(ROOT / "benchmarks" / "omniglot.py"))


def test_the_table_of_omniglot_is_what_was_measured(omniglot):
    assert omniglot["table"]() in (ROOT / "docs" / "omniglot.md").read_text("utf-8")


def test_the_results_of_the_readme_are_rows_of_that_table(omniglot):
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in omniglot["table"]().splitlines()
    ]
    known = {row[0]: row for row in cells}
    rows = re.findall(r"^\| ([^|]+) \|(.+)\|$", README.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 4
    for title, rest in rows:
        assert [cell.strip() for cell in rest.split("|")] == known[title][1:6]


@pytest.mark.parametrize("name", ["omniglot", "omniglot-fewshot"])
def test_cards_of_pretrained_models_are_what_was_measured(omniglot, name):
    assert (ROOT / "src" / "bruno" / "weights" / f"{name}.md").read_text("utf-8") == omniglot["card"](name)
