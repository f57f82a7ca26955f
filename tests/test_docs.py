"""README and docs: code blocks run, shell lines parse, links exist, and tables match the results."""

import re
import runpy
import shlex
import shutil
import sys
import tomllib

import pytest
import typer
from pages import BLOCK, PAGES, README, ROOT, blocks, run_python
from typer.testing import CliRunner

from bruno.cli.main import COMMANDS, app
from bruno.cli.options import parse_settings
from bruno.config import Recipe, from_dict, load_recipe
from bruno.fit import with_settings
from bruno.weights import pretrained_names

COMMAND_LINE = ROOT / "docs" / "command-line.md"
CLUSTER = "cluster.md"  # its blocks run in tests/cluster, which has a cluster

# All shell lines are parsed. Lines with a placeholder or standard input, and these, are not run:
PLACEHOLDER = re.compile(r"\b(DIR|FOLDER|FILE|IMAGE)\b")
SLOW = ("demo", "study", "anomaly measure", "fewshot omniglot", "page --open", "serve")
# Of the lines that use a pretrained model, the first of each command with the same options is run.
PRETRAINED = {"omniglot", "omniglot-small", "cifar10"}
CHEAPER = {  # appended to a line that is run; the last of two equal options counts
    "train": "--steps 3 --validate 0 --out {new}",
    "finetune": "--steps 3 --trials 0 --out {new}",
    "evaluate": "--sets 4",
    "sample": "--samples 2",
    "fewshot": "--trials 2",
    "retrieve measure": "--queries 4",
    "specks": "--samples 4",
    "inspect": "--sets 4",
}


def pages_with(language):
    return [pytest.param(page, id=page.name) for page in PAGES if blocks(page, language)]


def shell_lines():
    return [
        pytest.param(line, id=f"{page.name}: {line.split('#')[0].strip()}")
        for page in PAGES
        for block in blocks(page, "sh")
        for line in block.splitlines()
    ]


def arguments(line):
    """The arguments of `bruno` in a line such as ``… | bruno train digits  # comment``, if it has any."""
    words = shlex.split(line, comments=True)
    return words[words.index("bruno") + 1 :] if "bruno" in words else None


def parse(words):
    """Name and parameters of the command; raises if an option is unknown or an argument is missing."""
    command, names = typer.main.get_command(app), []
    context = command.make_context("bruno", list(words))
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        names.append(name)
        context = command.make_context(name, words, parent=context)
    return " ".join(names), context.params


def run(words):
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0, f"bruno {shlex.join(words)}\n{outcome.output}\n{outcome.exception!r}"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with examples/, two trained runs and an exported model; lines run in any order."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(ROOT / "examples", folder / "examples")  # commands keep files beside a collection
    digits = "train digits --set flow.units=16 --set flow.couplings=2"
    table = "train table --set data.name=examples/machines.csv --set data.group=machine"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (digits, table):
            run([*words.split(), "--steps", "10", "--validate", "0"])
        run(["export", "runs/digits", "digits.safetensors", "--half"])
    return folder


