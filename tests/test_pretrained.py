"""The models that come with the package, on images that the project drew: a user's first minute."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import bruno
from bruno.checkpoint import read_about
from bruno.cli import app
from bruno.data import ElementReader, load_examples
from bruno.data.images import read_images
from bruno.data.sampling import SetSampler
from bruno.tasks.anomaly import Detector
from bruno.tasks.classification import classify
from bruno.tasks.evaluation import measure_bits_per_dim
from bruno.tasks.few_shot import FewShotProtocol, measure_few_shot
from bruno.tasks.retrieval import Index, rank
from bruno.weights import pretrained_names, pretrained_path

ROOT = Path(__file__).parents[1]
NAMES = ("omniglot", "omniglot-fewshot")


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return bruno.pretrained(request.param)


@pytest.fixture(scope="module")
def known():
    return read_images(ROOT / "examples" / "known", size=(28, 28))


@pytest.fixture(scope="module")
def new(model):
    paths = sorted((ROOT / "examples" / "new").glob("*.png"))
    return ElementReader(model.shape, model.levels).read_all(paths)[0], [path.name[0] for path in paths]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_small_and_says_what_it_is(name):
    path = pretrained_path(name)
    assert path.stat().st_size <= 16e6
    card = path.with_suffix(".md").read_text()
    for what in ("**Data**", "**Training**", "**Numbers**", "**Limits**", "**Licence**", "bits/dim"):
        assert what in card
    about = read_about(path)
    assert about["recipe"]["data"] | {"name": "omniglot", "split": "trainval"} == about["recipe"]["data"]
    assert f"bruno train {name} " in about["provenance"]["command"]
    assert {p.dtype for p in bruno.pretrained(name).parameters()} == {torch.float32}


def test_there_are_no_others():
    assert pretrained_names() == NAMES
    with pytest.raises(ValueError, match=r"`name` must be .*omniglot, omniglot-fewshot; got 'mnist'"):
        bruno.pretrained("mnist")


def test_new_drawings_are_told_apart_and_found(model, known, new):
    images, letters = new
    support = [known.elements[known.labels == i] for i in range(len(known.names))]
    assert [known.names[i] for i in classify(model, support, images).labels] == letters
    ranking = rank(Index.of(model, images), model, support[1])
    assert {letters[i] for i in ranking.order[:3]} == {known.names[1]}


def test_what_the_readme_says_of_its_scores():
    model = bruno.pretrained("omniglot-fewshot")
    reader = ElementReader(model.shape, model.levels)
    scores = model.condition(reader.read_all([ROOT / "examples/known/a"])[0]).score(
        reader.read_all([ROOT / "examples/new"])[0]
    )
    assert scores[:3].min() > 30
    assert scores[3:].max() < 1


def test_strangers_in_a_stream_are_noticed(model):
    stream, _ = ElementReader(model.shape, model.levels).read_all([ROOT / "examples" / "stream"])
    scores = [scored.score for scored in Detector(model, 0.0).watch(stream)]
    assert [i for i, score in enumerate(scores, 1) if score < 0] == [8, 11]


def test_it_is_good_at_characters_that_nobody_has_seen(model):
    drawn = load_examples("drawn", "all")
    noise = torch.Generator().manual_seed(0)
    bits = measure_bits_per_dim(model, SetSampler(drawn), sets=40, set_size=10, generator=noise)
    protocol = FewShotProtocol(ways=(20,), shots=(1,), trials=2, noise=False)
    (result,) = measure_few_shot(model, drawn, protocol, generator=noise)
    assert bits.mean < 1.45  # a pen that is not quite Omniglot's
    assert result.accuracy > 0.9  # of nearest pixels 0.65


def test_the_images_to_try_it_on_are_drawn_by_the_script_beside_them(tmp_path):
    spec = importlib.util.spec_from_file_location("draw", ROOT / "examples" / "draw.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.draw(tmp_path)
    script.tabulate(tmp_path)
    for name in ("machines.csv", "machine.csv"):
        assert (tmp_path / name).read_text() == (ROOT / "examples" / name).read_text()
    names = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.png"))
    assert names == sorted(p.relative_to(ROOT / "examples") for p in (ROOT / "examples").rglob("*.png"))
    for name in names:
        assert np.array_equal(
            *(np.asarray(Image.open(folder / name)) for folder in (tmp_path, ROOT / "examples"))
        )


@pytest.fixture
def dark_ink(tmp_path, monkeypatch):
    """The known characters in dark ink on white paper, as class folders."""
    for path in (ROOT / "examples" / "known").rglob("*.png"):
        to = tmp_path / "ink" / path.parent.name / path.name
        to.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - np.asarray(Image.open(path))).save(to)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ink"


def said(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_dark_ink_is_noticed_and_can_be_inverted(dark_ink):
    plain = said("sample", "omniglot", "--data", dark_ink, "--length", "2", "--samples", "1")
    assert "unlike those the model learnt: a brightness of 87%, there 8%" in plain
    inverted = said("sample", "omniglot", "--data", dark_ink, "--length", "2", "--samples", "1", "--invert")
    assert "unlike" not in inverted
    with np.load("runs/pretrained-omniglot/results/samples.npz") as file:
        assert file["inputs"].mean() < 64
    few = said(
        "fewshot", "omniglot", "--data", dark_ink, "--trials", "2", "--shot", "1", "--invert", "--no-noise"
    )
    assert "unlike" not in few
    support = ("--support", ROOT / "examples" / "known")
    assert "unlike" in said("classify", "omniglot", dark_ink / "a", *support)
    assert "unlike" not in said("classify", "omniglot", dark_ink / "a", "--support", dark_ink, "--invert")
    assert "unlike" in said("anomaly", "omniglot", dark_ink / "a", "--threshold", "0")
    assert "unlike" not in said("anomaly", "omniglot", dark_ink / "a", "--threshold", "0", "--invert")
    with pytest.raises(ValueError, match="`--invert` is for images of your own"):
        said("sample", "omniglot", "--data", "drawn", "--invert")


def test_one_image_in_dark_ink_among_others_is_noticed(dark_ink):
    known = ROOT / "examples" / "known"
    images = sorted(known.rglob("*.png"))
    images[3] = dark_ink / images[3].relative_to(known)
    told = " ".join(said("classify", "omniglot", *images, "--support", known).split())
    assert f"1 of {len(images)}, first number 4, with a brightness of 92%" in told
    told = said("anomaly", "omniglot", *images, "--threshold", "0")
    assert told.count("unlike those the model learnt") == 1
    assert f"{images[3]} is unlike" in told
    Image.new("L", (105, 105)).save("blank.png")
    told = said("anomaly", "omniglot", "blank.png", *images[2:4], "--threshold", "0")
    assert told.count("unlike those the model learnt") == 2  # for one reason and another
    told = said("anomaly", "omniglot", images[3], images[3], "--threshold", "0")
    assert told.count("unlike those the model learnt") == 1


def test_a_collection_in_dark_ink_is_noticed_when_it_is_encoded_and_later(dark_ink):
    look = ["retrieve", "omniglot-fewshot", "--query", ROOT / "examples" / "known" / "a"]
    for times in ("encoded", "found again"):
        told = said(*look, "--collection", dark_ink / "b")
        assert ("once" in told) == (times == "encoded")
        assert "unlike those the model learnt: a brightness" in told
    mixed = Path("mixed")
    shutil.copytree(ROOT / "examples" / "known" / "b", mixed)
    shutil.copy(sorted((dark_ink / "b").iterdir())[0], mixed / "dark.png")
    told = " ".join(said(*look, "--collection", mixed, "--top", "2").split())
    assert "the collection's images are unlike those the model learnt: " in told


def test_shaded_paper_is_noticed_by_its_density(dark_ink):
    for path in dark_ink.rglob("*.png"):
        ink = 255 - np.asarray(Image.open(path)).astype(int)
        Image.fromarray((0.8 * ink + 30).astype(np.uint8)).save(path)
    told = " ".join(said("classify", "omniglot", dark_ink / "a", "--support", dark_ink).split())
    found = re.search(r"unlike those the model learnt: ([\d.]+) bits/dim, samples .* most ([\d.]+)\.", told)
    assert found
    assert float(found[1]) > 2 * float(found[2])


def test_a_model_that_ships_is_fine_tuned_to_dark_ink(dark_ink):
    tune = ["finetune", "omniglot", "--set", f"data.name={dark_ink}", "--set", "train.batch=2"]
    tune += ["--steps", "1", "--episodes", "1"]
    told = said(*tune, "--out", "dark", "--trials", "0")
    assert "unlike those the model learnt" in told
    assert "See whether ink is dark (--set data.invert=…)" in " ".join(told.split())
    told = said(*tune, "--set", "data.invert=true", "--out", "bright")
    assert "unlike" not in told
    before, after = json.loads(Path("bright/results/finetuning-test.json").read_text())["rows"][0][1:]
    bits = float(before.split()[0])
    assert 0.8 < bits < 2.2  # of bright ink
    assert float(after.split()[0]) == pytest.approx(bits, abs=0.2)


def test_classes_that_training_saw_are_not_calibrated_on(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr("bruno.cli.opening.is_available", lambda name, data_dir: True)
    monkeypatch.setattr(
        "bruno.cli.opening.held_out_examples",
        lambda recipe, split, data_dir: asked.append(split) or load_examples("drawn", "all"),
    )
    told = said(
        "anomaly", "omniglot", ROOT / "examples" / "stream", "--sets", "10", "--rate", "0.1", "--length", "3"
    )
    assert asked == ["test"]
    assert "after one element" in told


@pytest.mark.parametrize(("environment", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_that_wait_go_to_sleep_unless_told_otherwise(environment, expected):
    kept = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    spy = "import sys, os; sys.modules['torch'] = None\ntry: import bruno\nexcept ImportError: pass\n"
    code = [
        sys.executable,
        "-c",
        spy + "print(os.environ['GOMP_SPINCOUNT'])",
    ]  # set before torch is asked for
    assert subprocess.check_output(code, env=kept | environment, text=True).strip() == expected
