import pytest
import torch

from bruno.data import Examples
from bruno.data.sampling import SetSampler, with_rotations


@pytest.fixture
def examples():
    """Five classes of different sizes, shuffled; a pixel's value says class and element."""
    labels = torch.repeat_interleave(torch.arange(5), torch.tensor([4, 9, 6, 5, 7]))
    within = torch.cat([torch.arange(n) for n in (4, 9, 6, 5, 7)])
    images = (labels * 20 + within).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    order = torch.randperm(len(labels))
    return Examples(images[order], labels[order], tuple("abcde"))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_set_is_of_one_class_and_repeats_nothing(examples):
    x = SetSampler(examples).sets(200, 4, seeded())
    assert x.shape == (200, 4, 1, 2, 2)
    values = x[:, :, 0, 0, 0].long()
    assert ((values // 20) == (values[:, :1] // 20)).all()
    assert all(len(set(row.tolist())) == 4 for row in values)


def test_classes_and_elements_are_equally_likely(examples):
    values = SetSampler(examples).sets(4000, 2, seeded())[:, :, 0, 0, 0].long().flatten()
    shares = torch.bincount(values // 20).double() / len(values)
    torch.testing.assert_close(shares, torch.full((5,), 0.2).double(), rtol=0, atol=0.03)
    of_b = torch.bincount(values[values // 20 == 1] - 20, minlength=9).double()
    torch.testing.assert_close(of_b / of_b.sum(), torch.full((9,), 1 / 9).double(), rtol=0, atol=0.03)


def test_the_same_seed_draws_the_same_sets(examples):
    sampler = SetSampler(examples, rotations=True)
    assert torch.equal(sampler.sets(6, 3, seeded(1)), sampler.sets(6, 3, seeded(1)))
    assert not torch.equal(sampler.sets(6, 3, seeded(1)), sampler.sets(6, 3, seeded(2)))


def test_rotations_turn_a_whole_set_alike():
    image = torch.tensor([[0, 1], [2, 3]], dtype=torch.uint8)
    rotated = {tuple(torch.rot90(image, k).flatten().tolist()) for k in range(4)}
    examples = Examples(image.expand(6, 1, 2, 2), torch.zeros(6, dtype=torch.long), ("x",))
    sampler = SetSampler(examples, rotations=True)
    assert sampler.classes == 4
    x = sampler.sets(60, 3, seeded())
    assert (x == x[:, :1]).all()
    assert {tuple(s.flatten().tolist()) for s in x[:, 0]} == rotated


def test_sets_of_chosen_classes_are_of_those_turned_as_asked():
    """The brightest pixel's place tells the turn, its value the class."""
    labels = torch.arange(3).repeat_interleave(4)
    images = torch.zeros(12, 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 1] = 100 + labels, torch.arange(12)
    sampler = SetSampler(Examples(images, labels, tuple("abc")), rotations=True)
    x = sampler.sets_of(torch.tensor([11, 0, 4, 4, 8]), 4, seeded())
    assert x.shape == (5, 4, 1, 2, 2)
    corners = x.flatten(2).long()[..., [0, 2, 3, 1]]  # against the clock, from the upper left
    assert (corners.amax(-1) == 100 + torch.tensor([2, 0, 1, 1, 2]).unsqueeze(1)).all()
    assert (corners.argmax(-1) == torch.tensor([3, 0, 1, 1, 2]).unsqueeze(1)).all()
    opposite = corners.gather(-1, (corners.argmax(-1, keepdim=True) + 2) % 4).squeeze(-1)
    assert all(len(set(row)) == 4 for row in opposite.tolist())


def test_every_turn_is_a_class_of_its_own_numbered_as_the_sampler_has_them():
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


def test_episodes_have_different_classes_and_a_query_for_each(examples):
    support, query = SetSampler(examples).episodes(50, 3, 2, seeded())
    assert support.shape == (50, 3, 2, 1, 2, 2)
    assert query.shape == (50, 3, 1, 2, 2)
    classes = support[..., 0, 0, 0].long() // 20
    assert (classes == query[..., 0, 0, 0].long().unsqueeze(-1) // 20).all()
    assert all(len(set(row.tolist())) == 3 for row in classes[:, :, 0])
    assert not (support[..., 0, 0, 0] == query[..., 0, 0, 0].unsqueeze(-1)).any()


def test_classes_of_an_episode_are_turned_each_by_itself():
    """The brightest pixel's place tells the turn."""
    images = torch.zeros(12, 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = 9
    sampler = SetSampler(Examples(images, torch.arange(4).repeat(3), tuple("abcd")), rotations=True)
    support, query = sampler.episodes(200, 3, 2, seeded())
    turns = support.flatten(3).argmax(-1)
    assert (turns == turns[..., :1]).all()  # a class is rotated alike
    assert torch.equal(turns[..., 0], query.flatten(2).argmax(-1))
    assert turns[..., 0].flatten().bincount(minlength=4).min() > 100
    assert (turns[:, 0, 0] != turns[:, 1, 0]).double().mean() > 0.6  # of which 3/4 is expected


def test_outliers_are_of_another_class_at_the_given_rate(examples):
    x, outlier = SetSampler(examples).contaminated(500, 4, 0.2, seeded())
    assert 0.15 < outlier.float().mean() < 0.25
    classes = x[:, :, 0, 0, 0].long() // 20
    for row, odd in zip(classes, outlier, strict=True):
        kept = row[~odd]
        assert len(set(kept.tolist())) <= 1
        assert not set(row[odd].tolist()) & set(kept.tolist())


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda s: s.sets(2, 5, seeded()), r"`n` must be from 1 to 4, what class 'a' has; got 5"),
        (lambda s: s.episodes(2, 3, 4, seeded()), r"`shot \+ 1` must be from 1 to 4.*got 5"),
        (lambda s: s.episodes(2, 6, 1, seeded()), r"`way` must be from 2 to the 5 classes; got 6"),
        (lambda s: s.contaminated(2, 3, 1.0, seeded()), r"`rate` must be from 0 up to 1; got 1.0"),
    ],
)
def test_asking_for_too_much(examples, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(SetSampler(examples))


def test_rotations_need_square_images():
    rows = Examples(torch.randn(4, 3), torch.zeros(4, dtype=torch.long), ("x",))
    with pytest.raises(ValueError, match=r"`rotations` needs square images"):
        SetSampler(rows, rotations=True)
    with pytest.raises(ValueError, match=r"`rotations` needs square images.*\(3,\)"):
        with_rotations(rows)


def test_an_empty_class_is_named():
    with pytest.raises(ValueError, match=r"'y' has none"):
        SetSampler(Examples(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), ("x", "y")))


def test_large_classes_are_drawn_from_one_by_one_and_as_evenly(examples, monkeypatch):
    monkeypatch.setattr("bruno.data.sampling._MOST_KEYS", 3)
    sampler = SetSampler(examples)
    which = torch.full((60_000,), 3)  # five elements: ten pairs, in two orders
    pairs = sampler.distinct(which, 2, seeded()) - sampler.starts[3]
    assert (pairs[:, 0] != pairs[:, 1]).all()
    often = (pairs[:, 0] * 5 + pairs[:, 1]).bincount(minlength=25).view(5, 5)
    apart = ~torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(often[apart].double(), torch.full((20,), 3000.0).double(), atol=220, rtol=0)
    everything = sampler.distinct(torch.arange(5), 4, seeded()) - sampler.starts.unsqueeze(1)
    assert sorted(everything[0].tolist()) == [0, 1, 2, 3]  # all that the smallest class has
