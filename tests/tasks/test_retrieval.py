import pytest
import torch
from sklearn.metrics import average_precision_score

import bruno
from bruno import Bruno
from bruno.data import Examples
from bruno.tasks.retrieval import Index, measure_retrieval, rank


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


def test_the_order_goes_from_the_best_to_the_worst_and_misses_nothing(digits_model, learnt_digits, index):
    ranking = rank(index, digits_model, query_of(learnt_digits, 0))
    assert (ranking.scores[ranking.order].diff() <= 0).all()
    assert ranking.order.sort().values.tolist() == list(range(len(learnt_digits)))


def test_how_many_are_scored_and_encoded_together_makes_no_difference(
    digits_model, learnt_digits, index, monkeypatch
):
    query = query_of(learnt_digits, 1)
    whole = rank(index, digits_model, query)
    monkeypatch.setattr("bruno.tasks.scorers._NUMBERS_AT_A_TIME", 100 * digits_model.dim)
    in_parts = rank(Index.of(digits_model, learnt_digits, batch_size=77), digits_model, query)
    torch.testing.assert_close(in_parts.scores, whole.scores, rtol=1e-4, atol=1e-3)


def test_the_class_of_the_query_comes_first(digits_model, learnt_digits, unseen_digits, index):
    for examples in (learnt_digits, unseen_digits):
        collection = index if examples is learnt_digits else Index.of(digits_model, examples)
        for label in range(len(examples.names)):
            order = rank(collection, digits_model, query_of(examples, label, shots=10)).order
            best = examples.labels[order[:50]]
            assert (best == label).double().mean() > 0.7, examples.names[label]


def test_encoding_tells_how_far_it_is(digits_model, unseen_digits):
    told = []
    some = unseen_digits.elements[:10]
    Index.of(digits_model, some, batch_size=4, progress=lambda done, total: told.append((done, total)))
    assert told == [(4, 10), (8, 10), (10, 10)]


def test_so_many_are_encoded_at_a_time(digits_model, unseen_digits, monkeypatch):
    sizes, encode = [], Bruno.encode

    def counted(self, x, *rest):
        sizes.append(len(x))
        return encode(self, x, *rest)

    monkeypatch.setattr(Bruno, "encode", counted)
    Index.of(digits_model, unseen_digits.elements[:500], batch_size=300)
    assert sizes == [300, 200]


def test_names_say_where_an_element_comes_from(digits_model, unseen_digits, index):
    few = unseen_digits.elements[:2]
    assert Index.of(digits_model, few, ["naïve.png", "b/c.png"]).names == ("naïve.png", "b/c.png")
    assert Index.of(digits_model, few).names == ("0", "1")
    assert index.names[0] == "0/0"
    assert len(set(index.names)) == len(index)


# --- on disk ---------------------------------------------------------------------------------------------


def test_a_saved_index_ranks_like_the_one_that_was_saved(digits_model, learnt_digits, index, tmp_path):
    index.save(tmp_path / "index.bruno")
    query = query_of(learnt_digits, 4)
    expected = rank(index, digits_model, query)
    for model in (digits_model, None):
        loaded = Index.load(tmp_path / "index.bruno", model=model)
        assert loaded.names == index.names
        ranking = rank(loaded, digits_model, query)
        assert torch.equal(ranking.order, expected.order)
        assert torch.equal(ranking.scores, expected.scores)


def test_an_index_of_another_model_is_refused(digits_model, another_model, learnt_digits, index, tmp_path):
    index.save(tmp_path / "index.bruno")
    message = rf"`model` must be the one that encoded the index, {index.fingerprint}; got .* Index.of"
    with pytest.raises(ValueError, match=message):
        Index.load(tmp_path / "index.bruno", model=another_model)
    with pytest.raises(ValueError, match=message):
        rank(index, another_model, query_of(learnt_digits, 0))


def test_a_file_that_is_no_index_is_refused(digits_model, unseen_digits, tmp_path):
    path = tmp_path / "index.bruno"
    Index.of(digits_model, unseen_digits).save(path)
    with pytest.raises(ValueError, match=r"must be a model or a posterior; .* is the index of a collection"):
        bruno.load(path, model=digits_model)
    content = path.read_bytes()
    for broken in (content[:-100], content[:50], b"", b"not an index at all"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"`path` must be a file that bruno\.save wrote"):
            Index.load(path)
    bruno.save(digits_model, path)
    with pytest.raises(ValueError, match=r"`path` must be an index; .* is a model"):
        Index.load(path)
    with pytest.raises(FileNotFoundError, match=r"there is none"):
        Index.load(tmp_path / "nowhere.bruno")


# --- quality ---------------------------------------------------------------------------------------------


def test_a_class_is_found_far_better_than_by_chance_and_than_by_distance(digits_model, learnt_digits):
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


