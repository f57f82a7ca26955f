"""The pretrained models, on images drawn for this project."""

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
from cli.commandline import run
from PIL import Image

import bruno
from bruno.checkpoint import read_about
from bruno.data import ElementReader, load_examples
from bruno.data.images import read_images
from bruno.data.sampling import SetSampler
from bruno.tasks.classification import classify
from bruno.tasks.detector import Detector
from bruno.tasks.episodes import FewShotProtocol
from bruno.tasks.evaluation import measure_bits_per_dim
from bruno.tasks.familiarity import UnfamiliarDataWarning
from bruno.tasks.few_shot import measure_few_shot
from bruno.tasks.index import Index
from bruno.tasks.retrieval import rank
from bruno.weights import pretrained_names, pretrained_path

pytestmark = pytest.mark.usefixtures("familiarity_once")
ROOT = Path(__file__).parents[1]
NAMES = ("omniglot", "omniglot-small")
EXAMPLES = Path(__file__).parents[1] / "examples"


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


@pytest.mark.parametrize("name", pretrained_names())
def test_a_model_is_documented(name):
    path = pretrained_path(name)
    card = path.with_suffix(".md").read_text()
    for what in ("**Data**", "**Training**", "**Numbers**", "**Limits**", "**Licence**", "bits/dim"):
        assert what in card
    about = read_about(path)
    assert f"bruno train {name} " in about["provenance"]["command"]
    assert {p.dtype for p in bruno.pretrained(name).parameters()} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_all_of_the_training_characters_are_used(name):
    data = read_about(pretrained_path(name))["recipe"]["data"]
    assert (data["name"], data["split"]) == ("omniglot", "trainval")


def test_a_clone_stays_light():
    assert sum(path.stat().st_size for path in pretrained_path("omniglot").parent.rglob("*")) < 36e6


def test_other_names_are_errors():
    assert set(NAMES) <= set(pretrained_names())
    with pytest.raises(ValueError, match=r"`name` .*omniglot, omniglot-small; got 'nobody'"):
        bruno.pretrained("nobody")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(pretrained_names()) - set(NAMES)))
def test_samples_need_no_data(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BRUNO_CACHE", str(tmp_path))
    monkeypatch.delenv("BRUNO_DATA", raising=False)
    assert "sampling from the prior" in run("sample", name, "--samples", "4", "--device", "cpu")
    with np.load(f"runs/pretrained-{name}/results/samples-prior.npz") as file:
        assert file["samples"].shape[0] == 4
        assert file["samples"].std() > 20


def test_new_drawings_are_classified_and_retrieved(model, known, new):
    images, letters = new
    support = [known.elements[known.labels == i] for i in range(len(known.names))]
    assert [known.names[i] for i in classify(model, support, images).labels] == letters
    ranking = rank(Index.of(model, images), model, support[1])
    assert {letters[i] for i in ranking.order[:3]} == {known.names[1]}


def test_scores_separate_characters_of_a_class_from_others():
    model = bruno.pretrained("omniglot")
    reader = ElementReader(model.shape, model.levels)
    scores = model.condition(reader.read_all([ROOT / "examples/known/a"])[0]).score(
        reader.read_all([ROOT / "examples/new"])[0]
    )
    assert scores[:3].min() > 25
    assert scores[3:].max() < 0


def test_outliers_in_a_stream_have_negative_scores(model):
    stream, _ = ElementReader(model.shape, model.levels).read_all([ROOT / "examples" / "stream"])
    scores = [scored.score for scored in Detector(model, 0.0).watch(stream)]
    assert [i for i, score in enumerate(scores, 1) if score < -1] == [8, 11]


@pytest.mark.slow
def test_bits_per_dim_and_accuracy_on_unseen_characters(model):
    drawn = load_examples("drawn", "all")
    noise = torch.Generator().manual_seed(0)
    bits = measure_bits_per_dim(model, SetSampler(drawn), sets=10, set_size=10, generator=noise)
    protocol = FewShotProtocol(ways=(12,), shots=(1,), trials=4, noise=False)
    (result,) = measure_few_shot(model, drawn.select(drawn.names[:12]), protocol, generator=noise)
    assert bits.mean < 1.45  # the pen differs from that of Omniglot
    assert result.accuracy > 0.9  # nearest neighbours in pixels: 0.73


def test_the_example_files_are_the_output_of_their_script(tmp_path):
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


KNOWN = ROOT / "examples" / "known"
UNLIKE = "unlike the training images"


@pytest.fixture
def dark_ink(tmp_path, monkeypatch):
    """The known characters in dark ink on white paper, as class folders."""
    for path in KNOWN.rglob("*.png"):
        to = tmp_path / "ink" / path.parent.name / path.name
        to.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - np.asarray(Image.open(path))).save(to)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ink"


