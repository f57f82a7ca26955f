import json
import math
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

import bruno
from bruno.checkpoint import read
from bruno.cli import COMMANDS, app, main
from bruno.cli.options import choose_device
from bruno.config import load_recipe, presets
from bruno.data import DATASETS, load_examples
from bruno.reporting.results import read_results
from bruno.training.run import Run

SMALL = ["--set", "flow.units=16", "--set", "flow.couplings=2", "--set", "train.batch=4"]
SMALL += ["--device", "cpu", "--validate", "4"]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if code == 0 and result.exception:
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_recipe(name):
    recipe = load_recipe(name)
    assert (recipe.data.name in DATASETS) != (name in ("images", "table"))  # of one's own
    assert load_recipe(name, ["process.kind=gaussian"]).process.kind == "gaussian"


def test_the_omniglot_preset_fits_its_size():
    model = bruno.Bruno.from_config(load_recipe("omniglot").model((1, 28, 28), 256))
    assert sum(p.numel() for p in model.parameters()) <= 7_000_000


def test_train_resume_and_evaluate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "4", "--out", "whole", *SMALL)
    run("train", "digits", "--steps", "2", "--out", "parts", *SMALL)
    run("train", "digits", "--steps", "4", "--out", "parts", "--resume", *SMALL)
    assert bruno.load(tmp_path / "parts" / "model.safetensors").shape == (1, 8, 8)
    log = [json.loads(line) for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert [line["index"] for line in log] == [1, 2, 3, 4]
    output = run("evaluate", "whole", "--sets", "6")
    assert "mean" in output
    report = json.loads((tmp_path / "whole" / "results" / "bits-test.json").read_text())
    bits = report["values"]
    assert len(bits["by_position"]) == 20
    assert math.isclose(sum(bits["by_position"]) / 20, bits["mean"], rel_tol=1e-6)
    assert bits["by_position"][0] == bits["first"]
    assert report["provenance"]["packages"]["torch"]
    for steps, old in (("4", 0), ("5", 1)):
        run("train", "digits", "--steps", steps, "--out", "whole", "--resume", *SMALL)
        run("report", "whole")
        page = (tmp_path / "whole" / "report.html").read_text("utf-8")
        assert page.count("From an earlier checkpoint") == old
    with pytest.raises(ValueError, match=r"`out` must be a file .*got no.p.html"):
        run("report", "whole", "--out", "no/p.html")


def test_training_continues_to_the_bit_after_an_interruption(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "6", "--out", "whole", *SMALL)
    original = bruno.training.trainer.Trainer.advance

    def interrupted(self, count, progress):
        if self.index == 3:
            raise KeyboardInterrupt
        return original(self, count, progress)

    monkeypatch.setattr("bruno.training.trainer.Trainer.advance", interrupted)
    run("train", "digits", "--steps", "6", "--out", "cut", "--save-every", "0", *SMALL, code=130)
    monkeypatch.setattr("bruno.training.trainer.Trainer.advance", original)
    run("train", "digits", "--steps", "6", "--out", "cut", "--resume", *SMALL)
    whole, cut = (bruno.load(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert whole.fingerprint() == cut.fingerprint()


def test_finetuning_starts_from_the_run_and_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "3", "--out", "run", *SMALL)
    tune = ["finetune", "run", "--way", "3", "--episodes", "2", "--set", "train.batch=2", "--device", "cpu"]
    run(*tune, "--set", "train.rate=0.0", "--steps", "2", "--out", "still")
    before, still = (bruno.load(f"{name}/model.safetensors") for name in ("run", "still"))
    assert still.fingerprint() == before.fingerprint()
    assert "before and after it, on validation (--trials 5; 0 for none)" in run(*tune, "--steps", "2")
    run(*tune, "--steps", "4", "--resume")
    assert "it was finished, after 4 steps" in run(
        *tune, "--resume"
    )  # not the number of the run it came from
    log = [json.loads(line) for line in Path("run-finetuned/log.jsonl").read_text().splitlines()]
    assert [line["index"] for line in log] == [1, 2, 3, 4]
    assert all(line["accuracy"] is not None and line["bits_per_dim"] is not None for line in log)
    assert bruno.load("run-finetuned/model.safetensors").fingerprint() != before.fingerprint()
    assert Path("run-finetuned/results/finetuning-validation.png").stat().st_size > 1000
    assert "mean" in run("evaluate", "run-finetuned", "--sets", "4", "--device", "cpu")


def test_finetuning_a_model_in_a_file_to_images_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "3", "--out", "run", *SMALL)
    run("export", "run", "model.safetensors")
    own_images({f"class{i:02d}": 6 for i in range(20)}, 20)
    tune = ["finetune", "model.safetensors", "--set", "data.name=images", "--set", "train.set_size=5"]
    run(*tune, "--way", "3", "--episodes", "2", "--steps", "2", "--trials", "2", "--device", "cpu")
    before, after = Run("run").recipe, Run("model-finetuned").recipe
    assert after.data.size == 8
    assert after.train.rate == pytest.approx(0.1 * before.train.rate)  # or a few steps undo what was learnt
    assert after.train.warmup == 0.1
    assert (
        "before"
        in json.loads(Path("model-finetuned/results/finetuning-validation.json").read_text())["columns"]
    )
    assert "mean" in run("evaluate", "model-finetuned", "--length", "5")
    run(*tune, "--steps", "2", "--set", "data.split=trainval", "--trials", "2", "--out", "all")
    assert Path("all/results/finetuning-test.json").is_file()  # on what neither training has seen
    bruno.save(bruno.load("model.safetensors"), "bare.safetensors")
    with pytest.raises(ValueError, match=r"`run` must say what it was trained on.*bare.safetensors does not"):
        run("finetune", "bare.safetensors")


def test_finetuning_to_few_classes_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    larger = ["--set", "data.original=true", "--set", "train.shift=1"]
    run("train", "digits", "--steps", "3", "--out", "run", *larger, *SMALL)
    own_images({f"class{i}": 6 for i in range(4)}, 20)  # of which one is held out
    tune = ["finetune", "run", "--set", "data.name=images", "--steps", "1"]
    told = run(*tune, "--device", "cpu")
    assert "Too few classes are held out" in told
    assert "±" not in told  # one class says nothing of others
    tuned = Run("run-finetuned").recipe
    assert (tuned.train.way, tuned.train.set_size) == (
        3,
        6,
    )  # all that are not held out, all that a class has
    with pytest.raises(ValueError, match=r"`train.way` must be from 2 to the 3 classes; got 4"):
        run(*tune, "--way", "4", "--out", "told", "--device", "cpu")
    assert tuned.data.size == 8
    small = ["--set", "flow.blocks=1", "--set", "flow.filters=4", "--set", "flow.units=8"]
    run("train", "images", "--set", "data.name=images", "--steps", "1", *small, "--device", "cpu")
    assert Run("runs/images").recipe.train.set_size == 6
    assert tuned.train.shift == 1  # pixels of the model's images, whatever their size was
    run(*tune, "--set", "train.shift=2", "--trials", "0", "--out", "moved", "--device", "cpu")
    assert Run("moved").recipe.train.shift == 2
    found = json.loads(Path("run-finetuned/results/finetuning-validation.json").read_text())
    assert [row[0] for row in found["rows"]] == ["bits/dim"]
    with pytest.raises(
        ValueError, match=r"must be elements of the model's shape \(1, 8, 8\); got \(1, 4, 4\)"
    ):
        run(*tune, "--set", "data.size=4", "--out", "told", "--device", "cpu")
    Path("one").mkdir()
    Path("images/class0").rename("one/class0")
    with pytest.raises(ValueError, match=r"`data` must have two classes or more to tell apart; .*one has 1"):
        run("finetune", "run", "--set", "data.name=one", "--steps", "1", "--out", "told", "--device", "cpu")
    assert not Path("told").exists()


def test_a_file_without_a_suffix_and_a_folder_with_the_name_of_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "1", "--out", "run", *SMALL)
    run("export", "run", "model")
    run("sample", "model", "--prior", "--samples", "2")
    assert Path("model-results/results/samples-prior.png").is_file()
    Path("omniglot").mkdir()  # of data, say
    run("sample", "omniglot", "--prior", "--samples", "2", "--device", "cpu")
    assert Path("runs/pretrained-omniglot/results/samples-prior.png").is_file()
    run("train", "digits", "--steps", "1", "--out", "blind", *SMALL[:-1], "0")
    with pytest.raises(ValueError, match=r"`checkpoint` must be last: blind was not measured on validation"):
        run("evaluate", "blind", "--checkpoint", "best")