@pytest.fixture
def in_workplace(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.delenv("BRUNO_DATA", raising=False)


# --- code ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages_with("python") if page.id != CLUSTER])
@pytest.mark.filterwarnings("default")  # models of a few steps, calibrated on few classes, warn
@pytest.mark.usefixtures("familiarity_once")
def test_python_blocks_of_a_page_run_one_after_the_other(page, in_workplace):
    run_python(page)


@pytest.mark.parametrize("line", shell_lines())
def test_shell_lines_are_valid(line):
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    elif words[0] == "curl":
        assert line in (ROOT / "docs" / "service.md").read_text("utf-8")  # where they run: tests/serving
    elif words[0] == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        assert words == ["pip", "install", "-e", ".[all]"]
        assert "all" in project["optional-dependencies"]
    else:
        name, parameters = parse(arguments(line))
        assert name in COMMANDS
        if name == "train":
            with_settings(load_recipe(parameters["preset"]), parse_settings(parameters["settings"] or []))


def lines_to_run():
    """Each line once, even if several pages have it."""
    found = {}
    for line in (param.values[0] for param in shell_lines()):
        words = arguments(line) or ["-"]
        text = shlex.join(words)
        if not (PLACEHOLDER.search(text) or "-" in words or text.startswith(SLOW)):
            options = {word for word in words if word.startswith("--")}
            found.setdefault((parse(words)[0], *sorted(options)) if PRETRAINED & set(words) else text, words)
    return [pytest.param(words, id=shlex.join(words)) for words in found.values()]


@pytest.mark.slow
@pytest.mark.parametrize("words", lines_to_run())
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("without_pictures", "familiarity_once")
def test_shell_lines_run(words, in_workplace, tmp_path):
    name, _ = parse(words)
    run([*words, *CHEAPER.get(name, "").format(new=tmp_path / "run").split()])


@pytest.mark.parametrize("page", pages_with("toml"))
def test_recipes_are_valid(page):
    for block in blocks(page, "toml"):
        assert from_dict(Recipe, tomllib.loads(block))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_in_a_language_that_is_tested(page):
    assert {language for language, _ in BLOCK.findall(page.read_text("utf-8"))} <= {
        "python",
        "sh",
        "toml",
        "text",
    }


# --- text ------------------------------------------------------------------------------------------------


def test_the_readme_has_at_most_700_words():
    assert len(README.read_text("utf-8").split()) <= 700


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_exist(page):
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_page_names_every_option_of_a_command(name):
    parts = re.split(r"^#+ (.+)$", COMMAND_LINE.read_text("utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    text = sections[f"bruno {name}"]
    assert f"\nbruno {name}" in text
    command = typer.main.get_command(app)
    for part in name.split():
        command = command.commands[part]
    for option in (option for parameter in command.params for option in parameter.opts):
        if option.startswith("--"):
            assert f"`{option}`" in text + sections["Options that several commands share"]


# --- numbers ---------------------------------------------------------------------------------------------


def script(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])  # as for a script
        return runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))


@pytest.fixture(scope="module")
def omniglot():
    return script("omniglot")


def test_the_table_of_omniglot_matches_the_results(omniglot):
    assert omniglot["table"]() in (ROOT / "docs" / "omniglot.md").read_text("utf-8")


def test_the_results_in_the_readme_are_rows_of_that_table(omniglot):
    measured = {cells(line)[0]: cells(line) for line in omniglot["table"]().splitlines()}
    lines = re.findall(r"^\| .+ \|$", README.read_text("utf-8"), re.MULTILINE)
    rows = [cells(line) for line in lines if cells(line)[0]]
    assert len(rows) == 4
    for row in rows:
        assert row == measured[row[0]][: len(row)]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", pretrained_names())
def test_cards_of_pretrained_models_match_the_results(omniglot, name):
    card = (omniglot if name in omniglot["PRETRAINED"] else script("paper_tables"))["card"]
    assert (ROOT / "src" / "bruno" / "weights" / f"{name}.md").read_text("utf-8") == card(name)


def test_the_tables_of_the_paper_match_the_results():
    page = (ROOT / "docs" / "paper.md").read_text("utf-8")
    for table in script("paper_tables")["tables"]():
        assert table in page


@pytest.mark.slow
def test_the_commands_of_the_paper_are_valid():
    paper = script("paper")
    assert sorted(name for names in paper["TOGETHER"] for name in names) == sorted(paper["RUNS"])
    for words in paper["RUNS"].values():
        _, parameters = parse(["train", *words])
        with_settings(load_recipe(parameters["preset"]), parse_settings(parameters["settings"] or []))
    for words in paper["TUNED"].values():
        parse(["finetune", *words])
    for name in (*paper["RUNS"], *paper["TUNED"], "omniglot"):
        kept = [one.kept for one in paper["measurements"](name)]
        assert len(set(kept)) == len(kept) > 0
        for one in paper["measurements"](name):
            parse(one.command.split())
