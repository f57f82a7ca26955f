"""`bruno` itself: its help, its version, and how mistakes and warnings are reported."""

import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from typer.main import get_command

import bruno
from bruno.cli.main import COMMANDS, GROUPS, app
from bruno.training.run import Run
from cli.commandline import run, run_main


def test_the_version_is_printed():
    assert run("--version").strip() == f"bruno {bruno.__version__}"


def test_the_help_lists_every_command():
    top = run("--help")
    listed = {group: run(group, "--help") for group in GROUPS} | {"": top}
    for command in COMMANDS:
        *group, name = command.split()
        assert re.search(rf"^│ {name} ", listed["".join(group)], re.MULTILINE)
    assert all(re.search(rf"^│ {group} ", top, re.MULTILINE) for group in GROUPS)


@pytest.mark.parametrize("arguments", [[], ["anomaly"], ["retrieve"]])
def test_without_a_command_the_help_is_shown(arguments, capsys):
    ended = run_main(capsys, *arguments)
    assert "Usage:" in ended.out + ended.errors
    assert "Traceback" not in ended.errors


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_shows_an_example_that_the_command_parses(command):
    example = COMMANDS[command][1]
    assert example.startswith(f"bruno {command}")
    assert " ".join(example.split()[:4]) in " ".join(run(*command.split(), "--help").split())
    parser = get_command(app)
    for word in command.split():
        parser = parser.commands[word]
    parser.make_context(command, example.split()[1 + len(command.split()) :])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_names_arguments_in_capitals_and_prints_no_limits(command):
    text = run(*command.split(), "--help")
    usage = re.search(r"Usage: .*\[OPTIONS\](.*)", text)
    assert usage[1] == usage[1].upper()
    assert "<=x" not in text


