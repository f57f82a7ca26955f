"""`bruno.train` and `bruno.finetune`."""

import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from PIL import Image

import bruno
from bruno.data import load_examples
from bruno.devices import resolve_device
from bruno.fit import TrainingInterrupted, with_settings
from bruno.tasks import Familiarity
from bruno.training import Run
from bruno.training.step_cost import ElementCost
from bruno.training.trainer import Trainer

MACHINES = Path(__file__).parents[1] / "examples" / "machines.csv"
TINY = {"batch": 4, "flow": {"units": 16, "couplings": 2}, "device": "cpu", "validation_sets": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> bruno.Trained:
    """A run of three steps."""
    return bruno.train("digits", tmp_path_factory.mktemp("fit") / "run", steps=3, save_every=0, **TINY)


def test_a_trained_model_is_the_one_that_is_opened_later(tiny):
    opened = bruno.open(tiny.folder)
    assert opened.model.fingerprint() == tiny.model.fingerprint()
    assert bruno.open(tiny.folder / "model.safetensors").model.fingerprint() == tiny.model.fingerprint()
    assert opened.recipe == tiny.recipe
    assert opened.folder == tiny.folder
    assert not any(parameter.requires_grad for parameter in tiny.model.parameters())


def test_a_model_knows_how_likely_images_of_held_out_classes_are(tiny, tmp_path):
    held_out = load_examples("digits", "validation").elements
    expected = Familiarity(tiny.model).measure(held_out)
    shutil.copy(tiny.folder / "model.safetensors", tmp_path / "moved.safetensors")
    tuned = bruno.finetune(tiny, tmp_path / "tuned", steps=1, episodes=2, way=2, trials=0).trained
    again = bruno.open(tiny.folder).export(tmp_path / "exported.safetensors")
    for found in (tiny, *map(bruno.open, (tiny.folder, tmp_path / "moved.safetensors", again))):
        assert found.about["familiarity"] == pytest.approx(expected, rel=1e-4)
        assert found.familiarity.check(held_out) == ""
    assert tuned.about["familiarity"] == pytest.approx(Familiarity(tuned.model).measure(held_out), rel=1e-4)
    shutil.copytree(tiny.folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "notes.json").write_text("[")
    assert bruno.open(tmp_path / "damaged").about.keys() == {"recipe", "provenance"}


def test_training_leaves_the_global_generator_as_it_was(tmp_path):
    torch.manual_seed(77)
    expected = torch.rand(3)
    torch.manual_seed(77)
    bruno.train("digits", tmp_path / "run", steps=1, **TINY)
    assert torch.equal(torch.rand(3), expected)


def test_a_recipe_can_be_an_object_a_preset_or_a_file(tiny, tmp_path):
    recipe = bruno.load_recipe("digits")
    train = evolve(recipe.train, steps=3, batch=4)
    recipe = evolve(recipe, train=train, flow=evolve(recipe.flow, units=16, couplings=2))
    of_object = bruno.train(recipe, tmp_path / "object", device="cpu", validation_sets=0)
    assert of_object.model.fingerprint() == tiny.model.fingerprint()
    text = '[data]\nname = "digits"\n[flow]\nkind = "dense"\nunits = 8\n[train]\nsteps = 1\nbatch = 2\n'
    (tmp_path / "mine.toml").write_text(text)
    of_file = bruno.train(str(tmp_path / "mine.toml"), tmp_path / "file", device="cpu", validation_sets=0)
    assert of_file.recipe.flow.units == 8


def test_a_frame_is_trained_on_and_kept_in_the_run_folder(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    rows = np.random.default_rng(0).normal(size=(60, 2))
    frame = pyarrow.table({"of": [f"m{i % 15}" for i in range(60)], "a": rows[:, 0], "b": rows[:, 1]})
    data = {"name": frame, "group": "of"}
    for resume in (False, True):
        run = bruno.train("table", tmp_path / "run", data=data, steps=1 + resume, resume=resume, **TINY)
    opened = bruno.open(run.folder)
    assert opened.columns == ("a", "b")
    assert len(opened.examples("all")) == 60
    x, names, groups = opened.read(frame)
    assert np.allclose(x, rows)
    assert (names[1], groups[1]) == ("row 2", "m1")


@pytest.mark.parametrize(
    ("preset", "rows", "message"), [("table", 0, "at least one row"), ("images", 9, "dense")]
)
def test_nothing_is_kept_of_a_frame_that_cannot_be_trained_on(tmp_path, preset, rows, message):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"of": ["m1"] * 9, "a": range(9)})[:rows]
    with pytest.raises(ValueError, match=message):
        bruno.train(preset, tmp_path / "run", data={"name": frame, "group": "of"})
    assert not (tmp_path / "run").exists()