def test_classes_that_were_never_seen_are_found_too(digits_model, unseen_digits):
    (result,) = measure_retrieval(digits_model, unseen_digits, queries=40, shots=(5,), generator=seeded())
    assert result.chance < 0.35
    assert result.qualities["BRUNO"].average_precision > 0.75


def test_average_precision_is_scikit_learns_without_the_query(digits_model):
    """Four grey images, so that all queries there are can be asked: the mean of many is the mean of all."""
    greys, labels = torch.tensor([1.0, 6.0, 4.0, 15.0]), torch.tensor([0, 0, 1, 1])
    images = greys.to(torch.uint8).view(4, 1, 1, 1).expand(4, 1, 8, 8)
    examples = Examples(images, labels, ("a", "b"))
    (result,) = measure_retrieval(
        digits_model, examples, queries=200, shots=(1,), at=(1, 3), generator=seeded()
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


def test_the_same_seed_asks_the_same_queries(digits_model, unseen_digits):
    def measured(seed: int):
        return measure_retrieval(digits_model, unseen_digits, queries=3, shots=(2,), generator=seeded(seed))

    assert measured(1) == measured(1)
    assert measured(1) != measured(2)


def test_every_number_of_shots_is_measured_as_if_alone_and_the_collection_encoded_once(
    digits_model, unseen_digits, monkeypatch
):
    def measured(*shots: int):
        return measure_retrieval(digits_model, unseen_digits, queries=4, shots=shots, generator=seeded())

    alone = measured(4) + measured(1)
    encoded, encode = [], digits_model.encode

    def watched(x, generator):
        encoded.append(len(x))
        return encode(x, generator)

    monkeypatch.setattr(digits_model, "encode", watched)
    assert measured(4, 1) == alone
    assert [result.shots for result in alone] == [4, 1]
    assert sum(encoded) == len(unseen_digits)


def test_with_rotations_classes_count_four_times_and_never_meet_their_own_turns(digits_model):
    """Grey images look the same when rotated, so a class among its own turns would be found by chance."""
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


def test_turned_classes_are_found_too(digits_model, unseen_digits):
    """A model that learnt digits upright knows them rotated worse, but far better than by chance."""
    few = Examples(unseen_digits.elements[::4], unseen_digits.labels[::4], unseen_digits.names)
    asked = {"queries": 30, "shots": (5,), "generator": seeded()}
    (rotated,) = measure_retrieval(digits_model, few, **asked, rotations=True)
    assert rotated.chance < 0.15
    assert rotated.qualities["BRUNO"].average_precision > rotated.chance + 0.2


# --- errors ----------------------------------------------------------------------------------------------


def test_what_cannot_be_ranked(digits_model, learnt_digits, index):
    x = learnt_digits.elements
    with pytest.raises(ValueError, match=r"`query` must be elements.*at least 1; got shape \(0, 1, 8, 8\)"):
        rank(index, digits_model, x[:0])
    with pytest.raises(ValueError, match=r"`query`.*got shape \(1, 8, 8\).*query\.unsqueeze\(0\)"):
        rank(index, digits_model, x[0])
    with pytest.raises(ValueError, match=r"must end in shape \(1, 8, 8\); got \(3, 1, 4, 4\)"):
        rank(index, digits_model, x[:3, :, :4, :4])
    with pytest.raises(ValueError, match=r"`collection` must be elements.*got shape \(5, 1, 4, 4\)"):
        Index.of(digits_model, x[:5, :, :4, :4])
    with pytest.raises(ValueError, match=r"`collection`.*at least 1.*got shape \(0, 1, 8, 8\)"):
        Index.of(digits_model, x[:0])
    with pytest.raises(ValueError, match=r"`names` must be one for each of 3 elements; got 2"):
        Index.of(digits_model, x[:3], ["a", "b"])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"shots": (0,)}, r"`shots` must be from 1 to 173, one less than class '8' has.*got 0"),
        ({"shots": (1, 174)}, r"`shots` must be from 1 to 173.*got 174"),
        ({"shots": ()}, r"`shots` must be from 1 to 173.*got none"),
        ({"queries": 1}, r"`queries` must be at least 2.*got 1"),
        ({"at": (1, 532)}, r"`at` must be from 1 to the 531 elements.*got 532"),
        ({"at": (0,)}, r"`at` must be from 1.*got 0"),
        ({"at": (1585,), "rotations": True}, r"`at` must be from 1 to the 1584 elements.*got 1585"),
    ],
)
def test_what_cannot_be_measured(digits_model, unseen_digits, asked, message):
    with pytest.raises(ValueError, match=message):
        measure_retrieval(
            digits_model, unseen_digits, **{"queries": 2, "shots": (2,), "generator": seeded(), **asked}
        )


def test_one_class_cannot_be_told_from_others(digits_model, unseen_digits):
    with pytest.raises(ValueError, match=r"`examples` must be of at least two classes"):
        measure_retrieval(
            digits_model, unseen_digits.of_classes([0]), queries=2, shots=(1,), generator=seeded()
        )
