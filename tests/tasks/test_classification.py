import math
from dataclasses import replace

import pytest
import torch

from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.tasks.classification import best_temperature, classify, fit_temperature
from bruno.tasks.few_shot import FewShotProtocol, draw_episodes, episode_scores
from bruno.tasks.metrics import calibration_error, log_loss


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


def test_integer_support_and_float_queries_can_be_mixed(digits_model, unseen_digits):
    support = [of_class(unseen_digits, label)[:3] for label in range(2)]
    queries = unseen_digits.elements[:10]
    levels, noisy = (classify(digits_model, support, q) for q in (queries, queries + 0.5))
    torch.testing.assert_close(noisy.log_scores, levels.log_scores, rtol=1e-4, atol=1e-3)


def test_probabilities_follow_bayes_rule_for_classes_of_any_size(digits_model, unseen_digits):
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


def test_a_prior_multiplies_the_odds_at_every_temperature(digits_model, unseen_digits):
    support = [of_class(unseen_digits, label)[:3] for label in range(3)]
    queries = unseen_digits.elements[30:40]
    for temperature in (1.0, 20.0):
        plain = classify(digits_model, support, queries, temperature=temperature).probabilities
        shifted = classify(digits_model, support, queries, temperature=temperature, prior=(8, 1, 1))
        ratio = shifted.probabilities[:, 0] / shifted.probabilities[:, 1]
        torch.testing.assert_close(ratio, 8 * plain[:, 0] / plain[:, 1], rtol=1e-3, atol=0)


def test_the_order_of_a_support_and_the_batch_size_make_no_difference(digits_model, unseen_digits):
    support = [of_class(unseen_digits, label)[:7] for label in range(3)]
    queries = unseen_digits.elements[30:40]
    found = classify(digits_model, support, queries).log_scores
    backwards = classify(digits_model, [images.flip(0) for images in support], queries, batch_size=3)
    torch.testing.assert_close(backwards.log_scores, found, rtol=1e-4, atol=1e-3)


def test_a_fitted_temperature_calibrates_probabilities_of_other_images(digits_model, halves):
    fitted = fit_temperature(
        digits_model, halves[0], FewShotProtocol((3,), (1,), trials=150), generator=seeded()
    )
    assert fitted.episodes == 450
    assert fitted.temperature > 1
    assert fitted.log_loss < fitted.log_loss_before
    others = FewShotProtocol((3,), (1,), trials=250, noise=False)
    log_scores = episode_scores(digits_model, halves[1], others, generator=seeded(1))
    labels = torch.zeros(len(log_scores), dtype=torch.long)
    assert log_loss(labels, log_scores, fitted.temperature) < log_loss(labels, log_scores) - 0.01
    error = calibration_error(labels, log_scores, fitted.temperature)
    assert error < 0.9 * calibration_error(labels, log_scores)


def test_a_temperature_is_fitted_to_the_log_scores_of_classify(digits_model, unseen_digits):
    protocol = FewShotProtocol((3,), (2,), trials=2, noise=False)
    found = episode_scores(digits_model, unseen_digits, protocol, generator=seeded())
    seeds, sampler = torch.randint(2**62, (2, 2), generator=seeded())[:, 0], SetSampler(unseen_digits)
    expected = [
        classify(digits_model, list(map(sampler.at, support)), sampler.at(query.unsqueeze(0))).log_scores
        for seed in seeds.tolist()
        for query, support in zip(*draw_episodes(sampler, 3, 2, seeded(seed)), strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-3)


def test_without_mistakes_the_temperature_stays_one(digits_model):
    images = torch.stack([torch.zeros(1, 8, 8), torch.full((1, 8, 8), 16.0)]).to(torch.uint8)
    easy = Examples(
        images.repeat_interleave(5, 0), torch.arange(2).repeat_interleave(5), ("dark", "bright"), levels=17
    )
    fitted = fit_temperature(digits_model, easy, FewShotProtocol((2,), (1,), trials=3), generator=seeded())
    assert (fitted.temperature, fitted.mistakes, fitted.episodes) == (1.0, 0, 6)
    assert fitted.log_loss == fitted.log_loss_before


def test_the_best_temperature_undoes_a_known_overconfidence():
    logits = 2 * torch.randn(20000, 4, generator=seeded())
    labels = torch.multinomial(logits.softmax(1), 1, generator=seeded()).squeeze(1)
    assert best_temperature(labels, 7 * logits) == pytest.approx(7, rel=0.05)
    assert calibration_error(labels, logits) < 0.02 < 0.1 < calibration_error(labels, 7 * logits)
    best = best_temperature(labels, logits)
    assert all(log_loss(labels, logits, best) <= log_loss(labels, logits, best * f) for f in (0.9, 1.1))


def test_a_temperature_fitted_to_no_or_only_mistakes_is_bounded():
    scores = torch.tensor([[5.0, 0.0], [3.0, 1.0]])
    right, wrong = torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.long)
    assert best_temperature(right, scores) == pytest.approx(1e-3)
    assert best_temperature(wrong, scores) == pytest.approx(1e6)
    assert log_loss(wrong, scores, 1e6) == pytest.approx(math.log(2), rel=1e-4)


