import logging
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score
from tasks.machines import machine_model, machines

import bruno
from bruno import Bruno, FlowConfig, ModelConfig
from bruno.data import ElementReader, Examples
from bruno.data.synthetic import SENSORS
from bruno.tasks.familiarity import Familiarity
from bruno.tasks.index import Index, open_index
from bruno.tasks.retrieval import measure_retrieval, rank


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def index(digits_model, learnt_digits) -> Index:
    return Index.of(digits_model, learnt_digits)


@pytest.fixture(scope="module")
def another_model(digits_model) -> Bruno:
    torch.manual_seed(1)
    return Bruno.from_config(digits_model.config)


def query_of(examples: Examples, label: int, shots: int = 3) -> torch.Tensor:
    return examples.elements[examples.labels == label][:shots]


# --- ranking ---------------------------------------------------------------------------------------------


def test_the_score_is_that_of_the_posterior(digits_model, learnt_digits, index):
    query = query_of(learnt_digits, 2)
    ranking = rank(index, digits_model, query)
    with torch.no_grad():
        expected = digits_model.condition(query).score(learnt_digits.elements)
    torch.testing.assert_close(ranking.scores, expected, rtol=1e-4, atol=1e-3)


def test_a_ranking_orders_all_elements_from_best_to_worst(digits_model, learnt_digits, index):
    ranking = rank(index, digits_model, query_of(learnt_digits, 0))
    assert (ranking.scores[ranking.order].diff() <= 0).all()
    assert ranking.order.sort().values.tolist() == list(range(len(learnt_digits)))


def test_batch_sizes_make_no_difference(digits_model, learnt_digits, index, monkeypatch):
    query = query_of(learnt_digits, 1)
    whole = rank(index, digits_model, query)
    monkeypatch.setattr("bruno.process.element_density._NUMBERS_IN_A_BLOCK", 100 * digits_model.dim)
    in_parts = rank(Index.of(digits_model, learnt_digits, batch_size=77), digits_model, query)
    torch.testing.assert_close(in_parts.scores, whole.scores, rtol=1e-4, atol=1e-3)


def test_the_class_of_the_query_comes_first(digits_model, learnt_digits, unseen_digits, index):
    for examples in (learnt_digits, unseen_digits):
        collection = index if examples is learnt_digits else Index.of(digits_model, examples)
        for label in range(len(examples.names)):
            order = rank(collection, digits_model, query_of(examples, label, shots=10)).order
            best = examples.labels[order[:50]]
            assert (best == label).double().mean() > 0.7, examples.names[label]


def test_encoding_reports_progress(digits_model, unseen_digits):
    reports = []
    some = unseen_digits.elements[:10]
    Index.of(digits_model, some, batch_size=4, progress=lambda *report: reports.append(report))
    assert reports == [(4, 10), (8, 10), (10, 10)]


def test_elements_are_encoded_in_batches(digits_model, unseen_digits, monkeypatch):
    sizes, encode = [], Bruno.encode

    def counted(self, x, *rest, **options):
        sizes.append(len(x))
        return encode(self, x, *rest, **options)

    monkeypatch.setattr(Bruno, "encode", counted)
    Index.of(digits_model, unseen_digits.elements[:500], batch_size=300)
    assert sizes == [300, 200]


def test_elements_are_named_as_given_or_by_class_and_number(digits_model, unseen_digits, index):
    few = unseen_digits.elements[:2]
    assert Index.of(digits_model, few, ["naïve.png", "b/c.png"]).names == ("naïve.png", "b/c.png")
    assert Index.of(digits_model, few).names == ("1", "2")
    assert index.names[0] == "0/1"
    assert len(set(index.names)) == len(index)


# --- files -----------------------------------------------------------------------------------------------


def test_a_saved_index_ranks_like_the_original(digits_model, learnt_digits, index, tmp_path):
    index.save(tmp_path / "index.bruno")
    query = query_of(learnt_digits, 4)
    expected = rank(index, digits_model, query)
    for model in (digits_model, None):
        loaded = Index.load(tmp_path / "index.bruno", model=model)
        assert loaded.names == index.names
        ranking = rank(loaded, digits_model, query)
        assert torch.equal(ranking.order, expected.order)
        assert torch.equal(ranking.scores, expected.scores)


