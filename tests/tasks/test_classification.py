import math
from dataclasses import replace

import pytest
import torch

from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.tasks.classification import (
    best_temperature,
    calibration_error,
    classify,
    fit_temperature,
    log_loss,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def halves(unseen_digits: Examples) -> tuple[Examples, Examples]:
    """The unseen digits, in two halves that share no image."""
    return tuple(
        replace(unseen_digits, elements=unseen_digits.elements[part], labels=unseen_digits.labels[part])
        for part in (slice(0, None, 2), slice(1, None, 2))
    )


def of_class(examples: Examples, label: int) -> torch.Tensor:
    return examples.elements[examples.labels == label]


def test_levels_and_pixels_with_noise_may_be_mixed(digits_model, unseen_digits):
    support = [of_class(unseen_digits, label)[:3] for label in range(2)]
    queries = unseen_digits.elements[:10]
    levels, noisy = (classify(digits_model, support, q) for q in (queries, queries + 0.5))
    torch.testing.assert_close(noisy.log_scores, levels.log_scores, rtol=1e-4, atol=1e-3)


def test_classes_of_different_sizes_are_compared_by_bayes(digits_model, unseen_digits):
    sizes, prior = (2, 5, 9), (0.2, 0.5, 0.3)
    support = [of_class(unseen_digits, label)[:size] for label, size in enumerate(sizes)]
    queries = torch.cat([of_class(unseen_digits, label)[20:24] for label in range(3)])
    found = classify(digits_model, support, queries, prior=prior)
    for label, images in enumerate(support):
        expected = digits_model.condition(images).log_prob(queries) - digits_model.encode(queries).log_det
        torch.testing.assert_close(found.log_scores[:, label], expected, rtol=1e-4, atol=1e-3)
    joint = found.log_scores.double() + torch.tensor(prior).double().log()
    torch.testing.assert_close(found.probabilities, joint.softmax(1).float())
    assert torch.equal(found.labels, joint.argmax(1))
    assert (found.labels == torch.arange(3).repeat_interleave(4)).double().mean() > 0.6


def test_a_prior_shifts_the_odds_by_itself_at_every_temperature(digits_model, unseen_digits):
    support = [of_class(unseen_digits, label)[:3] for label in range(3)]
    queries = unseen_digits.elements[30:40]
    for temperature in (1.0, 20.0):
        plain = classify(digits_model, support, queries, temperature=temperature).probabilities
        random_shift = classify(digits_model, support, queries, temperature=temperature, prior=(8, 1, 1))
        ratio = random_shift.probabilities[:, 0] / random_shift.probabilities[:, 1]
        torch.testing.assert_close(ratio, 8 * plain[:, 0] / plain[:, 1], rtol=1e-3, atol=0)


def test_neither_the_order_of_a_support_nor_how_much_is_encoded_at_once_matters(digits_model, unseen_digits):
    support = [of_class(unseen_digits, label)[:7] for label in range(3)]
    queries = unseen_digits.elements[30:40]
    found = classify(digits_model, support, queries).log_scores
    backwards = classify(digits_model, [images.flip(0) for images in support], queries, batch_size=3)
    torch.testing.assert_close(backwards.log_scores, found, rtol=1e-4, atol=1e-3)


def test_a_fitted_temperature_makes_probabilities_of_other_images_honest(digits_model, halves):
    fitted = fit_temperature(digits_model, halves[0], way=3, shot=1, trials=150, generator=seeded())
    assert fitted.episodes == 450
    assert fitted.temperature > 1
    assert fitted.log_loss < fitted.log_loss_before
    episodes = SetSampler(halves[1]).episodes(250, 3, 1, seeded(1))
    found = [classify(digits_model, list(s), q) for s, q in zip(*episodes, strict=True)]
    log_scores = torch.cat([one.log_scores for one in found])
    labels = torch.arange(3).repeat(250)
    assert log_loss(log_scores, labels, fitted.temperature) < log_loss(log_scores, labels) - 0.01
    error = calibration_error(log_scores, labels, fitted.temperature)
    assert error < 0.9 * calibration_error(log_scores, labels)


def test_where_nothing_is_wrong_the_temperature_stays_one(digits_model):
    images = torch.stack([torch.zeros(1, 8, 8), torch.full((1, 8, 8), 16.0)]).to(torch.uint8)
    easy = Examples(
        images.repeat_interleave(5, 0), torch.arange(2).repeat_interleave(5), ("dark", "bright"), levels=17
    )
    fitted = fit_temperature(digits_model, easy, way=2, shot=1, trials=3, generator=seeded())
    assert (fitted.temperature, fitted.mistakes, fitted.episodes) == (1.0, 0, 6)
    assert fitted.log_loss == fitted.log_loss_before


def test_the_best_temperature_undoes_a_known_overconfidence():
    logits = 2 * torch.randn(20000, 4, generator=seeded())
    labels = torch.multinomial(logits.softmax(1), 1, generator=seeded()).squeeze(1)
    assert best_temperature(7 * logits, labels) == pytest.approx(7, rel=0.05)
    assert calibration_error(logits, labels) < 0.02 < 0.1 < calibration_error(7 * logits, labels)
    best = best_temperature(logits, labels)
    assert all(log_loss(logits, labels, best) <= log_loss(logits, labels, best * f) for f in (0.9, 1.1))


def test_a_fit_to_scores_without_or_with_nothing_but_mistakes_ends_somewhere():
    scores = torch.tensor([[5.0, 0.0], [3.0, 1.0]])
    right, wrong = torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.long)
    assert best_temperature(scores, right) == pytest.approx(1e-3)
    assert best_temperature(scores, wrong) == pytest.approx(1e6)
    assert log_loss(scores, wrong, 1e6) == pytest.approx(math.log(2), rel=1e-4)


# --- errors -----------------------------------------------------------------------------------------------


IMAGES = torch.randint(0, 256, (3, 1, 2, 2), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("support", "queries", "options", "message"),
    [
        ([], IMAGES, {}, r"`support` must have at least two classes to choose from; got 0"),
        ([IMAGES], IMAGES, {}, r"`support` must have at least two classes.*got 1.*Posterior\.score"),
        ([IMAGES, IMAGES[:0]], IMAGES, {}, r"`support\[1\]` must hold at least one image; got none"),
        ([IMAGES, IMAGES], IMAGES[:0], {}, r"`queries` must hold at least one image; got none"),
        (
            [IMAGES, torch.zeros(2, 1, 3, 3, dtype=torch.uint8)],
            IMAGES,
            {},
            r"`support\[1\]` must be images of the model's shape, \(n, 1, 2, 2\); got \(2, 1, 3, 3\)",
        ),
        ([IMAGES, IMAGES], IMAGES[0], {}, r"`queries` must be images of the model's shape.*got \(1, 2, 2\)"),
        (
            [IMAGES, IMAGES],
            IMAGES,
            {"prior": (1, 2, 3)},
            r"`prior` must be a positive number for each of the 2",
        ),
        ([IMAGES, IMAGES], IMAGES, {"prior": (1, 0)}, r"`prior` must be a positive number.*got \[1.0, 0.0\]"),
        ([IMAGES, IMAGES], IMAGES, {"temperature": 0.0}, r"`temperature` must be above 0; got 0.0"),
        ([IMAGES, IMAGES], IMAGES, {"threshold": 0.5}, r"`threshold` must be below 0.1.*got 0.5"),
    ],
)
def test_what_cannot_be_classified(tiny_model, support, queries, options, message):
    with pytest.raises(ValueError, match=message):
        classify(tiny_model, support, queries, **options)
