"""`bruno export`, and commands on exported and on pretrained models."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import bruno
from bruno import Bruno
from bruno.checkpoint import read, read_about
from bruno.config import load_recipe, to_dict
from bruno.data import Examples
from bruno.training.run import Run
from cli.commandline import run, values_of


def test_an_exported_model_needs_no_run(digits_run, workplace):
    run("export", digits_run, "model.safetensors", "--half")
    fewshot = ["--way", "3", "--shot", "5", "--trials", "10"]
    run("fewshot", "model.safetensors", *fewshot)
    exported = values_of("model", "few-shot-test")["bruno"][0]
    original = bruno.open(digits_run).few_shot(ways=(3,), shots=(5,), trials=10).comparison.model[0]
    assert exported["accuracy"] == pytest.approx(original.accuracy, abs=0.03)
    run("sample", "model.safetensors", "--prior", "--samples", "4")
    run("evaluate", "model.safetensors", "--sets", "4", "--set-size", "3")
    run("evaluate", "model.safetensors", "--sets", "4", "--set-size", "2", "--data", "digits")
    assert Path("model/results/bits-digits-test.png").is_file()
    assert len(values_of("model", "bits-test")["by_position"]) == 3


def test_a_model_file_has_its_recipe_and_provenance_and_can_be_rounded(tiny, tmp_path):
    whole, half = Path("run/model.safetensors"), Path("half.safetensors")
    run("export", whole, half, "--half")
    run("export", "run", "from-run.safetensors", "--half")
    assert half.read_bytes() == Path("from-run.safetensors").read_bytes()
    run("export", "run", "small.safetensors", "--int8")
    assert Path("small.safetensors").stat().st_size < half.stat().st_size
    with pytest.raises(ValueError, match=r"`int8` is for model files"):
        run("export", "run", "graphs", "--onnx", "--int8")
    about = read_about(half)
    assert about == read_about(whole)
    assert about["recipe"] == json.loads(Path("run/recipe.json").read_text())
    _, header = read(Run("run").checkpoints[-1], "cpu")
    assert about["provenance"] == header["provenance"]  # of the training


@pytest.fixture
def on_machines(trained_once, workplace):
    """A calibrated model of a table in run/, and its data in clean.csv."""
    shutil.copytree(trained_once, "run")
    shutil.copy(bruno.open("run").recipe.data.name, "clean.csv")
    run("calibrate", "run", "clean.csv")


def test_an_exported_model_keeps_its_calibration(on_machines):
    assert "calibration is kept in model/calibration.safetensors" in run("export", "run", "model.safetensors")
    kept = [bruno.open(path).kept_calibration() for path in ("run", "model.safetensors")]
    assert kept[0].data == kept[1].data == "clean.csv"
    thresholds = [one.stream().threshold(5, 0.1) for one in kept]
    assert thresholds[0] == thresholds[1]
    bruno.open("run").export("mine.safetensors")
    assert bruno.open("mine.safetensors").kept_calibration().data == "clean.csv"
    output = run("export", "run", "half.safetensors", "--half")
    assert "bruno calibrate half.safetensors" in output
    assert not Path("half").exists()


def test_a_model_without_calibration_and_data_says_how_to_calibrate(on_machines, monkeypatch):
    run("export", "run", "model.safetensors")
    shutil.rmtree("model")
    monkeypatch.setattr("bruno.recipe_data.RecipeData.split", missing_data)
    with pytest.raises(ValueError, match=r"calibration.*`data` must be .*bruno calibrate model.safetensors"):
        run("anomaly", "watch", "model.safetensors", "clean.csv")


def missing_data(*arguments: object) -> None:
    raise ValueError("`data` must be an existing path; got 'gone.csv'.")


def test_a_mistake_names_the_argument_and_its_value(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"`model` .*nowhere"):
        run("export", "nowhere", "model.safetensors")
    for out in (tmp_path, tmp_path / "missing" / "model.safetensors"):
        with pytest.raises(ValueError, match=rf"`out` .*{re.escape(str(out))}"):
            run("export", "run", out)


def test_a_model_file_needs_no_suffix(tiny):
    run("export", "run", "model")
    run("sample", "model", "--prior", "--samples", "2")
    assert Path("model-results/results/samples-prior.png").is_file()


def test_a_small_size_is_printed_in_kib(tiny):
    size = Path("run/model.safetensors").stat().st_size
    assert size < 2**20
    assert f"{size / 2**10:.1f} KiB" in run("export", "run", "model.safetensors")


def save_tiny(preset: str, name: str) -> None:
    """Save a small model of a preset among the pretrained ones."""
    recipe = load_recipe(preset, ["flow.kind=dense", "flow.couplings=2", "flow.units=8"])
    model = Bruno.from_config(recipe.model((1, 28, 28), 256))
    Path("weights").mkdir(exist_ok=True)
    bruno.save(model, f"weights/{name}.safetensors", about={"recipe": to_dict(recipe)})


@pytest.fixture
def tiny_pretrained(workplace, monkeypatch) -> str:
    """The name of a small pretrained model, trained on Omniglot, which is not available."""
    save_tiny("omniglot", "tiny")
    monkeypatch.setattr("bruno.weights._WEIGHTS", workplace / "weights")
    monkeypatch.setenv("BRUNO_CACHE", str(workplace / "cache"))
    monkeypatch.delenv("BRUNO_DATA", raising=False)
    return "tiny"


@pytest.mark.slow
def test_a_pretrained_model_uses_built_in_characters_if_its_data_is_missing(tiny_pretrained):
    note = r"omniglot is not on this machine.*drawn.*name omniglot itself \(`--data`\)"
    assert re.search(note, run("sample", "tiny", "--set-size", "2", "--samples", "2"))
    run("fewshot", "tiny", "--way", "5", "--shot", "1", "--trials", "2", "--no-rotations")
    assert values_of("runs/pretrained-tiny", "few-shot-drawn")["split"] == "drawn"
    run("evaluate", "tiny", "--set-size", "2", "--sets", "8")
    assert Path("runs/pretrained-tiny/results/bits-drawn.json").is_file()
    run("report", "tiny")
    page = Path("runs/pretrained-tiny/report.html").read_text()
    assert "Few-shot classification on drawn" in page


def test_a_pretrained_model_of_other_images_samples_from_the_prior_if_its_data_is_missing(tiny_pretrained):
    save_tiny("mnist", "digits-model")
    output = run("sample", "digits-model", "--samples", "3", "--device", "cpu")
    assert re.search(
        r"mnist is not on this machine; .*the prior.*`--data-dir`.*mnist itself \(`--data`\)", output
    )
    assert Path("runs/pretrained-digits-model/results/samples-prior.png").is_file()
    for command in (["sample", "digits-model", "--set-size", "2"], ["evaluate", "digits-model"]):
        with pytest.raises(ValueError, match=r"`data` .*mnist is not on this machine.*`data_dir`.*`data`"):
            run(*command, "--device", "cpu")


def test_a_pretrained_model_uses_its_data_if_it_is_available(tiny_pretrained, monkeypatch):
    Path("data").mkdir()
    names = ("Angelic/character01", "Gurmukhi/character42", "Gurmukhi/character43")  # the last two are test
    published = Examples(torch.zeros(12, 1, 28, 28, dtype=torch.uint8), torch.arange(12) // 4, names)
    monkeypatch.setattr("bruno.data.datasets.OMNIGLOT_FIRST", (names[0], names[0]))
    published.save(Path("data/omniglot.npz"))
    output = run("evaluate", "tiny", "--set-size", "2", "--sets", "8", "--data-dir", "data")
    assert "not on this machine" not in output
    assert "8 sets" in output
    assert Path("runs/pretrained-tiny/results/bits-test.json").is_file()


def test_a_folder_with_the_name_of_a_pretrained_model_is_not_a_run(tiny_pretrained):
    Path("tiny").mkdir()  # such as a folder of data
    run("sample", "tiny", "--prior", "--samples", "2", "--device", "cpu")
    assert Path("runs/pretrained-tiny/results/samples-prior.png").is_file()


@pytest.mark.usefixtures("without_shape_checks")
def test_onnx_graphs_are_written_to_a_folder(tiny):
    output = run("export", "run", "graphs", "--onnx", "--half")
    assert sorted(path.name for path in Path("graphs").iterdir()) == [
        "decode.onnx",
        "encode.onnx",
        "score.onnx",
        "weights.bin",
    ]
    assert "graphs" in output
