import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bruno.data import Examples, SetSampler
from bruno.data.sampling import _floyd_sample, with_rotations


@pytest.fixture
def examples():
    """Five classes of different sizes, shuffled; pixels encode the class and the element."""
    labels = torch.repeat_interleave(torch.arange(5), torch.tensor([4, 9, 6, 5, 7]))
    within = torch.cat([torch.arange(n) for n in (4, 9, 6, 5, 7)])
    images = (labels * 20 + within).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    order = torch.randperm(len(labels))
    return Examples(images[order], labels[order], tuple("abcde"))


counts = st.lists(st.integers(1, 8), min_size=1, max_size=6)


def numbered(counts: list[int]) -> Examples:
    """Classes of these sizes; each element is its index."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return Examples(torch.arange(len(labels)).double().unsqueeze(1), labels, [str(n) for n in counts])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_different(rows: torch.Tensor) -> None:
    ordered = rows.sort(-1).values
    assert (ordered.diff(dim=-1) > 0).all()


def test_a_set_has_different_elements_of_one_class(examples):
    x = SetSampler(examples).sets(200, 4, seeded())
    assert x.shape == (200, 4, 1, 2, 2)
    values = x[:, :, 0, 0, 0].long()
    assert ((values // 20) == (values[:, :1] // 20)).all()
    assert_different(values)


@given(counts, st.data(), st.integers(0, 2**32))
def test_no_draw_repeats_an_element(counts, data, seed):
    examples = numbered(counts)
    sampler = SetSampler(examples)
    n = data.draw(st.integers(1, min(counts)))
    drawn = [sampler.sets(5, n, seeded(seed)), sampler.sets_of(torch.arange(len(counts)), n, seeded(seed))]
    if len(counts) > 1:
        way = data.draw(st.integers(2, len(counts)))
        tasks = sampler.sets_of_different_classes(3, way, n, seeded(seed))
        assert_different(tasks.flatten(1))
        drawn.append(tasks.flatten(0, 1))
    for sets in drawn:
        indices = sets.squeeze(-1).long()
        assert_different(indices)
        assert (examples.labels[indices] == examples.labels[indices[:, :1]]).all()


@given(counts, st.data(), st.integers(0, 2**32))
def test_floyds_algorithm_draws_different_numbers_below_each_count(counts, data, seed):
    n = data.draw(st.integers(1, min(counts)))
    drawn = _floyd_sample(torch.tensor(counts), n, seeded(seed))
    assert drawn.shape == (len(counts), n)
    assert ((drawn >= 0) & (drawn < torch.tensor(counts).unsqueeze(1))).all()
    assert_different(drawn)


def test_classes_and_elements_are_equally_likely(examples):
    values = SetSampler(examples).sets(4000, 2, seeded())[:, :, 0, 0, 0].long().flatten()
    shares = torch.bincount(values // 20).double() / len(values)
    torch.testing.assert_close(shares, torch.full((5,), 0.2).double(), rtol=0, atol=0.03)
    of_b = torch.bincount(values[values // 20 == 1] - 20, minlength=9).double()
    torch.testing.assert_close(of_b / of_b.sum(), torch.full((9,), 1 / 9).double(), rtol=0, atol=0.03)


def test_a_seed_determines_the_sets(examples):
    sampler = SetSampler(examples, rotations=True)
    assert torch.equal(sampler.sets(6, 3, seeded(1)), sampler.sets(6, 3, seeded(1)))
    assert not torch.equal(sampler.sets(6, 3, seeded(1)), sampler.sets(6, 3, seeded(2)))


def test_all_images_of_a_set_have_the_same_rotation():
    image = torch.tensor([[0, 1], [2, 3]], dtype=torch.uint8)
    rotated = {tuple(torch.rot90(image, k).flatten().tolist()) for k in range(4)}
    examples = Examples(image.expand(6, 1, 2, 2), torch.zeros(6, dtype=torch.long), ("x",))
    sampler = SetSampler(examples, rotations=True)
    assert sampler.classes == 4
    x = sampler.sets(60, 3, seeded())
    assert (x == x[:, :1]).all()
    assert {tuple(s.flatten().tolist()) for s in x[:, 0]} == rotated


def test_sets_have_the_given_classes_and_rotations():
    """The position of the brightest pixel encodes the rotation, its value the class."""
    labels = torch.arange(3).repeat_interleave(4)
    images = torch.zeros(12, 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 1] = 100 + labels, torch.arange(12)
    sampler = SetSampler(Examples(images, labels, tuple("abc")), rotations=True)
    x = sampler.sets_of(torch.tensor([11, 0, 4, 4, 8]), 4, seeded())
    assert x.shape == (5, 4, 1, 2, 2)
    corners = x.flatten(2).long()[..., [0, 2, 3, 1]]  # anticlockwise from the upper left
    assert (corners.amax(-1) == 100 + torch.tensor([2, 0, 1, 1, 2]).unsqueeze(1)).all()
    assert (corners.argmax(-1) == torch.tensor([3, 0, 1, 1, 2]).unsqueeze(1)).all()
    opposite = corners.gather(-1, (corners.argmax(-1, keepdim=True) + 2) % 4).squeeze(-1)
    assert all(len(set(row)) == 4 for row in opposite.tolist())


def test_rotated_classes_are_numbered_like_those_of_the_sampler():
    labels = torch.tensor([1, 0, 1])
    examples = Examples(torch.randint(0, 9, (3, 2, 4, 4), dtype=torch.uint8), labels, ("a", "b"), levels=9)
    rotated = with_rotations(examples)
    assert rotated.names == ("a", "b", "a, 90°", "b, 90°", "a, 180°", "b, 180°", "a, 270°", "b, 270°")
    assert rotated.levels == 9
    sampler = SetSampler(examples, rotations=True)
    for turns in range(4):
        part = slice(3 * turns, 3 * turns + 3)
        assert torch.equal(rotated.elements[part], torch.rot90(examples.elements, turns, (-2, -1)))
        assert torch.equal(rotated.labels[part], labels + 2 * turns)
        alone = sampler.sets_of(torch.tensor([2 * turns]), 1, seeded())[0]
        assert torch.equal(alone, rotated.elements[rotated.labels == 2 * turns])


def test_an_episode_has_different_classes_and_a_query_for_each(examples):
    support, query = SetSampler(examples).episodes(50, 3, 2, seeded())
    assert support.shape == (50, 3, 2, 1, 2, 2)
    assert query.shape == (50, 3, 1, 2, 2)
    classes = support[..., 0, 0, 0].long() // 20
    assert (classes == query[..., 0, 0, 0].long().unsqueeze(-1) // 20).all()
    assert all(len(set(row.tolist())) == 3 for row in classes[:, :, 0])
    assert not (support[..., 0, 0, 0] == query[..., 0, 0, 0].unsqueeze(-1)).any()


def test_classes_of_an_episode_have_independent_rotations():
    """The position of the brightest pixel encodes the rotation."""
    images = torch.zeros(12, 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = 9
    sampler = SetSampler(Examples(images, torch.arange(4).repeat(3), tuple("abcd")), rotations=True)
    support, query = sampler.episodes(200, 3, 2, seeded())
    turns = support.flatten(3).argmax(-1)
    assert (turns == turns[..., :1]).all()  # one rotation for each class
    assert torch.equal(turns[..., 0], query.flatten(2).argmax(-1))
    assert turns[..., 0].flatten().bincount(minlength=4).min() > 100
    assert (turns[:, 0, 0] != turns[:, 1, 0]).double().mean() > 0.6  # the expectation is 3/4


def test_outliers_are_of_other_classes_and_have_the_given_rate(examples):
    x, outlier = SetSampler(examples).contaminated(500, 4, 0.2, seeded())
    assert 0.15 < outlier.float().mean() < 0.25
    classes = x[:, :, 0, 0, 0].long() // 20
    for row, flags in zip(classes, outlier, strict=True):
        kept = row[~flags]
        assert len(set(kept.tolist())) <= 1
        assert not set(row[flags].tolist()) & set(kept.tolist())


def test_contaminated_sets_can_be_of_one_class(examples):
    x, outlier = SetSampler(examples).contaminated(100, 4, 0.3, seeded(), of=2)
    classes = x[:, :, 0, 0, 0].long() // 20
    assert torch.equal(classes != 2, outlier)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda s: s.contaminated(2, 3, 0.1, seeded(), of=5), r"`of` .*from 0 to 4; got 5"),
        (lambda s: s.sets(2, 5, seeded()), r"`n` .*from 1 to 4.*'a'.*got 5"),
        (lambda s: s.episodes(2, 3, 4, seeded()), r"`shot \+ 1` .*from 1 to 4.*got 5"),
        (lambda s: s.episodes(2, 6, 1, seeded()), r"`way` .*from 2 to .*5.*got 6"),
        (lambda s: s.contaminated(2, 3, 1.0, seeded()), r"`rate` .*got 1.0"),
        (lambda s: s.episodes(2, 3, 0, seeded()), r"`shot` .*at least 1; got 0"),
        (lambda s: s.sets(-1, 2, seeded()), r"`batch` .*at least 1; got -1"),
        (lambda s: s.sets_of_different_classes(1, 6, 2, seeded()), r"`way` .*from 1 to 5.*got 6"),
        (lambda s: s.sets_of([5], 2, seeded()), r"`classes` .*from 0 to 4; got 5"),
        (lambda s: s.sets_of([0, -1], 2, seeded()), r"`classes` .*from 0 to 4; got -1"),
        (lambda s: s.at([31]), r"`indices` .*from 0 to 30; got 31"),
        (lambda s: s.sets(10**12, 2, seeded()), r"`batch` needs .* for 1000000000000;.*BRUNO_MAX_MEMORY"),
        (lambda s: s.contaminated(10**12, 2, 0.1, seeded()), r"`batch` needs .* for 1000000000000;"),
    ],
)
def test_arguments_out_of_range_are_named(examples, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(SetSampler(examples))


def test_classes_may_be_a_list_or_an_array(examples):
    sampler = SetSampler(examples)
    expected = sampler.sets_of(torch.tensor([3, 1]), 2, seeded())
    for classes in ([3, 1], np.array([3, 1])):
        assert torch.equal(sampler.sets_of(classes, 2, seeded()), expected)
    with pytest.raises(TypeError, match=r"`classes` .*got torch.float"):
        sampler.sets_of(np.array([0.5]), 2, seeded())


def test_rotations_need_square_images():
    rows = Examples(torch.randn(4, 3), torch.zeros(4, dtype=torch.long), ("x",))
    with pytest.raises(ValueError, match=r"`rotations` .*square.*\(3,\)"):
        SetSampler(rows, rotations=True)
    with pytest.raises(ValueError, match=r"`rotations` .*square.*\(3,\)"):
        with_rotations(rows)


def test_an_empty_class_is_named():
    with pytest.raises(ValueError, match=r"`examples` .*'y'"):
        SetSampler(Examples(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), ("x", "y")))


def test_ordered_pairs_of_a_large_class_are_equally_likely(examples, monkeypatch):
    monkeypatch.setattr("bruno.data.sampling._MAX_KEYS", 3)
    sampler = SetSampler(examples)
    which = torch.full((60_000,), 3)  # five elements: ten pairs, in two orders
    pairs = sampler.distinct(which, 2, seeded()) - sampler.starts[3]
    assert (pairs[:, 0] != pairs[:, 1]).all()
    often = (pairs[:, 0] * 5 + pairs[:, 1]).bincount(minlength=25).view(5, 5)
    apart = ~torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(often[apart].double(), torch.full((20,), 3000.0).double(), atol=220, rtol=0)
    everything = sampler.distinct(torch.arange(5), 4, seeded()) - sampler.starts.unsqueeze(1)
    assert sorted(everything[0].tolist()) == [0, 1, 2, 3]  # the whole smallest class


def test_drawn_sets_and_episodes_convert_to_arrays(examples):
    sampler = SetSampler(examples)
    drawn = sampler.episodes(2, 3, 2, seeded()), sampler.contaminated(2, 4, 0.25, seeded())
    for tensors in drawn:
        for name, array in tensors.numpy().items():
            np.testing.assert_array_equal(array, getattr(tensors, name).numpy())