def test_a_mistake_in_finetuning_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "2", "--out", "run", *SMALL)
    tune = ["finetune", "run", "--steps", "2", "--episodes", "2", "--trials", "0", "--device", "cpu"]
    with pytest.raises(ValueError, match=r"`train.way` must be from 2 to the 7 classes; got 20"):
        run(*tune, "--way", "20")
    with pytest.raises(ValueError, match=r"`flow.units` must be as the run run began, 16; got 64"):
        run(*tune, "--way", "3", "--set", "flow.units=64")
    with pytest.raises(ValueError, match=r"split.*got 'foo'"):
        run(*tune, "--way", "3", "--split", "foo", "--trials", "2")
    run(*tune, "--way", "3")


def test_a_resumed_run_is_as_long_as_it_was_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    original = bruno.training.trainer.Trainer.advance

    def interrupted(self, count, progress):
        if self.index == 2:
            raise KeyboardInterrupt
        return original(self, count, progress)

    monkeypatch.setattr("bruno.training.trainer.Trainer.advance", interrupted)
    run("train", "digits", "--steps", "4", "--out", "run", "--save-every", "0", *SMALL, code=130)
    monkeypatch.setattr("bruno.training.trainer.Trainer.advance", original)
    assert "4 steps in" in run("train", "digits", "--out", "run", "--resume", *SMALL)
    assert "it was finished, after 4 steps" in run("train", "digits", "--out", "run", "--resume", *SMALL)
    assert "5 steps in" in run("train", "digits", "--out", "run", "--resume", "--steps", "5", *SMALL)
    more = ["--set", "train.steps=6"]
    assert "6 steps in" in run("train", "digits", "--out", "run", "--resume", *more, *SMALL)


