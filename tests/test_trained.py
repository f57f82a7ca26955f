"""A trained model with its data, as Python users call it: on arrays and PIL images as well as on paths."""

import pickle
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from PIL import Image

import bruno
from bruno.checkpoint import read_about
from bruno.config import Recipe, from_dict
from bruno.data import Examples, load_examples
from bruno.reporting.summaries import summarise
from bruno.tasks.calibration import GroupCalibration
from bruno.tasks.groups import Groups
from bruno.trained import Trained, UnfamiliarDataWarning, export, results_folder

UNSEEN = ("2", "5", "8")


@pytest.fixture(scope="module")
def trained(digits_run, tmp_path_factory) -> Trained:
    """The digits model, in a folder that may be written to."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(digits_run, folder)
    return bruno.open(folder, device="cpu")


@pytest.fixture(scope="module")
def unseen(trained) -> Examples:
    """Digits unseen in training."""
    return trained.examples()


def some(unseen: Examples, name: str, start: int, stop: int) -> torch.Tensor:
    """Elements of one digit."""
    return unseen.elements[unseen.labels == unseen.names.index(name)][start:stop]


def as_pil(x: torch.Tensor) -> list[Image.Image]:
    """Elements of 17 levels as grey images, in the model's size."""
    return [Image.fromarray((image[0].numpy() * (255 / 16)).round().astype(np.uint8)) for image in x]


FORMS = {
    "tensor": lambda x, folder: x,
    "array": lambda x, folder: x.numpy(),
    "list": lambda x, folder: [one.numpy() for one in x],
    "images": lambda x, folder: as_pil(x),
    "paths": lambda x, folder: written(x, folder),
    "folder": lambda x, folder: written(x, folder)[0].parent,
}


