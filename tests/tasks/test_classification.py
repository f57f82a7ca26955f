import math

import pytest
import torch
from tasks.machines import machine_model, machines, with_holes

from bruno.data import Examples
from bruno.tasks.calibration import GroupCalibration, fixed_cutoffs
from bruno.tasks.classification import classify, with_p_values
from bruno.tasks.groups import Groups


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


def test_views_change_the_probabilities_and_keep_the_scores_of_p_values(digits_model, unseen_digits):
    images = unseen_digits.elements
    plain, views = (classify(digits_model, [images[:3], images[3:7]], images[7:12], views=v) for v in (0, 1))
    assert not torch.allclose(plain.log_scores, views.log_scores, rtol=0.01)
    assert torch.equal(plain.scores, views.scores)
    assert torch.equal(plain.log_prob, views.log_prob)


def test_a_classification_carries_the_names_of_classes_and_queries(digits_model, unseen_digits):
    support = {name: of_class(unseen_digits, label)[: label + 2] for label, name in enumerate("abc")}
    queries = unseen_digits.elements[30:32]
    found = classify(digits_model, support, queries, names=["x.png", "y.png"], temperature=2.0)
    assert (found.classes, found.names) == (("a", "b", "c"), ("x.png", "y.png"))
    assert (found.support, found.temperature) == ((2, 3, 4), 2.0)
    unnamed = classify(digits_model, list(support.values()), queries, temperature=2.0)
    assert torch.equal(unnamed.probabilities, found.probabilities)
    assert (unnamed.classes, unnamed.names) == (("1", "2", "3"), ("1", "2"))


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


# --- missing numbers and calibrations --------------------------------------------------------------------


def test_missing_numbers_are_imputed_given_each_class():
    model, data = machine_model("impute"), machines(4, 30, seed=1)
    x = data.elements.view(4, 30, -1)
    support, queries = {str(i): x[i, :10] for i in range(4)}, with_holes(x[:, 10:].flatten(0, 1), 0.4)
    found = classify(model, support, queries)
    labels = torch.arange(4).repeat_interleave(20)
    by_prior = classify(model, support, model.prior().impute(queries))
    right, others = ((one.labels == labels).double().mean() for one in (found, by_prior))
    assert right > 0.8
    assert right > others
    posteriors = model.condition(torch.stack(list(support.values())))
    incomplete = queries.isnan().any(1)
    expected = posteriors.log_prob(queries[incomplete].unsqueeze(1))
    torch.testing.assert_close(found.log_scores[incomplete], expected, rtol=1e-4, atol=1e-3)


def test_complete_queries_have_the_same_scores_beside_incomplete_ones():
    model, data = machine_model("impute"), machines(2, 20, seed=1)
    x = data.elements.view(2, 20, -1)
    support, queries = [x[0, :10], x[1, :10]], x[:, 10:].flatten(0, 1).clone()
    alone = classify(model, support, queries)
    queries[0, 0] = math.nan
    mixed = classify(model, support, queries)
    torch.testing.assert_close(mixed.log_scores[1:], alone.log_scores[1:])
    torch.testing.assert_close(mixed.scores[1:], alone.scores[1:])


@pytest.mark.slow
def test_queries_with_missing_numbers_are_rejected_at_most_as_often_as_requested():
    """A query of a class is called none of these at most as often as requested, complete or not."""
    model, data = machine_model("impute"), machines(40, 20, seed=1)
    other, groups = (Groups.of(model, machines(40, 20, seed=seed), generator=seeded()) for seed in (2, 3))
    calibration = GroupCalibration(model, groups, fixed_cutoffs(model, other), -math.inf, "", True)
    x = data.elements.view(40, 20, -1)
    support, labels = [some[:8] for some in x], torch.arange(40).repeat_interleave(12)
    for missing in (0.0, 0.2):
        queries = with_holes(x[:, 8:].flatten(0, 1), missing)
        found = with_p_values(classify(model, support, queries), calibration, 0.1)
        rejected = (found.p[torch.arange(len(labels)), labels] <= 0.1).double().view(40, 12).mean(1)
        assert rejected.mean() < 0.1 + 3 * rejected.std() / math.sqrt(40)
        assert found.none_of_these.double().mean() <= rejected.mean()