def test_a_classification_carries_the_names_of_classes_and_queries(digits_model, unseen_digits):
    support = {name: of_class(unseen_digits, label)[: label + 2] for label, name in enumerate("abc")}
    queries = unseen_digits.elements[30:32]
    found = classify(digits_model, support, queries, names=["x.png", "y.png"], temperature=2.0)
    assert (found.classes, found.names) == (("a", "b", "c"), ("x.png", "y.png"))
    assert (found.support, found.temperature) == ((2, 3, 4), 2.0)
    unnamed = classify(digits_model, list(support.values()), queries, temperature=2.0)
    assert torch.equal(unnamed.probabilities, found.probabilities)
    assert (unnamed.classes, unnamed.names) == (("0", "1", "2"), ("0", "1"))


def test_the_most_probable_classes_come_first(digits_model, unseen_digits):
    support = {name: of_class(unseen_digits, label)[:3] for label, name in enumerate("abc")}
    found = classify(digits_model, support, unseen_digits.elements[30:35])
    for row, probabilities, label in zip(
        found.most_probable(9), found.probabilities, found.labels, strict=True
    ):
        assert dict(row) == pytest.approx(dict(zip("abc", probabilities.tolist(), strict=True)))
        assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)
        assert row[0][0] == "abc"[label]
    assert [len(row) for row in found.most_probable(2)] == [2] * 5


# --- errors -----------------------------------------------------------------------------------------------


IMAGES = torch.randint(0, 256, (3, 1, 2, 2), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("support", "queries", "options", "message"),
    [
        ([], IMAGES, {}, r"`support` .*got 0"),
        ([IMAGES], IMAGES, {}, r"`support` .*got 1.*Posterior\.score"),
        ([IMAGES, IMAGES[:0]], IMAGES, {}, r"`support\[1\]` .*got none"),
        ([IMAGES, IMAGES], IMAGES[:0], {}, r"`queries` .*got none"),
        (
            [IMAGES, torch.zeros(2, 1, 3, 3, dtype=torch.uint8)],
            IMAGES,
            {},
            r"`support\[1\]` .*\(n, 1, 2, 2\); got \(2, 1, 3, 3\)",
        ),
        ([IMAGES, IMAGES], IMAGES[0], {}, r"`queries` .*got \(1, 2, 2\)"),
        (
            [IMAGES, IMAGES],
            IMAGES,
            {"prior": (1, 2, 3)},
            r"`prior` .* 2 classes; got \[1.0, 2.0, 3.0\]",
        ),
        ([IMAGES, IMAGES], IMAGES, {"prior": (1, 0)}, r"`prior` .*got \[1.0, 0.0\]"),
        ([IMAGES, IMAGES], IMAGES, {"temperature": 0.0}, r"`temperature` .*got 0.0"),
        ([IMAGES, IMAGES], IMAGES, {"threshold": 0.5}, r"`threshold` .*0.1.*got 0.5"),
        ([IMAGES, IMAGES], IMAGES, {"names": ["a"]}, r"`names` .*3 queries; got 1"),
    ],
)
def test_invalid_arguments_raise(tiny_model, support, queries, options, message):
    with pytest.raises(ValueError, match=message):
        classify(tiny_model, support, queries, **options)