def written(x: torch.Tensor, folder: Path) -> list[Path]:
    """Elements as image files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i:03d}.png" for i in range(len(x))]
    for path, image in zip(paths, as_pil(x), strict=True):
        image.save(path)
    return paths


# --- opening ---------------------------------------------------------------------------------------------


def test_a_model_is_opened_from_its_run_its_file_and_its_name(trained, tmp_path):
    assert isinstance(trained, Trained)
    assert trained.recipe.data.name == "digits"
    assert trained.device == torch.device("cpu")
    assert not trained.is_pretrained
    file = export(trained.folder, tmp_path / "model.safetensors")
    of_file = bruno.open(file)
    assert of_file.model.fingerprint() == trained.model.fingerprint()
    assert of_file.recipe == trained.recipe
    assert of_file.folder == tmp_path / "model"
    pretrained = bruno.open("omniglot")
    assert pretrained.is_pretrained
    assert pretrained.model.fingerprint() == bruno.pretrained("omniglot").fingerprint()
    assert pretrained.unseen == "test"  # trained on trainval


def test_results_of_a_model_file_are_not_written_among_the_users_files(digits_model, tmp_path):
    file, beside = tmp_path / "icons.safetensors", tmp_path / "icons-results"
    bruno.save(digits_model, file)
    written(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), tmp_path / "icons" / "arrow")
    opened = bruno.open(file)
    assert opened.folder == results_folder(file) == beside
    assert opened.calibration_path == beside / "calibration.safetensors"
    assert opened.calibration_command == f"bruno calibrate {file} CLEAN"


def test_results_of_a_model_file_stay_in_the_folder_that_has_its_results(digits_model, tmp_path, monkeypatch):
    bruno.save(digits_model, tmp_path / "icons.safetensors")
    for name in ("icons", "icons/results"):
        (tmp_path / name).mkdir()
        assert results_folder(tmp_path / "icons.safetensors") == tmp_path / "icons"
    for name in ("calibration.safetensors", "report.html", "sets.db", "sets.db-wal", ".lock"):
        (tmp_path / "icons" / name).touch()
        assert results_folder(tmp_path / "icons.safetensors") == tmp_path / "icons"
    monkeypatch.chdir(tmp_path)
    assert results_folder("icons.safetensors") == Path("icons")
    (tmp_path / "icons" / "1.png").touch()
    assert results_folder("icons.safetensors") == Path("icons-results")


def test_a_model_that_does_not_exist_is_an_error(trained):
    with pytest.raises(ValueError, match=r"`path` .*nowhere .*omniglot, omniglot-small"):
        bruno.open("nowhere")
    with pytest.raises(ValueError, match=r"`checkpoint` .*got 'first'"):
        bruno.open(trained.folder, checkpoint="first")
    with pytest.raises(ValueError, match=r"`checkpoint` .*model.safetensors"):
        bruno.open(trained.folder / "model.safetensors", checkpoint="best")


def test_a_model_file_without_a_recipe_has_no_data(trained, tmp_path):
    bruno.save(trained.model, tmp_path / "bare.safetensors")
    bare = bruno.open(tmp_path / "bare.safetensors")
    assert bare.recipe is None
    with pytest.raises(ValueError, match=r"`data` .*bare"):
        bare.examples()
    assert bare.examples(data="digits").names == UNSEEN


# --- data ------------------------------------------------------------------------------------------------


def test_examples_are_those_of_the_recipe(trained):
    assert trained.examples().names == UNSEEN
    assert not set(trained.examples("train").names) & set(UNSEEN)
    assert len(trained.examples("all").names) == 10
    for arguments, message in (
        ({"split": "half"}, r"`split` .*got 'half'"),
        ({"data": "nowhere"}, r"`data` .*'nowhere'"),
        ({"data": "drawn"}, r"`data` .*\(1, 8, 8\); drawn"),
        ({"invert": True}, r"`invert` "),
        ({"min_classes": 4}, r"`data` .*4 classes; the test split has 3"),
    ):
        with pytest.raises(ValueError, match=message):
            trained.examples(**arguments)


def test_jobs_can_be_limited_to_some_classes(trained):
    assert trained.examples("all", classes=["7", "1"]).names == ("7", "1")
    found = trained.evaluate(classes=["2", "5"], sets=2, set_size=3)
    assert found.data == "test-2-5"
    assert trained.few_shot(classes=["2", "5"], trials=2).comparison.protocol.ways == (2,)
    with pytest.raises(ValueError, match=r"`classes` must be among 2, 5, 8; got '7'"):
        trained.evaluate(classes=["7"])
    with pytest.raises(ValueError, match=r"`data` must have at least 2 classes"):
        trained.few_shot(classes=["2"])


@pytest.mark.parametrize("form", FORMS)
def test_elements_are_read_from_every_form(trained, unseen, form, tmp_path):
    x = some(unseen, "2", 0, 6)
    elements = trained.read(FORMS[form](x, tmp_path / "x"))
    assert torch.equal(elements.x.int(), x.int())
    assert len(elements.names) == 6
    if form not in ("paths", "folder"):
        assert elements.names == ("1", "2", "3", "4", "5", "6")


@pytest.mark.parametrize("form", ["tensor", "array", "images"])
def test_one_element_is_a_set_of_one(trained, unseen, form):
    x = some(unseen, "2", 0, 1)
    one = {"tensor": x[0], "array": x[0].numpy(), "images": as_pil(x)[0]}[form]
    assert torch.equal(trained.read(one).x.int(), x.int())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(2, 1, 9, 9, dtype=torch.uint8), r"`source` .*got \(2, 1, 9, 9\)"),
        (torch.zeros(0, 1, 8, 8, dtype=torch.uint8), r"`source` must have at least one element; got none"),
    ],
)
def test_elements_of_another_shape_are_errors(trained, source, message):
    with pytest.raises(ValueError, match=message):
        trained.read(source)


def test_images_unlike_training_images_raise_a_warning(trained, unseen):
    noise = torch.randint(0, 17, (4, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with pytest.warns(UnfamiliarDataWarning, match=r"unlike the training images: .*a model of their own"):
        trained.read(noise)
    with pytest.warns(UnfamiliarDataWarning, match=r"unlike the training images: .*`invert`"):
        trained.read(16 - unseen.elements)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnfamiliarDataWarning)
        trained.read(noise)


# --- jobs ------------------------------------------------------------------------------------------------


def test_bits_per_dim_are_lower_on_unseen_digits_than_on_uniform_noise(trained):
    done = []
    found = trained.evaluate(sets=6, set_size=5, progress=lambda *numbers: done.append(numbers))
    assert found.data == "test"
    assert found.bits.mean < 3 < np.log2(17)
    assert len(found.bits.by_position) == 5
    assert done[-1][0] == done[-1][1]
    assert trained.evaluate(sets=6, set_size=5).bits == found.bits  # the same seed
    assert trained.evaluate(sets=6, set_size=5, seed=1).bits != found.bits


@pytest.mark.parametrize("form", ["array", "images", "folder"])
def test_samples_are_given_elements_in_any_form(trained, unseen, form, tmp_path):
    x = some(unseen, "5", 0, 3)
    drawn = trained.sample(FORMS[form](x, tmp_path / "given"), samples=2, prefixes=(0, 3), seed=4)
    expected = trained.sample(x, samples=2, prefixes=(0, 3), seed=4)
    assert drawn.lengths == (0, 3)
    assert drawn.samples.x.shape == (1, 2, 2, 1, 8, 8)
    assert torch.equal(drawn.samples.x, expected.samples.x)
    assert drawn.samples.numpy()["x"].shape == (1, 2, 2, 1, 8, 8)


def test_samples_of_sets_of_the_data(trained):
    drawn = trained.sample(sets=2, set_size=3, samples=1)
    assert drawn.inputs.shape == (2, 3, 1, 8, 8)
    assert drawn.lengths == (0, 1, 2, 3)
    assert trained.sample_prior(5).x.shape == (5, 1, 8, 8)
    spread = trained.sample_repeats(set_size=2, samples=3)
    assert spread.samples.images.shape[:3] == (2, len(spread.repeats), 3)
    assert spread.variance[-1] < spread.variance[0]
    for arguments, message in (
        ({"sets": 4}, r"`sets` .*3, the number of classes; got 4"),
        ({"set_size": 999}, r"`set_size` .*got 999"),
        ({"prefixes": (9,)}, r"`prefixes` .*8, the set size; got 9"),
        ({"prefixes": (1, 0)}, r"`prefixes` .*got 0 after 1"),
    ):
        with pytest.raises(ValueError, match=message):
            trained.sample(**arguments)


def test_retrieval_is_measured_in_a_small_collection(trained, unseen, tmp_path):
    small = unseen.elements[torch.cat([members[:4] for members in unseen.by_class()[:2]])]
    np.savez(tmp_path / "small.npz", images=small.numpy(), labels=np.arange(8) // 4)
    found = trained.measure_retrieval(data=tmp_path / "small.npz", queries=4, shots=(1, 2))
    assert list(found.results[0].qualities["BRUNO"].precision) == [1, 5]
    assert "precision at 1, 5)" in summarise(found).columns[0]


def test_few_shot_accuracy_beats_chance(trained):
    found = trained.few_shot(trials=10, rotations=False).comparison
    assert [(result.way, result.shot) for result in found.model] == [(3, 1), (3, 5)]
    assert found.model[1].accuracy > 0.8
    assert [result.episodes for result in found.model] == [result.episodes for result in found.baseline]


@pytest.mark.parametrize("form", ["array", "images", "folder"])
def test_queries_are_classified_given_support_in_any_form(trained, unseen, form, tmp_path):
    support = {name: FORMS[form](some(unseen, name, 0, 5), tmp_path / "support" / name) for name in UNSEEN}
    queries = torch.cat([some(unseen, name, 5, 11) for name in UNSEEN])
    given = tmp_path / "support" if form == "folder" else support
    found = trained.classify(FORMS[form](queries, tmp_path / "queries"), given)
    assert found.classes == UNSEEN
    assert found.support == (5, 5, 5)
    truth = torch.arange(3).repeat_interleave(6)
    assert (found.probabilities.argmax(1) == truth).float().mean() > 0.75
    expected = trained.classify(queries, {name: some(unseen, name, 0, 5) for name in UNSEEN})
    torch.testing.assert_close(found.probabilities, expected.probabilities)


def test_the_temperature_is_fitted_on_unseen_classes(trained, unseen, caplog):
    support = {name: some(unseen, name, 0, 2) for name in UNSEEN}
    with caplog.at_level("INFO", "bruno"):
        found = trained.classify(some(unseen, "2", 5, 9), support, calibrate=True)
    assert re.search(r"temperature \d", caplog.text)
    assert 0.1 < found.temperature < 10
    with pytest.raises(ValueError, match=r"`support` .*two classes; got 1"):
        trained.classify(some(unseen, "2", 5, 6), {"2": support["2"]})


def contaminated(unseen: Examples) -> torch.Tensor:
    """Nine fives, with a two in the sixth place."""
    return torch.cat([some(unseen, "5", 5, 10), some(unseen, "2", 5, 6), some(unseen, "5", 10, 14)])


@pytest.mark.parametrize("form", ["tensor", "array", "images", "folder"])
def test_an_outlier_in_a_stream_has_the_lowest_score(trained, unseen, form, tmp_path):
    stream = FORMS[form](contaminated(unseen), tmp_path / "stream")
    typical = FORMS[form](some(unseen, "5", 0, 5), tmp_path / "typical")
    with trained.watch(stream, trained.detector(threshold=-30.0), typical=typical) as watch:
        judged = list(watch)
    scores = [judgement.score for _, judgement in judged]
    assert np.argmin(scores) == 5
    assert judged[0].judgement.seen == 5
    assert watch.summary.count == 10


def test_a_stream_is_resumed_from_its_state(trained, unseen, tmp_path):
    x, detector = contaminated(unseen), trained.detector(threshold=0.0, count_all=True)
    whole = [judged.judgement.score for judged in trained.watch(x, detector)]
    parts = []
    for part in (x[:4], x[4:]):
        with trained.watch(part, detector, state=tmp_path / "state") as watch:
            parts += [judged.judgement.score for judged in watch]
    np.testing.assert_allclose(parts, whole, atol=1e-4)
    assert bruno.load(tmp_path / "state", model=trained.model).evidence.count == 10


def test_the_state_of_another_watch_is_not_replaced(trained, unseen, tmp_path):
    x, detector = contaminated(unseen), trained.detector(threshold=0.0, count_all=True)
    state = tmp_path / "state"
    with trained.watch(x[:2], detector, state=state) as slow:
        with trained.watch(x[:5], detector, state=state) as fast:
            list(fast)
        list(slow)
        with pytest.warns(UserWarning, match=rf"{state}: another process"):
            slow.save()
    [beside] = tmp_path.glob("state.*")
    counts = [int(bruno.load(path, model=trained.model).evidence.count) for path in (state, beside)]
    assert counts == [5, 2]


@pytest.mark.filterwarnings("ignore:calibrated on 3 classes")
def test_a_calibration_is_made_once_and_read_once(digits_run, tmp_path, monkeypatch):
    shutil.copytree(digits_run, tmp_path / "run")
    trained, made = bruno.open(tmp_path / "run"), []
    encode, load = Groups.of, GroupCalibration.load
    monkeypatch.setattr(
        Groups, "of", lambda *args, **kwargs: made.append("encoded") or encode(*args, **kwargs)
    )
    monkeypatch.setattr(GroupCalibration, "load", lambda *args: made.append("read") or load(*args))
    first = trained.calibration()
    encoded = len(made)
    assert trained.calibration() is first
    assert trained.calibration(seed=1) is not first
    assert len(made) == 2 * encoded
    trained.calibrate()
    made.clear()
    assert trained.calibration() is trained.calibration()
    assert made == ["read"]
    assert b"calibrations" not in pickle.dumps(trained)  # it holds data


def test_a_detector_is_calibrated_to_a_false_alarm_rate(trained, unseen):
    with pytest.warns(UserWarning, match="calibrated on 3 classes"):
        detector = trained.detector(rate=0.1)
    clean = some(unseen, "8", 0, 60)
    flagged = [judged.judgement.outlier for judged in trained.watch(clean, detector)]
    assert np.mean(flagged) < 0.35


def test_queries_of_no_class_are_none_of_these(digits_run, tmp_path):
    trained = bruno.open(shutil.copytree(digits_run, tmp_path / "run"), device="cpu")
    seen = load_examples("digits")
    support = {
        name: seen.elements[seen.labels == i][:15] for i, name in enumerate(seen.names) if name in "016"
    }
    queries = torch.cat([seen.elements[seen.labels == i][20:40] for i in (0, seen.names.index("7"))])
    assert trained.classify(queries, support).none_of_these is None
    with pytest.warns(UserWarning, match="calibrated on 3 classes"):
        at_once = trained.classify(queries, support, none_rate=0.2)
    with pytest.warns(UserWarning, match="calibrated on 3 classes"):
        trained.calibrate()
    found = trained.classify(queries, support, none_rate=0.2)
    assert torch.equal(at_once.p, found.p)
    assert found.p.shape == (40, 3)
    assert torch.equal(found.none_of_these, (found.p <= 0.2).all(1))
    assert found.none_of_these[20:].double().mean() > found.none_of_these[:20].double().mean() + 0.3


@pytest.mark.filterwarnings("ignore:calibrated on 3 classes")
def test_a_stream_says_if_patches_would_find_more_in_a_batch(trained, monkeypatch, caplog):
    found = trained.calibration()
    for criterion in ("score", "patches"):
        caplog.clear()
        kept = replace(found, criterion=criterion)
        monkeypatch.setattr(Trained, "calibration", lambda *_, kept=kept, **__: kept)
        with caplog.at_level("INFO"):
            trained.detector()
        assert ("anomaly batch" in caplog.text) is (criterion == "patches")


def test_a_batch_is_judged_given_all_others(trained, unseen):
    found = trained.judge_batch(contaminated(unseen), threshold=0.0).summary
    assert min(found.latest, key=lambda one: one.judgement.score).name == "6"
    everything = trained.judge_batch(contaminated(unseen), threshold=0.0, count_all=True).summary
    assert all(one.judgement.seen == 9 for one in everything.latest)
    with pytest.raises(ValueError, match=r"`batch` .*got 1"):
        trained.judge_batch(some(unseen, "5", 0, 1), threshold=0.0)


@pytest.mark.parametrize("form", ["array", "images", "folder"])
def test_a_collection_is_ranked_for_a_query_in_any_form(trained, unseen, form, tmp_path):
    collection = tmp_path / "collection"
    written(torch.cat([some(unseen, name, 5, 15) for name in UNSEEN]), collection)
    query = FORMS[form](some(unseen, "8", 0, 5), tmp_path / "query")
    found = trained.retrieve(query, collection, top=10)
    assert found.collection == 30
    assert list(found.scores) == sorted(found.scores, reverse=True)
    assert sum(int(Path(name).stem) >= 20 for name in found.names) >= 6


@pytest.mark.parametrize("form", ["tensor", "array", "list", "images"])
def test_a_collection_in_memory_is_ranked_like_one_in_files(trained, unseen, form, tmp_path):
    x, query = torch.cat([some(unseen, name, 5, 15) for name in UNSEEN]), some(unseen, "8", 0, 5)
    written(x, tmp_path / "collection")
    expected = trained.retrieve(query, tmp_path / "collection", top=10)
    found = trained.retrieve(query, FORMS[form](x, tmp_path), top=10)
    assert found.names == tuple(str(int(Path(name).stem) + 1) for name in expected.names)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
    assert torch.equal(found.found, expected.found)
    assert torch.equal(found.found, x[list(found.order)])
    assert found.order == expected.order
    assert found.collection == 30
    assert len(list(tmp_path.glob("*.index"))) == 1  # of the folder
    paths = trained.retrieve(query, sorted((tmp_path / "collection").iterdir()), top=10)
    assert paths.names == expected.names
    with pytest.raises(ValueError, match=r"`index` must be omitted .*got here"):
        trained.retrieve(query, x, index="here")


@pytest.mark.parametrize("form", ["tensor", "array", "images", "paths"])
def test_support_may_be_a_list_of_classes(trained, unseen, form, tmp_path):
    support = {name: some(unseen, name, 0, 5) for name in UNSEEN}
    queries = some(unseen, "5", 5, 11)
    expected = trained.classify(queries, support)
    listed = [FORMS[form](x, tmp_path / name) for name, x in support.items()]
    for given in (listed, tuple(listed)):
        found = trained.classify(queries, given)
        assert found.classes == ("1", "2", "3")
        torch.testing.assert_close(found.probabilities, expected.probabilities)


def test_results_of_jobs_convert_to_arrays(trained, unseen):
    x = contaminated(unseen)
    read = trained.read(x)
    np.testing.assert_array_equal(read.numpy()["x"], x)
    assert read.numpy()["names"] == read.names
    judged = trained.judge_batch(x, threshold=0.0)
    found = judged.numpy()["summary"]
    judgements = [one.judgement for one in judged.summary.latest]
    assert found["names"] == read.names
    assert found["score"].tolist() == [one.score for one in judgements]
    assert found["outlier"].tolist() == [one.outlier for one in judgements]
    assert np.isnan(found["p"]).all()  # without a calibration
    bits = trained.evaluate(sets=4, set_size=3)
    assert bits.numpy()["bits"]["mean"] == bits.bits.mean
    few = trained.few_shot(trials=2, shots=(1,), rotations=False)
    assert few.numpy()["comparison"]["model"][0]["accuracy"] == few.comparison.model[0].accuracy
    retrieved = trained.measure_retrieval(shots=(1,), queries=2)
    assert retrieved.numpy()["results"][0]["qualities"]["BRUNO"]["precision"] == (
        retrieved.results[0].qualities["BRUNO"].precision
    )
    specks = trained.measure_specks(samples=2)
    assert isinstance(specks.numpy()["result"]["images"], np.ndarray)
    inspected = trained.inspect(sets=2)
    assert inspected.numpy()["positions"]["gain"] == inspected.positions.gain
    assert summarise(inspected.positions).picture
    with pytest.raises(TypeError, match=r"summarise the parts of an inspection: its correlations"):
        summarise(inspected)


def test_an_inspection_shows_the_gain_from_conditioning(trained):
    found = trained.inspect(sets=6)
    assert found.positions.gain[0] == 0
    assert found.positions.gain[-1] > found.positions.gain[1] > 0
    assert len(found.dof.correlation) == 64


# --- results ---------------------------------------------------------------------------------------------


def test_results_on_a_file_have_another_name_than_those_on_a_split(trained, unseen, tmp_path):
    for i, x in enumerate(unseen.elements[:6].split(3)):
        written(x, tmp_path / "test" / str(i))
    outcome = trained.evaluate(data=tmp_path / "test", sets=2, set_size=3)
    assert (outcome.data, trained.evaluate(sets=2, set_size=3).data) == ("data-test", "test")


def test_results_are_saved_beside_the_model(trained):
    outcome = trained.evaluate(sets=4, set_size=3)
    path = trained.save_result(summarise(outcome), seed=0)
    assert path == trained.folder / "results" / "bits-test.json"
    drawn = trained.sample(samples=1, set_size=2)
    [file] = trained.save_samples(drawn, "mine")
    with np.load(file) as arrays:
        np.testing.assert_array_equal(arrays["inputs"], drawn.inputs.numpy())
        assert arrays["seen"].tolist() == [0, 1, 2]


def test_the_results_of_a_model_are_one_page(trained, tmp_path):
    trained.save_result(summarise(trained.evaluate(sets=4, set_size=3)))
    path = trained.report()
    assert path == trained.folder / "report.html"
    assert "Learning curve" in path.read_text()
    assert trained.report(tmp_path / "page.html").read_text() == path.read_text()


@pytest.mark.parametrize("half", [False, True])
def test_a_model_exports_itself_as_the_command_does(trained, tmp_path, half):
    path = trained.export(tmp_path / "mine.safetensors", half=half)
    assert path.read_bytes() == export(trained.folder, tmp_path / "file", half=half).read_bytes()
    again = bruno.open(path, device="cpu").export(tmp_path / "again", half=half)
    assert again.read_bytes() == path.read_bytes()


def test_a_model_in_memory_exports_its_recipe_and_the_provenance_of_this_process(trained, tmp_path):
    new = replace(trained, about=None)
    about = read_about(new.export(tmp_path / "model"))
    assert from_dict(Recipe, about["recipe"]) == trained.recipe
    assert about["provenance"].keys() == trained.about["provenance"].keys()
    assert replace(new, recipe=None).export(tmp_path / "bare").is_file()


def test_an_export_does_not_replace_another_file(trained, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="a model file"):
        trained.export(tmp_path / "notes")
    with pytest.raises(ValueError, match="`int8`"):
        trained.export(tmp_path / "graphs", onnx=True, int8=True)


def test_pil_images_that_cannot_be_normalised_are_rejected(trained):
    reader = replace(trained, drawings=True)
    for image in (Image.new("L", (0, 0)), Image.new("F", (8, 8))):
        with pytest.raises(ValueError, match="`source` must be an image with 8 or 16 bits; got <PIL"):
            reader.read(image)


def test_a_summary_needs_the_result_of_a_job():
    with pytest.raises(TypeError, match=r"`outcome` .*got str"):
        summarise("bits")


def test_grey_images_need_no_channel_axis(trained, unseen):
    x = some(unseen, "2", 0, 3)
    for given in (x[:, 0].numpy(), x[0, 0].numpy()):
        read = trained.read(given).x
        assert torch.equal(read, x[: len(read)])


@pytest.mark.parametrize("drawings", [False, True])
@pytest.mark.parametrize("invert", [False, True])
def test_images_and_arrays_in_one_list_are_read_as_if_alone(trained, unseen, drawings, invert):
    recipe = evolve(trained.recipe, data=evolve(trained.recipe.data, invert=invert))
    reader = replace(trained, recipe=recipe, drawings=drawings)
    x = some(unseen, "2", 0, 2)
    image, array = as_pil(x)[0], x[1, 0].numpy()
    alone = torch.cat([reader.convert(image), reader.convert(array)])
    assert torch.equal(reader.convert([image, array]), alone)
    assert torch.equal(reader.convert([array, image]), alone.flip(0))
    with pytest.raises(TypeError, match=r"`source` .*got str"):
        reader.read([image, "a.png"])


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full((2, 1, 8, 8), 17), r"`source` .*16.*got 17"),
        (np.full((2, 1, 8, 8), -1), r"`source` .*got -1"),
        (np.full((2, 1, 8, 8), np.nan), r"`source` .*got nan"),
        (np.ones((2, 1, 8, 8), bool), r"`source` .*got torch.bool. Use source \* 16"),
        (np.zeros((2, 3, 8, 8), int), r"`source` .*\(n, 1, 8, 8\); got \(2, 3, 8, 8\)\. .*PIL images"),
    ],
)
def test_arrays_that_the_model_cannot_take_are_rejected_when_read(trained, values, message):
    with pytest.raises((ValueError, TypeError), match=message):
        trained.read(values)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, x: t.retrieve(x, "folder", top=0), r"`top` .*got 0"),
        (lambda t, x: t.retrieve(x, [x]), r"`collection` .*got \(1, 3, 1, 8, 8\)"),
        (lambda t, x: t.retrieve(x, None), r"`collection` .*got NoneType"),
        (lambda t, x: t.retrieve(None, x), r"`query` .*got NoneType"),
        (lambda t, x: t.classify(x, x), r"`support` .*got Tensor"),
        (lambda t, x: t.classify(x, [x, x[:0]]), r"`support\[1\]` must have at least one element; got none"),
        (lambda t, x: t.classify(x + 99, [x, x]), r"`queries` .*from 0 to 16"),
        (lambda t, x: t.sample(x, prefixes=3), r"`prefixes` .*got 3"),
        (lambda t, x: t.few_shot(ways=3), r"`ways` .*got 3"),
        (lambda t, x: t.sample_prior(2, seed="a"), r"`seed` .*got 'a'"),
        (lambda t, x: t.few_shot(seed=-1), r"`seed` .*got -1"),
        (lambda t, x: bruno.open(None), r"`path` .*got None"),
        (lambda t, x: t.watch({"a": x}, t.detector(threshold=0.0)), r"`stream` .*got dict"),
        (lambda t, x: t.judge_batch({"a": x}), r"`batch` .*got dict"),
        (lambda t, x: t.sample({"a": x}), r"`given` .*got dict"),
        (lambda t, x: t.explain(x, given={"a": x}), r"`given` .*got dict"),
        (lambda t, x: t.classify(x, [x, x], temperature=2, calibrate=True), "omit `temperature`"),
        (lambda t, x: t.classify(x, [x, x], data="digits"), "`data` is for calibration"),
        (lambda t, x: t.sample(x, sets=1, set_size=9), r"`given` .*omit `sets` and `set_size`"),
        (lambda t, x: t.sample(x, split="tst", classes=["x"]), r"`given` .*omit `split` and `classes`"),
        (lambda t, x: t.sample_repeats(x, data="digits"), r"`given` .*omit `data`"),
        (lambda t, x: t.write_samples(x, prior=True, sets=1), r"`prior` .*omit `given` and `sets`"),
        (
            lambda t, x: t.judge_batch(x, threshold=0.0, false_discovery_rate=0.1),
            r"`false_discovery_rate` .*omit `threshold`",
        ),
        (lambda t, x: t.judge_batch(x, threshold=0.0, data="x"), r"`threshold` .*omit `data`"),
        (lambda t, x: t.detector(threshold=0.0, rate=0.1, data="x"), r"`threshold` .*omit `rate` and `data`"),
        (
            lambda t, x: t.detector(within=True, count_all=True, threshold=0.0),
            r"`within` .*omit `threshold`",
        ),
        (lambda t, x: t.evaluate(split="tst"), r"`split` .*got 'tst'"),
        (lambda t, x: t.evaluate(split="tst", data="drawn"), r"`split` .*got 'tst'"),
    ],
)
def test_wrong_arguments_of_jobs_are_named(trained, unseen, call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(trained, some(unseen, "2", 0, 3))


def test_a_stream_is_watched_at_a_calibrated_threshold_by_default(trained, unseen):
    with pytest.warns(UserWarning, match="calibrated on 3 classes"):
        watched = trained.watch(some(unseen, "2", 0, 3))
    assert [judged.judgement.threshold is None for judged in watched] == [True, False, False]


def test_a_stream_may_be_an_iterator_of_arrays_or_images(trained, unseen):
    x, detector = some(unseen, "2", 0, 4), trained.detector(threshold=0.0)
    expected = [(str(i), one) for i, one in enumerate(trained.watch(x, detector), start=1)]
    for given in (iter(x), (image.numpy() for image in x), iter([x[:3], x[3]])):
        found = [(judged.element.name, judged) for judged in trained.watch(given, detector)]
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (_, one), (_, other) in zip(found, expected, strict=True):
            assert one.judgement == other.judgement
    assert len(trained.judge_batch(iter(as_pil(x)), threshold=0.0).judgements) == 4


def test_elements_that_were_read_are_elements_of_every_job(trained, unseen, tmp_path):
    written(some(unseen, "2", 0, 4), tmp_path / "folder")
    read, detector = trained.read(tmp_path / "folder"), trained.detector(threshold=0.0)
    assert [one.element.name for one in trained.watch(read, detector)] == list(read.names)
    assert [one.name for one in trained.judge_batch(read, threshold=0.0).judgements] == list(read.names)
    assert trained.classify(read, [read, read]).names == read.names
    assert trained.retrieve(read, read, top=4).collection == 4
    assert trained.condition(read).evidence.count == 4


def test_arrays_in_memory_are_inverted_if_asked(trained, unseen):
    x, detector = some(unseen, "2", 0, 2), trained.detector(threshold=0.0)
    for given in (16 - x, iter(16 - x)):
        watched = trained.watch(given, detector, invert=True)
        assert torch.equal(torch.stack([one.element.x for one in watched]), x)


def test_representations_are_short(trained, unseen):
    assert len(repr(trained)) < 300
    assert repr(unseen) == "Examples(533 images of shape (1, 8, 8) in 3 classes)"


def test_few_classes_of_images_are_calibrated_on_all_that_were_not_trained_on(tmp_path):
    """Of 12 classes, two are for validation and two for tests."""
    generator = np.random.default_rng(0)
    for i in range(12):
        folder = tmp_path / "images" / f"class{i:02d}"
        folder.mkdir(parents=True)
        for j in range(4):
            Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / f"{j}.png")
    data = {"name": str(tmp_path / "images"), "size": 8}
    flow = {"filters": 4, "units": 8}
    made = bruno.train("images", tmp_path / "run", data=data, flow=flow, steps=1, device="cpu")
    with pytest.warns(UserWarning, match=r"calibrated on 4 classes with 16 elements.*higher or lower"):
        found = made.calibration()
    assert len(found.groups.names) == 4
    assert found.unseen


@pytest.mark.parametrize("name", ["model.safetensors", "model"])
def test_the_command_that_calibrates_names_the_model_file(digits_model, tmp_path, monkeypatch, name):
    bruno.save(digits_model, tmp_path / name)
    assert bruno.open(tmp_path / name).calibration_command == f"bruno calibrate {tmp_path / name} CLEAN"
    monkeypatch.chdir(tmp_path)
    assert bruno.open(name).calibration_command == f"bruno calibrate {name} CLEAN"


def test_decisions_that_cannot_be_made_are_rejected(trained, unseen):
    with pytest.raises(ValueError, match=r"`within` needs `count_all`"):
        trained.detector(within=True)
    with pytest.raises(TypeError, match=r"`threshold` must be a number; got 'abc'"):
        trained.judge_batch(unseen.elements[:4], threshold="abc")