def test_data_are_named_by_a_path_or_a_frame_alone(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(np.random.default_rng(0).normal(size=(300, 2)).round(3), columns=["a", "b"])
    frame.to_csv(tmp_path / "t.csv", index=False)
    of_path, of_name, of_frame = (
        bruno.train("table", tmp_path / f"run{i}", data=data, steps=1, **TINY)
        for i, data in enumerate([str(tmp_path / "t.csv"), {"name": tmp_path / "t.csv"}, frame])
    )
    assert of_path.model.fingerprint() == of_name.model.fingerprint()
    assert of_path.columns == of_frame.columns == ("a", "b")
    for data in (frame.to_numpy(), {"name": frame.to_numpy()}, None):
        with pytest.raises(TypeError, match=r"`data` .* a path or a frame; got (ndarray|NoneType)"):
            bruno.train("table", tmp_path / "none", data=data, **TINY)


@pytest.fixture
def icons(tmp_path) -> Path:
    """Class folders of transparent icons; the brightness of each class varies around medium grey."""
    for i in range(24):
        pixels = np.zeros((8, 8, 4), np.uint8)
        pixels[2:6, 2:6] = (*[100 + 3 * i] * 3, 255)
        path = tmp_path / "icons" / f"class{i % 4}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "icons"


def test_transparent_images_of_all_classes_have_one_backdrop(icons, tmp_path):
    settings = {"steps": 1, "data": {"name": str(icons), "size": 8}, **TINY}
    by_default = bruno.train("digits", tmp_path / "run", **settings)
    settings["data"]["backdrop"] = "white"
    white = bruno.train("digits", tmp_path / "white", **settings)
    for trained, value in ((by_default, 0), (white, 255)):
        files = sorted(icons.rglob("*.png"))
        moved = shutil.copytree(icons, tmp_path / f"others{value}")
        images = [Image.open(file) for file in files]
        for x in (
            trained.examples("all").elements,
            bruno.open(trained.folder).examples(data=str(moved)).elements,
            trained.read(files).x,
            trained.convert(images),
            torch.cat([trained.convert(image) for image in images]),
        ):
            assert len(x) == 24
            assert (x[:, 0, 0, 0] == value).all()
        tuned = bruno.finetune(trained, tmp_path / f"tuned{value}", steps=1, way=2, trials=0, data=str(moved))
        assert tuned.trained.recipe.data.backdrop == trained.recipe.data.backdrop


def test_a_run_is_named_after_its_preset_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bruno.train("digits", steps=1, **TINY).folder == Path("runs/digits")


def test_a_run_is_continued_with_more_steps(tmp_path):
    bruno.train("digits", tmp_path / "run", steps=2, **TINY)
    entries = []
    resumed = bruno.train("digits", tmp_path / "run", steps=4, resume=True, progress=entries.append, **TINY)
    assert [entry.index for entry in entries] == [3, 4]
    assert resumed.model.fingerprint() == bruno.open(tmp_path / "run").model.fingerprint()


def test_a_complete_run_is_returned_unchanged(tiny, tmp_path, caplog):
    shutil.copytree(tiny.folder, tmp_path / "run")
    with caplog.at_level("INFO", "bruno"):
        again = bruno.train("digits", tmp_path / "run", resume=True, **TINY)
    assert "already completed step 3" in caplog.text
    assert again.model.fingerprint() == tiny.model.fingerprint()


def test_a_folder_with_a_run_is_not_overwritten(tiny):
    with pytest.raises(ValueError, match=r"`out` .*run.*[Rr]esume"):
        bruno.train("digits", tiny.folder, steps=3, **TINY)


def test_progress_is_reported_after_every_step(tmp_path):
    entries = []
    bruno.train("digits", tmp_path / "run", steps=3, progress=entries.append, **TINY)
    assert [entry.index for entry in entries] == [1, 2, 3]
    assert all(np.isfinite(entry.loss) for entry in entries)
    assert np.isfinite(entries[-1].validation)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flow": {"filtres": 3}}, r"`flow.filtres` .*`flow.filters`"),
        ({"stepz": 3}, r"`train.stepz` .*`train.steps`"),
        ({"steps": 0}, r"`train.steps` .*got 0"),
        ({"steps": "many"}, r"`train.steps` .*got 'many'"),
        ({"data": {"split": "test"}}, r"`data.split` .*got 'test'"),
        ({"flow": 3}, r"`flow` .*got 3"),
        ({"validation_sets": 1}, r"`validation_sets` .*got 1"),
        ({"device": "gpu"}, r"`device` .*got 'gpu'"),
        ({"save_every": -1.0}, r"`save_every` .*got -1"),
    ],
)
def test_a_wrong_setting_is_named_and_leaves_no_folder(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        bruno.train("digits", tmp_path / "run", **(TINY | settings))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_training_after_a_checkpoint(number, tmp_path, tiny):
    def progress(entry) -> None:
        if entry.index == 1:
            os.kill(os.getpid(), number)

    with pytest.raises(TrainingInterrupted) as stopped:
        bruno.train("digits", tmp_path / "run", steps=3, progress=progress, **TINY)
    assert (stopped.value.signal, stopped.value.step, stopped.value.folder) == (number, 2, tmp_path / "run")
    assert f"{number}" in str(stopped.value)
    assert Run(tmp_path / "run").checkpoints[-1].stem == "checkpoint-00000002"
    resumed = bruno.train("digits", tmp_path / "run", resume=True, **TINY)
    assert resumed.model.fingerprint() == tiny.model.fingerprint()


def test_training_reads_its_data_once(tmp_path, monkeypatch):
    reads, original = [], bruno.data.load_examples
    monkeypatch.setattr(
        "bruno.recipe_data.load_examples", lambda *a, **k: reads.append(a) or original(*a, **k)
    )
    trained = bruno.train("digits", tmp_path / "run", steps=1, **TINY)
    assert len(reads) == 1
    trained.verdict(elements=600)
    assert len(reads) == 1


def test_a_trained_model_has_the_same_data_as_an_opened_one(tmp_path):
    data = {"name": str(MACHINES), "group": "machine"}
    trained = bruno.train("table", tmp_path / "run", steps=1, data=data)
    opened = bruno.open(tmp_path / "run")
    for split in ("train", "test", "all"):
        ours, theirs = trained.examples(split), opened.examples(split)
        assert torch.equal(ours.elements, theirs.elements)
        assert (ours.names, ours.columns) == (theirs.names, theirs.columns)
    assert len(pickle.dumps(trained.data)) < 10_000


def test_training_notes_are_warnings(tmp_path, monkeypatch):
    original = Trainer.advance

    def advance(self, count, progress):
        return [replace(step, skipped=True) for step in original(self, count, progress)]

    monkeypatch.setattr(Trainer, "advance", advance)
    with pytest.warns(UserWarning, match="skipped 2 steps"):
        bruno.train("digits", tmp_path / "run", steps=2, **TINY)


# --- settings --------------------------------------------------------------------------------------------


def test_settings_override_those_of_a_recipe():
    recipe, explicit = with_settings(
        bruno.load_recipe("digits"), {"steps": 7, "flow": {"units": 3}, "alpha": 0.01, "data": {"size": 9}}
    )
    assert (recipe.train.steps, recipe.flow.units, recipe.alpha, recipe.data.size) == (7, 3, 0.01, 9)
    assert recipe.flow.kind == bruno.load_recipe("digits").flow.kind
    assert explicit == {"train.steps", "flow.units", "alpha", "data.size"}


def test_a_number_of_steps_replaces_minutes():
    timed, _ = with_settings(bruno.load_recipe("digits"), {"minutes": 5})
    assert with_settings(timed, {"steps": 7})[0].train.minutes == 0
    assert with_settings(timed, {"steps": 7, "minutes": 5})[0].train.minutes == 5


def test_a_numbered_gpu_becomes_the_current_device(monkeypatch):
    current = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [resolve_device(name) for name in ("cuda:1", "cuda", "auto")] == ["cuda:1", "cuda", "cuda"]
    assert current == ["cuda:1"]
    monkeypatch.setenv("LOCAL_RANK", "1")  # torchrun's
    assert resolve_device("auto") == "cuda:1"


# --- fine-tuning -----------------------------------------------------------------------------------------


def test_fine_tuning_compares_the_models_before_and_after(tiny, tmp_path):
    before, entries, compared = tiny.model.fingerprint(), [], []
    tuned = bruno.finetune(
        tiny,
        tmp_path / "tuned",
        way=3,
        episodes=2,
        trials=2,
        steps=2,
        batch=2,
        progress=entries.append,
        compare_progress=lambda done, total: compared.append((done, total)),
    )
    assert [entry.index for entry in entries] == [1, 2]
    assert all(np.isfinite(entry.accuracy) for entry in entries)
    assert compared[-1][0] == compared[-1][1]
    assert tiny.model.fingerprint() == before  # the given model is unchanged
    assert tuned.trained.model.fingerprint() == bruno.open(tmp_path / "tuned").model.fingerprint() != before
    comparison = tuned.comparison
    assert comparison.split == "validation"
    assert set(comparison.bits) == set(comparison.few_shot) == {"before", "after"}
    assert comparison.bits["before"].mean != comparison.bits["after"].mean


def steps_of(tiny, out, minutes=0.0, **settings):
    """The training settings of a fine-tuned model, at a second for each element and any memory."""
    length = {"minutes": minutes} if minutes else {"steps": 1}
    tuned = bruno.finetune(tiny, out, trials=0, **length, **settings)
    return tuned.trained.recipe.train


def test_the_steps_of_fine_tuning_fit_into_the_time(tiny, tmp_path, monkeypatch):
    free, slow = ElementCost(0.0, 0.0), ElementCost(0.05 * 60 / 150 / 70, 0.0)  # 70 elements in 0.05 minutes
    monkeypatch.setattr("bruno.finetuning.measure_cost", lambda *_: free)
    large = steps_of(tiny, tmp_path / "large")
    assert large.shared
    assert (large.episodes, large.way, large.queries) == (9, 7, 19)  # 1280 elements at most
    monkeypatch.setattr("bruno.finetuning.measure_cost", lambda *_: slow)
    monkeypatch.setattr("bruno.training.clock.few_steps_warning", lambda *_: "")  # depends on the real time
    small = steps_of(tiny, tmp_path / "small", minutes=0.05)
    assert (small.episodes, small.way, small.queries) == (1, 7, 9)
    assert steps_of(tiny, tmp_path / "wide", minutes=0.01, way=5).way == 5
    monkeypatch.setattr("bruno.finetuning.measure_cost", lambda *_: free)
    resumed = bruno.finetune(tiny, tmp_path / "small", trials=0, resume=True, minutes=0.06)
    assert resumed.trained.recipe.train.queries == 9  # as it began


def test_the_steps_of_fine_tuning_can_be_set(tiny, tmp_path):
    given = steps_of(tiny, tmp_path / "batch", batch=2)
    assert (given.shared, given.queries, given.batch, given.episodes) == (False, 1, 2, 16)
    assert steps_of(tiny, tmp_path / "episodes", episodes=3).episodes == 3
    assert steps_of(tiny, tmp_path / "queries", queries=4).queries == 4


@pytest.mark.parametrize("kind", [str, Path])
def test_fine_tuning_opens_a_model_given_by_path(kind, tiny, tmp_path):
    tuned = bruno.finetune(
        kind(tiny.folder), tmp_path / "tuned", way=3, episodes=2, trials=0, steps=1, learning_rate=0.0
    )
    assert tuned.comparison is None
    assert tuned.trained.model.fingerprint() == tiny.model.fingerprint()  # at a learning rate of zero


def test_a_model_is_fine_tuned_on_a_path_or_a_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = np.random.default_rng(0).normal(size=(300, 2)).round(3)
    frame = pandas.DataFrame({"of": [f"m{i % 15}" for i in range(300)], "a": rows[:, 0], "b": rows[:, 1]})
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = {"name": tmp_path / "t.csv", "group": "of"}
    table = bruno.train("table", tmp_path / "run", data=data, steps=1, **TINY)
    of_path, of_frame = (
        bruno.finetune(table, tmp_path / f"tuned{i}", data=data, trials=0, steps=1, way=2).trained
        for i, data in enumerate([str(tmp_path / "t.csv"), frame])
    )
    assert len(of_path.examples("all")) == len(of_frame.examples("all")) == 300
    assert of_path.model.fingerprint() == of_frame.model.fingerprint() != table.model.fingerprint()


def test_fine_tuning_needs_a_recipe(tiny, tmp_path):
    bruno.save(tiny.model, tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match=r"`trained` .*bare"):
        bruno.finetune(str(tmp_path / "bare.safetensors"), tmp_path / "tuned")


def test_a_model_is_trained_on_rows_of_a_csv(tmp_path):
    generator = np.random.default_rng(0)
    lines = [f"{i % 15},{a:.3f},{b:.3f}" for i, (a, b) in enumerate(generator.normal(size=(180, 2)))]
    (tmp_path / "rows.csv").write_text("\n".join(["of,a,b", *lines]))
    data = {"name": str(tmp_path / "rows.csv"), "group": "of"}
    trained = bruno.train("table", tmp_path / "run", steps=2, data=data, device="cpu", validation_sets=0)
    assert trained.columns == ("a", "b")
    assert trained.model.shape == (2,)
    assert torch.isfinite(trained.sample_prior(3).x).all()
    elements = trained.read(tmp_path / "rows.csv").x[:3]
    repeated, classes = trained.sample_repeats(elements, repeats=(1, 2)), trained.sample_classes(given=2)
    assert repeated.samples.columns == classes.samples.columns == ("a", "b")
    with pytest.raises(ValueError, match=r"`given` .*smallest class; got 13"):
        trained.sample_classes(given=13)


def test_a_setting_given_twice_is_an_error():
    with pytest.raises(ValueError, match=r"`train.steps` .*once"):
        with_settings(bruno.load_recipe("digits"), {"steps": 3, "train": {"steps": 4}})


@pytest.mark.usefixtures("without_shape_checks")
def test_a_recipe_of_another_type_is_named():
    with pytest.raises(TypeError, match=r"`recipe` .*got int"):
        bruno.train(3)