def test_steps_that_are_named_count_whatever_the_recipe_says_of_minutes(tmp_path):
    settings = ["--set", "train.minutes=0.1", "--out", tmp_path / "run", *SMALL]
    assert "2 steps in" in run("train", "digits", "--steps", "2", *settings)


def test_the_version_is_told():
    assert run("--version").strip() == f"bruno {bruno.__version__}"


def test_the_best_checkpoint_can_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "3", "--out", "run", "--save-every", "0", *SMALL)
    run("evaluate", "run", "--checkpoint", "best", "--sets", "4")
    with pytest.raises(ValueError, match=r"`checkpoint` must be 'last' or 'best'; got 'first'"):
        run("evaluate", "run", "--checkpoint", "first")


def test_finetuning_has_episodes_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both = [
        "train.discriminative=0.1",
        "train.shared=true",
        "train.episodes=1",
        "train.way=4",
        "train.queries=3",
    ]
    settings = [word for setting in both for word in ("--set", setting)]
    run("train", "digits", "--steps", "2", "--out", "run", *SMALL, *settings)
    tune = ["finetune", "run", "--steps", "2", "--way", "3", "--trials", "0", "--device", "cpu"]
    run(*tune, "--generative", "0")
    tuned = Run("run-finetuned").recipe.train
    assert (tuned.shared, tuned.queries, tuned.way) == (False, 1, 3)


@pytest.mark.slow
def test_the_demo_learns_and_shows_what_it_learnt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/demo").mkdir(parents=True)  # taken
    output = run("demo", "--no-show")
    assert "runs/demo-2/report.html" in output
    results = {result.name: result for result in read_results(Path("runs/demo-2"))}
    ours, pixels = results["few-shot"].values["bruno"], results["few-shot"].values["pixels"]
    assert ours[0] > pixels[0] + 0.02
    assert ours[1] > 0.9
    assert results["bits"].values["digits it never saw"]["mean"] < 2.5
    assert results["digits"].picture
    assert results["bits"].picture
    text = Path("runs/demo-2/report.html").read_text()
    assert all(result.title in text for result in results.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_the_command_understands(command):
    output = run(command, "--help")
    example = COMMANDS[command][1]
    assert example.split()[1] == command
    assert " ".join(example.split()[:3]) in " ".join(output.split())
    known = {option for parameter in get_command(app).commands[command].params for option in parameter.opts}
    assert {word for word in example.split() if word.startswith("--")} <= known


def test_averaged_weights_are_the_model_that_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "3", "--out", "run", "--set", "train.ema=0.9", *SMALL)
    tensors, _ = read(Run("run").checkpoints[-1], "cpu")
    saved = bruno.load("run/model.safetensors").state_dict()["process.raw_variance"]
    assert torch.equal(saved, tensors["average.process.raw_variance"])
    assert not torch.equal(saved, tensors["model.process.raw_variance"])