def test_an_index_of_another_model_raises(digits_model, another_model, learnt_digits, index, tmp_path):
    index.save(tmp_path / "index.bruno")
    message = rf"`model` .*{index.fingerprint}; got {another_model.fingerprint()}.*Index.of"
    with pytest.raises(ValueError, match=message):
        Index.load(tmp_path / "index.bruno", model=another_model)
    with pytest.raises(ValueError, match=message):
        rank(index, another_model, query_of(learnt_digits, 0))


def test_a_file_that_is_not_an_index_raises(digits_model, unseen_digits, tmp_path):
    path = tmp_path / "index.bruno"
    Index.of(digits_model, unseen_digits).save(path)
    with pytest.raises(ValueError, match=r"index of a collection"):
        bruno.load(path, model=digits_model)
    content = path.read_bytes()
    for broken in (content[:-100], content[:50], b"", b"not an index at all"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"`path` .*index\.bruno"):
            Index.load(path)
    bruno.save(digits_model, path)
    with pytest.raises(ValueError, match=r"`path` .*index; .* is a model"):
        Index.load(path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.bruno"):
        Index.load(tmp_path / "nowhere.bruno")


# --- an index on disk ------------------------------------------------------------------------------------


@pytest.fixture
def folder(unseen_digits, tmp_path) -> Path:
    """Five images of unseen digits, with 256 grey values."""
    folder = tmp_path / "collection"
    folder.mkdir()
    for number, image in enumerate(unseen_digits.elements[:5]):
        Image.fromarray((image[0].numpy() * 15).astype(np.uint8)).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def reader(digits_model) -> ElementReader:
    return ElementReader(digits_model.shape, digits_model.levels)


def test_a_collection_is_encoded_once(digits_model, reader, folder, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    reports = []
    index, encoded_now = open_index(
        digits_model, reader, folder, progress=lambda *report: reports.append(report)
    )
    assert encoded_now
    assert index.names == tuple(str(folder / f"{number}.png") for number in range(5))
    torch.testing.assert_close(index.latents, digits_model.latents(reader.read_all([folder])[0]))
    assert reports == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5), (5, 5)]
    (kept,) = folder.parent.glob("*.index")
    assert digits_model.fingerprint()[:8] in kept.name
    assert str(kept) in caplog.text

    monkeypatch.setattr(Bruno, "latents", None)  # nothing is encoded again
    monkeypatch.chdir(folder.parent)
    again, encoded_now = open_index(digits_model, reader, "collection")
    assert not encoded_now
    assert torch.equal(again.latents, index.latents)
    assert again.names[0] == os.path.join("collection", "0.png")


def test_a_changed_collection_or_reader_is_encoded_again(digits_model, reader, folder):
    open_index(digits_model, reader, folder)
    os.utime(folder / "3.png", ns=(0, 0))
    assert open_index(digits_model, reader, folder)[1]
    (folder / "4.png").unlink()
    index, encoded_now = open_index(digits_model, reader, folder)
    assert (len(index), encoded_now) == (4, True)
    assert not open_index(digits_model, reader, folder)[1]
    inverted = ElementReader(digits_model.shape, digits_model.levels, invert=True)
    assert open_index(digits_model, inverted, folder)[1]


def test_an_invalid_index_is_replaced_unless_its_path_was_given(
    digits_model, another_model, reader, folder, tmp_path
):
    open_index(digits_model, reader, folder)
    (kept,) = folder.parent.glob("*.index")
    kept.write_bytes(b"damaged")
    assert open_index(digits_model, reader, folder)[1]
    path = tmp_path / "own.index"
    assert open_index(another_model, reader, folder, path)[1]
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"`model` .*`path`, or delete"):
        open_index(digits_model, reader, folder, path)
    assert path.read_bytes() == content


def test_rows_of_a_csv_are_indexed_by_line(tmp_path):
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    model.initialise(torch.randn(9, 2))
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n1,2\n3,4\n")
    index, _ = open_index(model, ElementReader((2,), 0), table)
    assert index.names == (f"{table}, line 2", f"{table}, line 3")
    exchanged, encoded_now = open_index(model, ElementReader((2,), 0, columns=("b", "a")), table)
    assert encoded_now
    torch.testing.assert_close(exchanged.latents[0], model.latents(torch.tensor([2.0, 1.0])))