@pytest.fixture(scope="module")
def omniglot():
    """The density model, which takes images as they are; its `familiarity` is estimated once."""
    return bruno.open("omniglot", device="cpu", drawings=False)


def test_images_in_dark_ink_are_reported_unless_inverted(dark_ink, omniglot):
    sample = [
        "sample",
        "omniglot",
        "--no-drawings",
        "--data",
        dark_ink,
        "--set-size",
        "2",
        "--samples",
        "1",
        "--prefixes",
        "2",
    ]
    assert re.search(
        rf"warning: .*{UNLIKE}: mean brightness 87%; that of training images is 8%", run(*sample)
    )
    assert "unlike" not in run(*sample, "--invert")
    with np.load("runs/pretrained-omniglot/results/samples.npz") as file:
        assert file["inputs"].mean() < 64
    with pytest.raises(ValueError, match=r"`invert` .*`data`"):
        run("sample", "omniglot", "--data", "drawn", "--invert")


@pytest.mark.parametrize("kind", ["path", "image", "array"])
def test_dark_ink_is_a_warning_in_python(dark_ink, omniglot, kind):
    path = sorted((dark_ink / "a").iterdir())[0]
    source = {
        "path": lambda: path,
        "image": lambda: Image.open(path),
        "array": lambda: np.asarray(Image.open(path).resize((28, 28), Image.Resampling.BILINEAR))[None],
    }[kind]
    with pytest.warns(bruno.trained.UnfamiliarDataWarning, match=f"{UNLIKE}: mean brightness 9"):
        omniglot.read(source())
    assert omniglot.read(source(), invert=True).x.float().mean() < 64


def test_every_job_on_user_images_can_invert_them(dark_ink, omniglot):
    new = sorted((dark_ink / "a").iterdir())[:2]
    with pytest.warns(bruno.trained.UnfamiliarDataWarning):
        omniglot.classify(new, KNOWN)
    omniglot.classify(new, dark_ink, invert=True)
    detector = omniglot.detector(threshold=0.0)
    with pytest.warns(bruno.trained.UnfamiliarDataWarning):
        list(omniglot.watch(new, detector))
    list(omniglot.watch(new, detector, invert=True))
    omniglot.few_shot(data=str(dark_ink), trials=2, shots=(1,), noise=False, rotations=False, invert=True)


def test_one_image_in_dark_ink_among_others_is_reported(dark_ink, omniglot):
    images = sorted(KNOWN.rglob("*.png"))
    images[3] = dark_ink / images[3].relative_to(KNOWN)
    number = f"1 of {len(images)} images, such as number 4, whose mean brightness is 92%"
    with pytest.warns(bruno.trained.UnfamiliarDataWarning, match=number):
        omniglot.read(images)
    Image.new("L", (105, 105)).save("blank.png")
    detector = omniglot.detector(threshold=0.0)

    def warnings_of(*stream) -> list[str]:
        with pytest.warns(bruno.trained.UnfamiliarDataWarning) as caught:
            list(omniglot.watch(stream, detector))
        return [str(warning.message) for warning in caught]

    [warning] = warnings_of(*images[:5])
    assert f"{images[3]} is unlike" in warning
    assert (
        len(warnings_of("blank.png", *images[2:4])) == 2
    )  # the first image, and the first that is too bright
    assert len(warnings_of(images[3], images[3])) == 1