def stopped(command: list[str], number: int, tmp_path: Path) -> str:
    """What a command that trains says when a signal stops it after a few steps."""
    command = [sys.executable, "-m", "bruno", *command, "--out", "run"]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "log.jsonl"
    while not log.exists() or log.read_text().count("\n") < 3:
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.05)
    child.send_signal(number)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert "Traceback" not in errors
    steps = log.read_text().count("\n")
    assert (tmp_path / "run" / f"checkpoint-{steps:08d}.safetensors").is_file()
    return " ".join(output.split())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(number, tmp_path):
    output = stopped(["train", "digits", "--steps", "100000", *SMALL], number, tmp_path)
    assert "go on with --resume" in output


@pytest.mark.slow
def test_a_demo_that_was_stopped_says_how_to_go_on(tmp_path, monkeypatch):
    output = stopped(["demo", "--no-show", "--seed", "3"], signal.SIGINT, tmp_path)
    told = "bruno train digits --seed 3 --out run --resume"
    assert f"`{told}`" in output
    monkeypatch.chdir(tmp_path)
    taken = int(Run("run").checkpoints[-1].stem.removeprefix("checkpoint-"))
    assert f"{taken + 1:,} step" in run(*told.split()[1:], "--steps", str(taken + 1))  # no need to take all
    assert Path("run/model.safetensors").is_file()


def test_lists(tmp_path):
    assert "omniglot-paper" in run("presets")
    settings = run("presets", "digits").splitlines()
    assert 'data.name="digits"' in settings
    assert load_recipe("omniglot", settings) == load_recipe("digits")  # all of them, as --set takes them
    output = run("data", "--data-dir", tmp_path)
    assert "built in" in output
    assert "missing" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digitz"], "did you mean 'digits'?"),
        (["train", "digits", "--set", "flow.filtres=3"], "did you mean `flow.filters`?"),
        (["train", "digits", "--set", "flow"], "`--set` takes key.sub=value"),
        (["train", "digits", "--steps", "0"], "`train.steps` must be at least 1; got 0"),
        (["train", "digits", "--resume", "--out", "empty"], "`--resume` needs a checkpoint; empty has none"),
        (["evaluate", "nowhere"], "there is no nowhere"),
        (["finetune", "nowhere"], "there is no nowhere"),
        (["train", "digits", "--steps", "3", "--minutes", "1"], "exclude each other; got 3 and 1.0"),
        (
            ["train", "omniglot", "--data-dir", "typo"],
            "`--data-dir` must be a folder that is there; there is no typo",
        ),
        (["evaluate", "nowhere", "--sets", "1"], "`--sets` must be at least 2"),
        (["finetune", "nowhere", "--trials", "1"], "`--trials` must be at least 2"),
        (["report", "nowhere"], "there is no nowhere"),
        (["train", "digits", "--minutes", "-1"], "`--minutes` must be above 0, and not for ever; got -1.0"),
        (["train", "digits", "--minutes", "inf"], "`--minutes` must be above 0, and not for ever; got inf"),
        (["train", "digits", "--minutes", "nan"], "`--minutes` must be above 0, and not for ever; got nan"),
        (
            ["train", "digits", "--validate", "1"],
            "`--validate` must be at least 2 sets, or 0 for none; got 1",
        ),
        (["train", "digits", "--set", "train=5"], "`train` must be a table; got 5"),
        (
            ["train", "digits", "--set", f"train.seed={2**63}"],
            "`train.seed` must be from 0 to 2**63 - 1; got",
        ),
        (["train", "digits", "--set", "data.size=-5"], "`data.size` must be at least 0; got -5"),
        (["train", "digits", "--save-every", "nan"], "`--save-every` must be at least 0; got nan"),
        (["train", "digits", "--set", "data.name.x=3"], "name has no sub"),
        (["train", "digits", "--set", "train.rate=nan"], "`train.rate` must be a finite number; got nan"),
        (
            ["train", "digits", "--device", "mps"],
            "`--device` must be auto, cpu, cuda or cuda:NUMBER; got 'mps'",
        ),
        (["train", "digits", "--out", "file"], "`--out` must be a folder; file is a file"),
        (["train", "[/x] [bold]"], "got '[/x] [bold]'"),
        (["finetune", "nowhere", "--trials", "-2"], "`--trials` must be at least 2"),
        (["train", "digits", "--set", "train.set_size=500"], "`train.set_size` must be from 1 to"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)  # which `main` replaces
    monkeypatch.setattr("sys.argv", ["bruno", *arguments])
    Path("file").touch()
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_the_command_itself_says_what_went_wrong(tmp_path):
    command = [sys.executable, "-m", "bruno", "train", "digitz"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: `preset` must be a preset")
    assert result.stderr.count("\n") == 1


def test_what_may_not_be_written_is_told_by_its_whole_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "1", "--out", "run", *SMALL)

    def denied(self, *arguments, **options):
        raise PermissionError(13, "Permission denied", "runs")  # root, as whom tests may run, is never denied

    monkeypatch.setattr("bruno.reporting.results.Result.write", denied)
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)
    monkeypatch.setattr("sys.argv", ["bruno", "sample", "run", "--prior"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert f"{tmp_path / 'runs'}: may not be read or written here" in capsys.readouterr().err


def test_a_warning_is_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "3", "--out", "run", "--save-every", "0", *SMALL)
    Run("run").checkpoints[-1].write_bytes(b"")
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)
    monkeypatch.setattr("sys.argv", ["bruno", "evaluate", "run", "--sets", "4"])
    warnings.simplefilter("default")  # as outside of tests
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    said = capsys.readouterr().err
    assert said.startswith("warning: `path` must be a file that bruno.save wrote")
    assert said.count("\n") == 1