@pytest.mark.parametrize("command", [["anomaly", "watch", "--help"], ["train", "--help"], ["presets"]])
def test_commands_that_compute_nothing_do_not_import_torch(command):
    start = [sys.executable, "-X", "importtime", "-m", "bruno", *command]
    loaded = subprocess.run(start, capture_output=True, text=True, check=True).stderr
    modules = {line.split("|")[-1].strip() for line in loaded.splitlines()}
    assert not modules & {"torch", "numpy"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digitz"], r"`PRESET` .*got 'digitz'.*'digits'"),
        (["train", "digits", "--set", "flow.filtres=3"], r"`flow.filtres` .*`flow.filters`"),
        (["train", "digits", "--set", "flow"], r"`--set` .*got 'flow'"),
        (["train", "digits", "--set", "data.name.x=3"], r"`--set` .*got 'data.name.x=3'"),
        (["train", "digits", "--set", "=3"], r"`--set` .*got '=3'"),
        (["train", "digits", "--steps", "0"], r"`--steps` .*at least 1; got 0"),
        (["train", "digits", "--set", "train.steps=0"], r"`train.steps` .*at least 1; got 0"),
        (["train", "digits", "--resume", "--out", "empty"], r"`--resume` .*empty"),
        (["train", "digits", "--data", "nowhere"], r"`--data` .*an existing path; got .*nowhere'\."),
        (["train", "table", "--data", "t.csv", "--group", "no"], r"t.csv: `--group` .*, b; got 'no'\."),
        (["train", "table"], r"`--data` .*an existing path; got .*FILE.csv', a placeholder"),
        (["train", "images", "--data", "bad.csv"], r"`flow.kind` must be dense .*got conv"),
        (["evaluate", "omniglot-small", "--data", "bad.csv"], r"`--data` must be images .*got bad.csv"),
        (["train", "table", "--data", "bad.csv"], r"bad.csv: line 3 .*\(`--skip-bad`\).*\(`data.columns`\)"),
        (
            ["train", "table", "--data", "pictures"],
            "`--data` must be a table .*got .*pictures. The preset 'images'",
        ),
        (["train", "images", "--data", "pictures"], r"a/bad.png cannot be used: .*\(`--skip-bad`\)"),
        (["sample", "omniglot-small", "--given", "pictures/a"], r"bad.png: cannot .*\(`--skip-bad`\)"),
        (
            ["evaluate", "pictures"],
            "`MODEL` must be the folder of a training run; pictures is a folder without",
        ),
        (["export", "omniglot-small", "x", "--half", "--int8"], "`--half` and `--int8` cannot be combined"),
        (["evaluate", "nowhere"], "`MODEL` .*nowhere"),
        (["evaluate", "omniglot", "--invert"], "`--invert` .*`--data`"),
        (["evaluate", "omniglot", "--data", "nowhere"], "`--data` .*got 'nowhere'"),
        (["finetune", "nowhere"], "nowhere"),
        (["report", "nowhere"], "`MODEL` .*nowhere"),
        (["export", "nowhere", "file"], "`MODEL` .*nowhere"),
        (["verdict", "cifar10"], "cifar10 is not on this machine.*`--data-dir`"),
        (["train", "digits", "--steps", "3", "--minutes", "1"], r"`--steps` and `--minutes` .*got 3 and 1.0"),
        (["train", "omniglot", "--data-dir", "typo"], r"`--data-dir` .*typo"),
        (["evaluate", "nowhere", "--sets", "1"], r"`--sets` .*at least 2; got 1"),
        (["train", "digits", "--minutes", "-1"], r"`--minutes` .*got -1.0"),
        (["train", "digits", "--minutes", "inf"], r"`--minutes` .*got inf"),
        (["train", "digits", "--minutes", "nan"], r"`--minutes` .*got nan"),
        (["train", "digits", "--validate", "1"], r"`--validate` .*at least 2.*got 1"),
        (["train", "digits", "--set", "train=5"], r"`train` .*got 5"),
        (["train", "digits", "--set", f"train.seed={2**63}"], rf"`train.seed` .*got {2**63}"),
        (["train", "digits", "--set", "data.size=-5"], r"`data.size` .*at least 0; got -5"),
        (["train", "digits", "--save-every", "nan"], r"`--save-every` .*at least 0; got nan"),
        (["train", "digits", "--set", "train.lr=1e-3"], r"`train.lr` .*did you mean `train.learning_rate`"),
        (["train", "digits", "--set", "train.batch_size=9"], r"did you mean `train.batch`"),
        (["train", "digits", "--set", "train.learning_rate=nan"], r"`train.learning_rate` .*got nan"),
        (["train", "digits", "--set", 'data.classes=[1, "a"]'], r"`data.classes` .*got 1"),
        (["train", "digits", "--device", "mps"], r"`--device` .*got 'mps'"),
        (["train", "digits", "--out", "file"], r"`--out` must be a folder; file"),
        (["train", "[/x] [bold]"], r"got '\[/x\] \[bold\]'"),
        (["train", "digits", "--set", "train.set_size=500"], r"`train.set_size` .*got 500"),
        (["clasify"], r"Did you mean 'classify'\? See bruno --help"),
        (["train"], r"'PRESET'.*bruno train --help"),
        (["anomaly", "watch"], r"'MODEL'.*bruno anomaly watch --help"),
        (["train", "digits", "--seed", "-1"], r"`--seed` must be from 0 to 2\*\*63 - 1; got -1"),
        (["sample", "run", "--seed", str(2**63)], rf"`--seed` must be from 0 .*got {2**63}"),
        (["sample", "run", "--smaples", "3"], r"--smaples.*--samples"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, workplace, capsys, monkeypatch):
    monkeypatch.delenv("BRUNO_DATA", raising=False)
    Path("file").touch()
    Path("t.csv").write_text("a,b\n" + "1,2\n" * 9)
    Path("pictures/a").mkdir(parents=True)
    Path("pictures/a/bad.png").write_bytes(b"not an image")
    Path("bad.csv").write_text("a,b\n1,2\n1,x\n3,4\n5,6\n")
    ended = run_main(capsys, *arguments)
    assert ended.code == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", ended.errors), ended.errors


@pytest.mark.slow
def test_the_installed_program_also_reports_a_mistake(tmp_path):
    command = [sys.executable, "-m", "bruno", "train", "digitz"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: `PRESET` ")
    assert result.stderr.count("\n") == 1


def test_a_file_that_may_not_be_written_is_reported_by_its_absolute_path(tiny, monkeypatch, capsys):
    def denied(self, *arguments, **options):
        raise PermissionError(13, "Permission denied", "runs")  # tests may run as root, which is never denied

    monkeypatch.setattr("bruno.reporting.results.Result.write", denied)
    ended = run_main(capsys, "sample", "run", "--prior")
    assert ended.code == 2
    assert f"{Path('runs').resolve()}: " in ended.errors
    assert ended.errors.count("\n") == 1


def test_a_warning_is_one_line_on_standard_error(tiny, capsys):
    Run("run").checkpoints[-1].write_bytes(b"")
    ended = run_main(capsys, "evaluate", "run", "--sets", "4")
    assert ended.code == 0
    assert ended.errors.startswith("warning: ")
    assert ended.errors.count("\n") == 1
    assert "mean" in ended.out


def test_messages_name_arguments_as_options(tiny, monkeypatch, capsys):
    def with_messages(*arguments, **options):
        message = "`set_size` of `invert` or `invert=False` in `model`, not `length` or `bruno data`"
        warnings.warn(f"a warning: {message}", stacklevel=1)
        logging.getLogger("bruno").info("a note: %s", message)
        raise ValueError(f"an error: {message}")

    monkeypatch.setattr("bruno.trained.Trained.write_samples", with_messages)
    ended = run_main(capsys, "sample", "run")
    shown = "`--set-size` of `--invert` or `--no-invert` in `MODEL`, not `length` or `bruno data`"
    assert ended.errors.splitlines() == [f"warning: a warning: {shown}", f"error: an error: {shown}"]
    assert ended.out.splitlines() == [f"a note: {shown}"]


def test_an_interrupted_command_ends_without_a_traceback(tiny, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("bruno.trained.Trained.evaluate", interrupted)
    assert run_main(capsys, "evaluate", "run").code == 130