@pytest.mark.slow
def test_a_collection_in_dark_ink_is_reported_at_every_search(dark_ink, caplog):
    trained = bruno.open("omniglot-small", drawings=False)
    for _ in range(2):  # encoded, and read from its index
        with (
            pytest.warns(bruno.trained.UnfamiliarDataWarning, match="unlike .*: mean brightness"),
            caplog.at_level("INFO", "bruno"),
        ):
            trained.retrieve(KNOWN / "a", dark_ink / "b")
    assert caplog.text.count("encoded") == 1
    shutil.copytree(KNOWN / "b", "mixed")
    shutil.copy(sorted((dark_ink / "b").iterdir())[0], "mixed/dark.png")
    with pytest.warns(bruno.trained.UnfamiliarDataWarning, match="mixed.* unlike"):
        trained.retrieve(KNOWN / "a", "mixed", top=2)


def test_shaded_paper_is_reported_by_its_density(dark_ink, omniglot):
    for path in dark_ink.rglob("*.png"):
        ink = 255 - np.asarray(Image.open(path)).astype(int)
        Image.fromarray((0.8 * ink + 30).astype(np.uint8)).save(path)
    with pytest.warns(bruno.trained.UnfamiliarDataWarning) as caught:
        omniglot.read(dark_ink / "a")
    found = re.search(rf"{UNLIKE}: ([\d.]+) bits/dim, .* most ([\d.]+)\.", str(caught[0].message))
    assert float(found[1]) > 2 * float(found[2])


@pytest.mark.long
def test_a_pretrained_model_is_fine_tuned_to_dark_ink(dark_ink, monkeypatch):
    monkeypatch.setattr("bruno.finetuning.default_sets_per_class", lambda classes: 4)
    tune = [
        "finetune",
        "omniglot-small",
        "--no-drawings",
        "--set",
        f"data.name={dark_ink}",
        "--set",
        "train.batch=2",
    ]
    tune += ["--steps", "1", "--episodes", "1", "--way", "2", "--set", "train.set_size=3"]
    output = run(*tune, "--out", "dark", "--trials", "0")
    assert re.search(rf"{UNLIKE}.*`data.invert`", output)
    output = run(*tune, "--set", "data.invert=true", "--out", "bright", "--trials", "2")
    assert "unlike" not in output
    before, after = json.loads(Path("bright/results/finetuning-test.json").read_text())["rows"][0][1:]
    bits = float(before.split()[0])
    assert 0.8 < bits < 2.2  # as for bright ink
    assert float(after.split()[0]) == pytest.approx(bits, abs=0.2)


def test_thresholds_are_calibrated_on_unseen_classes(monkeypatch, omniglot):
    splits = []
    monkeypatch.setattr("bruno.trained.data.is_available", lambda name, data_dir: True)
    monkeypatch.setattr(
        "bruno.trained.data.RecipeData.split",
        lambda self, split: splits.append(split) or load_examples("drawn", "all"),
    )
    clean = omniglot._clean_groups()
    assert splits == ["test", "trainval"]  # trained on trainval
    assert len(clean.examples.names) == 40