def test_an_index_does_not_depend_on_which_files_changed(tmp_path):
    """The missing number in one file is not imputed from the other, which may change later."""
    model, x = machine_model("impute"), machines(2, 12, seed=1).elements
    x[0, 1] = torch.nan
    reader = ElementReader(model.shape, 0, group="machine", columns=SENSORS, missing=True)
    folder = tmp_path / "rows"
    folder.mkdir()

    def write(name: str, rows: torch.Tensor) -> None:
        cells = [["machine", *SENSORS], *(["m", *map(str, row)] for row in rows.tolist())]
        (folder / name).write_text("\n".join(map(",".join, cells)))

    write("a.csv", x[:4])
    write("b.csv", x[4:8])
    open_index(model, reader, folder)
    write("b.csv", x[8:12])
    updated, _ = open_index(model, reader, folder)
    whole, _ = open_index(model, reader, folder, tmp_path / "new.index")
    torch.testing.assert_close(updated.latents, whole.latents)
    assert updated.names == whole.names


def test_skipped_and_unfamiliar_elements_and_an_unwritable_index_are_warnings(
    digits_model, folder, tmp_path, monkeypatch
):
    (folder / "5.png").write_bytes(b"not an image")
    reader = ElementReader(digits_model.shape, digits_model.levels, skip_bad=True)
    familiarity = Familiarity(digits_model)
    monkeypatch.setattr(familiarity, "check", lambda images: "a reason")
    monkeypatch.setattr(Index, "save", lambda self, path: (_ for _ in ()).throw(OSError("disk full")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        index, _ = open_index(digits_model, reader, folder, familiarity=familiarity)
    assert len(index) == 5
    messages = [str(warning.message) for warning in caught]
    for message, part in zip(messages, ("5.png", "a reason", "disk full"), strict=True):
        assert part in message


def test_missing_and_empty_collections_raise(digits_model, reader, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere"):
        open_index(digits_model, reader, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"`path` .*got .*nowhere"):
        open_index(digits_model, reader, folder, tmp_path / "nowhere" / "an.index")
    for image in folder.iterdir():
        image.write_bytes(b"")
    reader = ElementReader(digits_model.shape, digits_model.levels, skip_bad=True)
    with pytest.raises(ValueError, match=r"`collection` .*got .*collection"):
        open_index(digits_model, reader, folder)


# --- quality ---------------------------------------------------------------------------------------------


def test_retrieval_is_far_better_than_chance_and_than_distances(digits_model, learnt_digits):
    (result,) = measure_retrieval(digits_model, learnt_digits, queries=60, shots=(3,), generator=seeded())
    assert result.chance == pytest.approx(1 / 7, abs=0.01)
    assert result.collection == len(learnt_digits) - 3
    ours = result.qualities.pop("BRUNO")
    assert ours.average_precision > 0.85
    assert ours.precision[1] > 0.9
    assert ours.precision[10] > 0.9
    assert 0 < ours.average_precision_error < 0.05
    assert len(result.qualities) == 4
    for method, other in result.qualities.items():
        margin = 0.02 if "pixels" in method else 0.1
        assert ours.average_precision > other.average_precision + margin, method


def test_unseen_classes_are_also_retrieved(digits_model, unseen_digits):
    (result,) = measure_retrieval(digits_model, unseen_digits, queries=40, shots=(5,), generator=seeded())
    assert result.chance < 0.35
    assert result.qualities["BRUNO"].average_precision > 0.75


def test_average_precision_matches_scikit_learn_without_the_query(digits_model):
    """Four grey images have four queries of one shot: the mean of many draws is close to theirs."""
    greys, labels = torch.tensor([1.0, 6.0, 4.0, 15.0]), torch.tensor([0, 0, 1, 1])
    images = greys.to(torch.uint8).view(4, 1, 1, 1).expand(4, 1, 8, 8)
    examples = Examples(images, labels, ("a", "b"))
    (result,) = measure_retrieval(
        digits_model, examples, queries=100, shots=(1,), at=(1, 3), generator=seeded()
    )
    expected = []
    for query in range(4):
        rest = torch.arange(4) != query
        distance = (greys - greys[query]).abs()
        expected.append(average_precision_score((labels == labels[query])[rest], -distance[rest]))
    for method in ("mean distance, pixels", "nearest distance, pixels"):
        quality = result.qualities[method]
        assert quality.average_precision == pytest.approx(sum(expected) / 4, abs=0.05)
        assert quality.precision[3] == pytest.approx(1 / 3)
    assert result.collection == 3
    assert result.chance == pytest.approx(1 / 3)


def test_the_same_seed_gives_the_same_result(digits_model, unseen_digits):
    def measured(seed: int):
        return measure_retrieval(digits_model, unseen_digits, queries=3, shots=(2,), generator=seeded(seed))

    assert measured(1) == measured(1)
    assert measured(1) != measured(2)


def test_results_of_each_number_of_shots_are_independent_with_one_encoding(
    digits_model, unseen_digits, monkeypatch
):
    def measured(*shots: int):
        return measure_retrieval(digits_model, unseen_digits, queries=4, shots=shots, generator=seeded())

    alone = measured(4) + measured(1)
    encoded, encode = [], digits_model.encode

    def watched(x, generator, **options):
        encoded.append(len(x))
        return encode(x, generator, **options)

    monkeypatch.setitem(vars(digits_model), "encode", watched)
    assert measured(4, 1) == alone
    assert [result.shots for result in alone] == [4, 1]
    assert sum(encoded) == len(unseen_digits)


def test_with_rotations_a_class_is_not_ranked_with_its_other_rotations(digits_model):
    """Grey images look the same when rotated, so other rotations of the class would count as mistakes."""
    greys = torch.tensor([1, 2, 3, 11, 12, 13, 14]).to(torch.uint8)
    images = greys.view(7, 1, 1, 1).expand(7, 1, 8, 8)
    examples = Examples(images, torch.tensor([0, 0, 0, 1, 1, 1, 1]), ("dark", "bright"))
    (result,) = measure_retrieval(
        digits_model,
        examples,
        queries=40,
        shots=(1,),
        at=(2,),
        rotations=True,
        generator=seeded(),
    )
    assert result.qualities["nearest distance, pixels"].precision[2] == 1.0
    assert result.collection == 4 * 7 - 1 - 3 * 4
    assert 2 / 18 < result.chance < 3 / 15


def test_rotated_classes_are_also_retrieved(digits_model, unseen_digits):
    """A model of upright digits ranks rotated ones far better than chance."""
    few = Examples(unseen_digits.elements[::4], unseen_digits.labels[::4], unseen_digits.names)
    settings = {"queries": 30, "shots": (5,), "generator": seeded()}
    (rotated,) = measure_retrieval(digits_model, few, **settings, rotations=True)
    assert rotated.chance < 0.15
    assert rotated.qualities["BRUNO"].average_precision > rotated.chance + 0.2


# --- errors ----------------------------------------------------------------------------------------------


def test_invalid_queries_and_collections_raise(digits_model, learnt_digits, index):
    x = learnt_digits.elements
    with pytest.raises(ValueError, match=r"`query` .*got shape \(0, 1, 8, 8\)"):
        rank(index, digits_model, x[:0])
    with pytest.raises(ValueError, match=r"`query`.*got shape \(1, 8, 8\).*query\.unsqueeze\(0\)"):
        rank(index, digits_model, x[0])
    with pytest.raises(ValueError, match=r"\(1, 8, 8\); got \(3, 1, 4, 4\)"):
        rank(index, digits_model, x[:3, :, :4, :4])
    with pytest.raises(ValueError, match=r"`collection` .*got shape \(5, 1, 4, 4\)"):
        Index.of(digits_model, x[:5, :, :4, :4])
    with pytest.raises(ValueError, match=r"`collection` .*got shape \(0, 1, 8, 8\)"):
        Index.of(digits_model, x[:0])
    with pytest.raises(ValueError, match=r"`names` .* 3 .*; got 2"):
        Index.of(digits_model, x[:3], ["a", "b"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shots": (0,)}, r"`shots` .*1 to 173.*'8'.*got 0"),
        ({"shots": (1, 174)}, r"`shots` .*173.*got 174"),
        ({"shots": ()}, r"`shots` .*got none"),
        ({"queries": 1}, r"`queries` .*2.*got 1"),
        ({"at": (1, 532)}, r"`at` .*531.*got 532"),
        ({"at": (0,)}, r"`at` .*got 0"),
        ({"at": (1585,), "rotations": True}, r"`at` .*1584.*got 1585"),
    ],
)
def test_invalid_measurements_raise(digits_model, unseen_digits, settings, message):
    with pytest.raises(ValueError, match=message):
        measure_retrieval(
            digits_model, unseen_digits, **{"queries": 2, "shots": (2,), "generator": seeded(), **settings}
        )


def test_a_single_class_raises(digits_model, unseen_digits):
    with pytest.raises(ValueError, match=r"`examples` .*two classes; got 1"):
        measure_retrieval(
            digits_model, unseen_digits.of_classes([0]), queries=2, shots=(1,), generator=seeded()
        )