def test_steps_that_were_left_out_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    original = bruno.training.trainer.Trainer.advance

    def advance(self, count, progress):
        return [replace(s, skipped=s.index == 2) for s in original(self, count, progress)]

    monkeypatch.setattr("bruno.training.trainer.Trainer.advance", advance)
    assert "left out 1 step whose gradient" in run("train", "digits", "--steps", "3", "--out", "run", *SMALL)


def own_images(counts: dict[str, int], size: int) -> None:
    """./images with a folder of so many images for each class."""
    pixels = np.random.default_rng(0).integers(0, 256, (size, size), dtype=np.uint8)
    for name, count in counts.items():
        Path("images", name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(pixels + np.uint8(i)).save(Path("images", name, f"{i}.png"))


def test_images_in_their_original_size_train_a_model_of_smaller_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_images({f"class{i:02d}": 6 for i in range(20)}, 19)
    data = ["data.name=images", "data.size=8", "train.set_size=5", "train.slant=0.2", "train.shift=2"]
    settings = [word for setting in data for word in ("--set", setting)] + SMALL
    run("train", "digits", "--steps", "2", "--out", "small", *settings)
    settings += ["--set", "data.original=true"]
    run("train", "digits", "--steps", "2", "--out", "large", *settings)
    small, large = (bruno.load(f"{name}/model.safetensors") for name in ("small", "large"))
    assert small.shape == large.shape == (1, 8, 8)
    assert not torch.equal(small.process.raw_variance, large.process.raw_variance)
    run("train", "digits", "--steps", "3", "--out", "large", "--resume", *settings)
    run("finetune", "large", "--steps", "1", "--way", "3", "--trials", "2", "--device", "cpu")
    assert "mean" in run("evaluate", "large-finetuned", "--length", "5")


def test_the_preset_of_larger_images_takes_ones_own_of_any_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_images({f"class{i:02d}": 4 for i in range(5)}, 20)
    for i in range(3):
        path = Path("images", "class00", f"{i}.png")
        Image.open(path).resize((31, 17 + i)).save(path)
    settings = ["data.name=images", "train.set_size=4", "train.batch=2", "flow.filters=4", "flow.units=8"]
    start = ["train", "omniglot", "--steps", "1", "--device", "cpu", "--validate", "0"]
    start += [word for setting in settings for word in ("--set", setting)]
    run(*start, "--set", "data.size=8", "--out", "run")
    assert bruno.load("run/model.safetensors").shape == (1, 8, 8)
    with pytest.raises(ValueError, match="all images must have one size"):
        run(*start, "--set", "data.size=8", "--set", "data.original=true", "--out", "original")


def test_a_number_of_steps_that_is_set_ends_the_minutes_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = '[data]\nname = "digits"\n[flow]\nkind = "dense"\nunits = 8\n[train]\nminutes = 0.1\n'
    Path("minutes.toml").write_text(recipe)
    start = ["train", "minutes.toml", "--device", "cpu", "--validate", "0", "--set", "train.steps=2"]
    assert "2 steps in" in run(*start, "--out", "few")
    timed = run(*start, "--set", "train.minutes=0.02", "--out", "timed")
    assert not re.search(r"^2 steps in", timed, re.MULTILINE)  # 52 of them are others


def bits(*arguments: object) -> float:
    run("evaluate", *arguments)
    (path,) = Path(str(arguments[0]), "results").glob("bits-*.json")
    found = json.loads(path.read_text())["values"]["mean"]
    path.unlink()
    return found


def test_a_model_of_inverted_images_inverts_those_it_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_images({f"class{i}": 4 for i in range(2)}, 8)  # so few that all are for test too
    for path in Path("images").rglob("*.png"):
        Image.fromarray(255 - np.asarray(Image.open(path)) // 32).save(path)
    data = ["--set", "data.name=images", "--set", "data.invert=true", "--set", "train.set_size=4"]
    run("train", "digits", "--steps", "30", "--out", "run", "--validate", "0", *data, *SMALL)
    known = bits("run", "--length", "4")
    assert bits("run", "--data", "images", "--length", "4") == pytest.approx(known)
    assert bits("run", "--data", "images", "--length", "4", "--no-invert") > known + 1
    assert bits("run", "--data", "images", "--length", "4", "--invert") == pytest.approx(known)


def test_other_data_may_be_all_that_a_model_can_be_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "2", "--out", "run", *SMALL)
    digits = load_examples("digits", "test")
    np.savez("digits.npz", images=digits.elements.numpy() * 16, labels=digits.labels.numpy())
    assert "mean" in run("evaluate", "run", "--data", "digits.npz", "--sets", "4", "--length", "3")
    with pytest.raises(ValueError, match=r"`data` must be one of digits.*; there is nothing at 'digit'"):
        run("evaluate", "run", "--data", "digit")
    with pytest.raises(
        ValueError, match=r"`--data` must be elements of the model's shape \(1, 8, 8\); drawn"
    ):
        run("inspect", "run", "--data", "drawn")


def test_what_is_wrong_with_a_table_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = ["train", "table", "--set", "data.name=t.csv", "--set", "data.group=of", "--steps", "1"]
    good = "".join(f"{i // 30},{i % 7},{i % 11}\n" for i in range(180))

    def told(text: str, *more: str) -> str:
        Path("t.csv").write_text("of,a,b\n" + text)
        return run(*train, *more, "--device", "cpu")

    assert "look alike" not in told(good)
    assert Run("runs/table").recipe.data.columns == ("a", "b")
    assert "column 'b': a few numbers, as 1e+37, are so far out" in told(good + "0,1,1e37\n", "--out", "far")
    with pytest.raises(
        ValueError, match=r"line 182 cannot be used: 'b' must be a number; it is ''.*skip_bad"
    ):
        told(good + "0,1,\n", "--out", "x")
    with pytest.raises(ValueError, match=r"two elements, to learn from; '6' has 1: leave out.*skip_bad=true"):
        told(good + "6,1,2\n", "--out", "x")
    assert "left out 1" in told(good + "6,1,2\n", "--out", "y", "--skip-bad")
    assert "sets are of 2 elements, not of 20: '6' has 2" in told(good + "6,1,2\n6,2,2\n", "--out", "z")
    told("0,1,2\n0,2,5\n0,3,5\n" * 7, "--out", "one")  # one set, all of it for all
    with pytest.raises(ValueError, match=r"`data.columns` must be a list, as \[\"a\", \"b\"\].*got 'a,b'"):
        told(good, "--out", "x", "--set", "data.columns=a,b")
    with pytest.raises(ValueError, match=r"`data.columns` must all differ; 'a' is there twice"):
        told(good, "--out", "x", "--set", 'data.columns=["a", "b", "a"]')
    Path("t.csv").write_text(good.replace(",", ";"))
    with pytest.raises(ValueError, match="Columns are separated by commas"):
        run(*train, "--out", "x")


def test_what_needs_two_classes_says_where_there_are_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_images({f"class{i:02d}": 4 for i in range(4)}, 8)  # of which one is held out
    data = ["--set", "data.name=images", "--set", "train.set_size=3"]
    run("train", "digits", "--steps", "1", "--out", "run", "--validate", "0", *data, *SMALL)
    classify = ["classify", "run", "images/class00", "--support", "images"]
    told = r"at least 2 classes for this; the (test|validation) split has 1. Name other data, as --data DIR"
    for command in (["fewshot", "run"], ["anomaly", "run"], ["retrieve", "run", "--measure"], classify):
        with pytest.raises(ValueError, match=told):
            run(*command, *["--calibrate"] * (command is classify))
    few = run("fewshot", "run", "--data", "images", "--way", "4", "--shot", "1", "--trials", "2")
    assert "4-way 1-shot" in few
    assert "temperature" in run(*classify, "--calibrate", "--data", "images")


def test_a_run_on_data_of_ones_own_is_of_use_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_images({f"class{i}": 4 for i in range(5)}, 8)
    data = ["--set", "data.name=images", "--set", "train.set_size=3"]
    start = ["train", "digits", "--validate", "0", *SMALL]
    run(*start, "--steps", "1", "--out", "run", *data)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert "mean" in run("evaluate", "../run", "--length", "3")
    data[1] = "data.name=../images"
    run(*start, "--steps", "2", "--out", "../run", "--resume", *data)
    with pytest.raises(ValueError, match=r"`data.name` must be as the run run began.*Repeat its settings"):
        run(*start, "--steps", "3", "--out", "../run", "--resume")
    data[1] = "data.name=../images/class0"
    with pytest.raises(ValueError, match=r"no images in class folders"):
        run("finetune", "../run", "--set", data[1], "--steps", "1")


def test_a_run_is_fine_tuned_and_reported_from_inside_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("train", "digits", "--steps", "1", "--out", "run", *SMALL)
    monkeypatch.chdir(tmp_path / "run")
    run("finetune", ".", "--steps", "1", "--way", "3", "--trials", "0", "--device", "cpu")
    assert (tmp_path / "run-finetuned" / "model.safetensors").is_file()
    run("report", ".")
    assert "<title>run" in Path("report.html").read_text()


def test_what_is_left_out_is_said_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_images({**{f"class{i}": 6 for i in range(5)}, "small": 2}, 8)
    Path("images/class0/0.png").write_bytes(b"no image")
    data = ["--set", "data.name=images", "--set", "data.rotations=false", "--set", "train.set_size=5"]
    start = ["train", "digits", "--steps", "1", *data, *SMALL]
    with pytest.raises(ValueError, match=r"class0.0.png"):
        run(*start, "--out", "strict")
    output = run(*start, "--out", "lenient", "--skip-bad")
    assert output.count("left out 1 that could not be used, first class0/0.png") == 1
    assert output.count("and 1 whole class, too small, first small (only 2)") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match=r"there is no GPU. Use cpu"):
        run("train", "digits", "--device", "cuda")


def test_a_gpu_beyond_the_last(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"got cuda:2, and the last is cuda:1"):
        run("train", "digits", "--device", "cuda:2")


def test_a_gpu_that_is_named_becomes_the_one_that_streams_are_made_on(monkeypatch):
    chosen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [choose_device(name) for name in ("cuda:1", "cuda", "auto")] == ["cuda:1", "cuda", "cuda"]
    assert chosen == ["cuda:1"]