@pytest.mark.parametrize(("environment", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_waiting_threads_sleep_unless_the_environment_sets_a_spin_count(environment, expected):
    kept = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    spy = "import sys, os; sys.modules['torch'] = None\ntry: import bruno\nexcept ImportError: pass\n"
    code = [sys.executable, "-c", f"{spy}print(os.environ['GOMP_SPINCOUNT'])"]  # set before torch is imported
    assert subprocess.check_output(code, env=kept | environment, text=True).strip() == expected


# --- images that someone else made -----------------------------------------------------------------------

FILTERS = ("BILINEAR", "BICUBIC", "BOX", "LANCZOS")


def resized_examples(filter: str, to: Path, *, dark: bool = False) -> Path:
    """The example images at 28 × 28 by a filter of Pillow, as class folders and a folder of new images."""
    for path in [*(ROOT / "examples").glob("known/*/*.png"), *(ROOT / "examples").glob("new/*.png")]:
        small = Image.open(path).convert("L").resize((28, 28), Image.Resampling[filter])
        target = to / path.relative_to(ROOT / "examples")
        target.parent.mkdir(parents=True, exist_ok=True)
        (small.point(lambda level: 255 - level) if dark else small).save(target)
    return to


def correct(outcome) -> int:
    chosen = [outcome.classes[label] for label in outcome.labels]
    return sum(name == Path(path).name[0] for name, path in zip(chosen, outcome.names, strict=True))


@pytest.fixture(scope="module")
def normalising():
    """The small model, which normalises drawings; its `familiarity` is estimated once."""
    return bruno.open("omniglot-small", device="cpu")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("filter", FILTERS)
def test_drawings_are_recognised_whatever_made_them(normalising, filter, dark, tmp_path):
    folder = resized_examples(filter, tmp_path, dark=dark)
    assert correct(normalising.classify(folder / "new", folder / "known")) == 15


@pytest.mark.parametrize("ink", ["black", "white"])
def test_strokes_on_transparent_pixels_are_recognised(normalising, ink, tmp_path):
    for path in [*(ROOT / "examples").glob("known/*/*.png"), *(ROOT / "examples").glob("new/*.png")]:
        target = tmp_path / path.relative_to(ROOT / "examples")
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as drawn:
            strokes = Image.new("RGBA", drawn.size, ink)
            strokes.putalpha(drawn.convert("L"))
        strokes.save(target)
    assert correct(normalising.classify(tmp_path / "new", tmp_path / "known")) == 15


def test_images_are_normalised_unless_that_is_switched_off(normalising, tmp_path):
    folder = resized_examples("BOX", tmp_path)
    trained, plain = normalising, bruno.open("omniglot-small", device="cpu", drawings=False)
    assert (trained.normalises, plain.normalises) == (True, False)
    path = folder / "new" / "a6.png"
    pixels = torch.from_numpy(np.array(Image.open(path)))[None, None]
    for source in (path, Image.open(path)):
        assert torch.equal(plain.read(source).x, pixels)
        assert not torch.equal(trained.read(source).x, pixels)
    assert torch.equal(trained.read(path).x, trained.read(Image.open(path)).x)
    first, known = folder / "known" / "a" / "1.png", str(folder / "known")
    for opened in (trained, plain):
        assert torch.equal(opened.examples(data=known).elements[:1], opened.read(first).x)


def test_tensors_are_not_normalised_but_warned_about(normalising, tmp_path):
    trained, folder = normalising, resized_examples("BILINEAR", tmp_path, dark=True)
    images = np.stack([np.asarray(Image.open(path)) for path in sorted((folder / "new").glob("*.png"))])
    with pytest.warns(UnfamiliarDataWarning, match="brightness"):
        read = trained.read(images).x
    assert torch.equal(read[:, 0], torch.from_numpy(images))


@pytest.mark.parametrize("name", NAMES)
def test_a_pretrained_model_comes_with_a_calibration_on_characters_it_was_not_trained_on(name):
    trained = bruno.open(name, device="cpu")
    found = trained.calibration()
    assert "test characters" in found.data
    assert found.unseen
    assert not len(found.groups.latents)  # which would reveal the drawings
    stream, batch = found.stream(), found.batch(30)
    assert stream.basis(5, 0.05) == batch.basis(19, 0.05) == "exact"
    assert stream.basis(5, 0.01) == "estimated"
    assert stream.threshold(5, 0.01) < stream.threshold(5, 0.1)
    assert trained.kept_calibration() is None


def test_a_character_of_no_class_is_none_of_these():
    trained = bruno.open("omniglot-small", device="cpu")
    known = {name: str(EXAMPLES / "known" / name) for name in "abcd"}
    found = trained.classify(str(EXAMPLES / "new"), known, none_rate=0.05)
    rejected = {Path(name).stem for name, none in zip(found.names, found.none_of_these, strict=True) if none}
    assert rejected == {"e6", "e7", "e8"}
    assert trained.classify(str(EXAMPLES / "new" / "a6.png"), known).none_of_these.tolist() == [False]
