import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from bruno.data.examples import concatenate
from bruno.tasks.generation import (
    condition_on,
    draw,
    grid,
    prefix_grid,
    prior_samples,
    samples_by_prefix,
    spread_by_repeats,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def digits(learnt_digits, unseen_digits):
    """All ten."""
    return concatenate([learnt_digits, unseen_digits])


@pytest.fixture(scope="session")
def judge(digits):
    """A plain k-NN of pixels, that knows nothing of the model."""
    return KNeighborsClassifier(5).fit(digits.elements.flatten(1).numpy(), digits.labels.numpy())


def judged(judge, images: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(judge.predict(images.reshape(-1, 64).numpy())).view(images.shape[:-3])


# --- samples ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [0, 3, 6, 8])  # the digits 0, 4, 9 and, unseen, 5
def test_samples_of_a_class_are_taken_for_that_class_far_more_often_than_chance(
    digits_model, digits, judge, label
):
    x = digits.elements[digits.labels == label][:20]
    drawn = draw(condition_on(digits_model, x), 100, generator=seeded(), temperature=0.7).images
    share = (judged(judge, drawn) == label).double().mean().item()
    assert share > 5 / 10
    prior = prior_samples(digits_model, 100, generator=seeded(), temperature=0.7).images
    assert share > (judged(judge, prior) == label).double().mean().item() + 0.2


def test_prior_samples_are_of_several_classes(digits_model, judge):
    counts = torch.bincount(judged(judge, prior_samples(digits_model, 200, generator=seeded()).images))
    assert (counts > 5).sum() >= 4


def test_the_more_is_seen_of_a_class_the_more_samples_are_of_it(digits_model, digits, judge):
    share = torch.zeros(21)
    for label in range(10):
        x = digits.elements[digits.labels == label][:20]
        found = samples_by_prefix(digits_model, x, 30, generator=seeded(label), temperature=0.7)
        assert found.lengths == tuple(range(21))
        share += (judged(judge, found.samples.images) == label).float().mean(1) / 10
    assert share[0] < 0.2
    assert share[1] > share[0] + 0.1
    assert share[-5:].mean() > share[1] + 0.05


def test_each_prefix_sees_that_much_and_no_more(digits_model, learnt_digits):
    x = learnt_digits.elements[:6]
    found = samples_by_prefix(digits_model, x, 2, temperature=0.0)
    for length, samples in zip(found.lengths, found.samples.x, strict=True):
        known = digits_model.condition(x[:length]) if length else digits_model.prior()
        expected = known.sample(2, temperature=0.0).x
        torch.testing.assert_close(samples, expected, rtol=1e-3, atol=0.02)


def test_chosen_prefixes_are_the_same_as_among_all(digits_model, learnt_digits):
    x = learnt_digits.elements[:6]
    every = samples_by_prefix(digits_model, x, 1, temperature=0.0).samples.x
    some = samples_by_prefix(digits_model, x, 1, lengths=(6, 0, 3), temperature=0.0)
    assert some.lengths == (6, 0, 3)
    torch.testing.assert_close(some.samples.x, every[[6, 0, 3]], rtol=1e-3, atol=0.02)


def test_the_order_of_the_set_does_not_matter(digits_model, learnt_digits):
    x = learnt_digits.elements[:12]
    forwards, backwards = (
        samples_by_prefix(digits_model, some, 5, lengths=(4, 12), generator=seeded()).samples.x
        for some in (x, x.flip(0))
    )
    torch.testing.assert_close(forwards[1], backwards[1], rtol=1e-3, atol=0.02)
    assert not torch.allclose(forwards[0], backwards[0], rtol=1e-3, atol=0.02)


def test_the_same_seed_draws_the_same_samples(digits_model):
    first, second, other = (prior_samples(digits_model, 4, generator=seeded(s)).x for s in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_a_lower_temperature_draws_more_alike(digits_model, learnt_digits):
    known = condition_on(digits_model, learnt_digits.elements[learnt_digits.labels == 2][:10])
    spread = [
        draw(known, 100, generator=seeded(), temperature=t).x.var(0).mean() for t in (0.0, 0.3, 0.7, 1.0)
    ]
    assert spread == sorted(spread)
    assert spread[0] < 1e-6 < spread[1] < spread[3] / 1.5


def test_every_set_of_a_batch_gets_its_own_samples(digits_model, learnt_digits):
    sets = torch.stack([learnt_digits.elements[learnt_digits.labels == c][:8] for c in range(6)]).unflatten(
        0, (2, 3)
    )
    drawn = draw(condition_on(digits_model, sets), 7, temperature=0.0, batch_size=4)
    assert drawn.x.shape == (2, 3, 7, 1, 8, 8)
    alone = draw(condition_on(digits_model, sets[1, 2]), 1, temperature=0.0)
    torch.testing.assert_close(drawn.x[1, 2], alone.x.expand(7, 1, 8, 8), rtol=1e-3, atol=0.02)


# --- long sets --------------------------------------------------------------------------------------------


def test_a_set_folded_in_by_parts_is_the_set(digits_model, learnt_digits):
    x = learnt_digits.elements[:50]
    whole = digits_model.condition(x).evidence
    for batch_size in (1, 7, 64):
        parts = condition_on(digits_model, x, batch_size=batch_size).evidence
        assert parts.count == 50
        torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(parts.scatter, whole.scatter, rtol=1e-4, atol=1e-3)


def test_a_set_of_500_is_never_in_memory_as_a_whole(digits_model, learnt_digits, monkeypatch):
    x = learnt_digits.elements[:500]
    sizes = []
    flow, inverse = digits_model.flow.forward, digits_model.flow.inverse

    def watched(way):
        return lambda batch: (sizes.append(len(batch)), way(batch))[1]

    monkeypatch.setattr(digits_model.flow, "forward", watched(flow))
    monkeypatch.setattr(digits_model.flow, "inverse", watched(inverse))
    known = condition_on(digits_model, x, batch_size=32)
    found = samples_by_prefix(digits_model, x, 5, lengths=range(480, 501), generator=seeded(), batch_size=32)
    assert max(sizes) == 32
    assert known.evidence.count == 500
    assert found.samples.x.shape == (21, 5, 1, 8, 8)
    assert found.samples.x.isfinite().all()


def test_nothing_seen_is_the_prior(digits_model):
    nothing = condition_on(digits_model, torch.zeros((0, 1, 8, 8), dtype=torch.uint8))
    assert torch.equal(
        draw(nothing, 3, generator=seeded()).x, prior_samples(digits_model, 3, generator=seeded()).x
    )


# --- the same image again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [3, 40, 200])
def test_the_more_often_an_image_is_seen_the_less_samples_differ(digits_model, unseen_digits, place):
    found = spread_by_repeats(digits_model, unseen_digits.elements[place], generator=seeded())
    assert found.repeats == (1, 2, 5, 10, 20)
    assert list(found.variance) == sorted(found.variance, reverse=True)
    assert found.variance[-1] < 0.9 * found.variance[0]
    scaled = found.samples.x.double() / digits_model.levels
    assert found.variance[2] == pytest.approx(scaled[2].var(0).mean().item())


def test_repeats_are_as_good_as_a_set_of_copies(digits_model, unseen_digits):
    image = unseen_digits.elements[3]
    found = spread_by_repeats(digits_model, image, (4,), samples=2, temperature=0.0)
    copies = condition_on(digits_model, image.expand(4, 1, 8, 8))
    torch.testing.assert_close(found.samples.x[0], draw(copies, 2, temperature=0.0).x, rtol=1e-3, atol=0.02)


# --- pictures ---------------------------------------------------------------------------------------------


def test_a_grid_has_every_image_in_its_place():
    images = torch.arange(1, 6, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 3, 2, 4)
    picture = grid(images, columns=3, padding=1, background=99)
    assert picture.dtype == np.uint8
    assert picture.shape == (1 + 2 * 3, 1 + 3 * 5, 3)
    for i in range(6):
        row, column = divmod(i, 3)
        cell = picture[1 + 3 * row : 3 + 3 * row, 1 + 5 * column : 5 + 5 * column]
        assert (cell == (i + 1 if i < 5 else 99)).all()
    assert (picture[0] == 99).all()
    assert (picture[:, 0] == 99).all()
    assert (picture[3] == 99).all()
    assert (picture[:, 5] == 99).all()


def test_a_grid_keeps_an_image_upright():
    image = torch.arange(24, dtype=torch.uint8).view(1, 3, 2, 4)
    assert (grid(image, columns=1, padding=0) == image[0].permute(1, 2, 0).numpy()).all()


def test_the_papers_picture_has_the_inputs_on_top_and_a_column_for_each_prefix():
    inputs = torch.tensor([10, 20], dtype=torch.uint8).view(2, 1, 1, 1)
    samples = torch.arange(1, 7, dtype=torch.uint8).view(3, 2, 1, 1, 1)
    picture = prefix_grid(inputs, samples, padding=0, background=0)[..., 0]
    assert picture.tolist() == [[0, 10, 20], [1, 3, 5], [2, 4, 6]]
    without_prior = prefix_grid(inputs, samples[1:], padding=0)[..., 0]
    assert without_prior.tolist() == [[10, 20], [3, 5], [4, 6]]


# --- errors -----------------------------------------------------------------------------------------------

IMAGES = torch.zeros((3, 1, 8, 8), dtype=torch.uint8)
CELLS = torch.zeros((2, 4, 1, 8, 8), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda m: condition_on(m, IMAGES[0]),
            r"`x` must be sets \(\*batch, n, 1, 8, 8\); got .*\(1, 8, 8\)",
        ),
        (lambda m: condition_on(m, IMAGES[..., :7]), r"`x` must be sets .*got shape \(3, 1, 8, 7\)"),
        (lambda m: prior_samples(m, 0), r"`samples` must be at least 1; got 0"),
        (lambda m: prior_samples(m, 1, temperature=-1.0), r"`temperature` must be at least 0; got -1.0"),
        (lambda m: samples_by_prefix(m, IMAGES[0], 1), r"`x` must be one set \(n, 1, 8, 8\)"),
        (lambda m: samples_by_prefix(m, IMAGES[:0], 1), r"with n from 1; got shape \(0, .*`prior_samples`"),
        (lambda m: samples_by_prefix(m, IMAGES, 1, lengths=(1, 4)), r"`lengths` must be from 0 to the 3 el"),
        (lambda m: samples_by_prefix(m, IMAGES, 1, lengths=()), r"`lengths` must be from 0 .*; got \(\)"),
        (
            lambda m: spread_by_repeats(m, IMAGES),
            r"`x` must have the model's shape, \(1, 8, 8\); got \(3,",
        ),
        (
            lambda m: spread_by_repeats(m, IMAGES[0], (1, 0)),
            r"`repeats` must be numbers from 1; got \(1, 0\)",
        ),
        (lambda m: spread_by_repeats(m, IMAGES[0], samples=1), r"`samples` must be at least 2, .*; got 1"),
        (lambda m: grid(IMAGES[:0], 2), r"`images` must be at least one, with 1 or 3 channels; got \(0,"),
        (lambda m: grid(IMAGES.expand(3, 2, 8, 8), 2), r"with 1 or 3 channels; got \(3, 2, 8, 8\)"),
        (lambda m: grid(IMAGES, 0), r"`columns` must be at least 1 and `padding` 0; got 0 and 2"),
        (lambda m: prefix_grid(IMAGES, CELLS), r"a column for each of the 3 inputs and one for the prior"),
    ],
)
def test_what_cannot_be_drawn(digits_model, ask, message):
    with pytest.raises(ValueError, match=message):
        ask(digits_model)
