import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from bruno import Bruno, FlowConfig, ModelConfig
from bruno.data.examples import concatenate
from bruno.tasks.generation import (
    draw_samples,
    prior_samples,
    samples_by_prefix,
    spread_by_repeats,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def digits(learnt_digits, unseen_digits):
    """All ten digits."""
    return concatenate([learnt_digits, unseen_digits])


@pytest.fixture(scope="session")
def judge(digits):
    """A k-NN classifier of pixels, independent of the model."""
    return KNeighborsClassifier(5).fit(digits.elements.flatten(1).numpy(), digits.labels.numpy())


def judged(judge, images: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(judge.predict(images.reshape(-1, 64).numpy())).view(images.shape[:-3])


# --- samples ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [0, 3, 6, 8])  # the digits 0, 4, 9 and, unseen, 5
def test_samples_given_a_class_are_classified_as_it_far_more_often_than_by_chance(
    digits_model, digits, judge, label
):
    x = digits.elements[digits.labels == label][:20]
    drawn = draw_samples(digits_model.condition(x), 100, generator=seeded(), temperature=0.7).images
    share = (judged(judge, drawn) == label).double().mean().item()
    assert share > 5 / 10
    prior = prior_samples(digits_model, 100, generator=seeded(), temperature=0.7).images
    assert share > (judged(judge, prior) == label).double().mean().item() + 0.2


def test_prior_samples_belong_to_several_classes(digits_model, judge):
    counts = torch.bincount(judged(judge, prior_samples(digits_model, 200, generator=seeded()).images))
    assert (counts > 5).sum() >= 4


def test_more_evidence_of_a_class_gives_more_samples_of_it(digits_model, digits, judge):
    share = torch.zeros(21)
    for label in range(10):
        x = digits.elements[digits.labels == label][:20]
        found = samples_by_prefix(digits_model, x, 30, generator=seeded(label), temperature=0.7)
        assert found.lengths == tuple(range(21))
        share += (judged(judge, found.samples.images) == label).float().mean(1) / 10
    assert share[0] < 0.2
    assert share[1] > share[0] + 0.1
    assert share[-5:].mean() > share[1] + 0.05


def test_each_prefix_conditions_on_exactly_its_elements(digits_model, learnt_digits):
    x = learnt_digits.elements[:6]
    found = samples_by_prefix(digits_model, x, 2, temperature=0.0)
    for length, samples in zip(found.lengths, found.samples.x, strict=True):
        known = digits_model.condition(x[:length]) if length else digits_model.prior()
        expected = known.sample(2, temperature=0.0).x
        torch.testing.assert_close(samples, expected, rtol=1e-3, atol=0.02)


def test_chosen_prefixes_give_the_samples_they_have_among_all(digits_model, learnt_digits):
    x = learnt_digits.elements[:6]
    every = samples_by_prefix(digits_model, x, 1, temperature=0.0).samples.x
    some = samples_by_prefix(digits_model, x, 1, lengths=(6, 0, 3), temperature=0.0)
    assert some.lengths == (6, 0, 3)
    torch.testing.assert_close(some.samples.x, every[[6, 0, 3]], rtol=1e-3, atol=0.02)


def test_the_generator_also_draws_the_noise_of_the_set(digits_model, learnt_digits):
    x = learnt_digits.elements[:6]
    noisy, other, same = (
        samples_by_prefix(digits_model, x, 1, generator=seeded(seed), temperature=0.0).samples.x
        for seed in (0, 1, 0)
    )
    assert torch.equal(noisy, same)
    assert torch.equal(noisy[0], other[0])  # given no elements
    assert not torch.equal(noisy[1:], other[1:])


def test_the_order_of_the_set_makes_no_difference(digits_model, learnt_digits):
    x = learnt_digits.elements[:12] + 0.5  # without noise
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


def test_a_lower_temperature_draws_samples_that_differ_less(digits_model, learnt_digits):
    known = digits_model.condition(learnt_digits.elements[learnt_digits.labels == 2][:10])
    spread = [
        draw_samples(known, 100, generator=seeded(), temperature=t).x.var(0).mean()
        for t in (0.0, 0.3, 0.7, 1.0)
    ]
    assert spread == sorted(spread)
    assert spread[0] < 1e-6 < spread[1] < spread[3] / 1.5


def test_every_set_of_a_batch_has_its_own_samples(digits_model, learnt_digits):
    sets = torch.stack([learnt_digits.elements[learnt_digits.labels == c][:8] for c in range(6)]).unflatten(
        0, (2, 3)
    )
    drawn = draw_samples(digits_model.condition(sets), 7, temperature=0.0, batch_size=4)
    assert drawn.x.shape == (2, 3, 7, 1, 8, 8)
    alone = draw_samples(digits_model.condition(sets[1, 2]), 1, temperature=0.0)
    torch.testing.assert_close(drawn.x[1, 2], alone.x.expand(7, 1, 8, 8), rtol=1e-3, atol=0.02)


def test_prefixes_of_several_sets_equal_prefixes_of_each_set(digits_model, learnt_digits):
    sets = torch.stack([learnt_digits.elements[learnt_digits.labels == c][:4] for c in range(3)])
    found = samples_by_prefix(digits_model, sets, 2, lengths=(0, 1, 4), temperature=0.0)
    assert torch.equal(found.inputs, sets)
    assert found.samples.x.shape == (3, 3, 2, 1, 8, 8)
    for x, samples in zip(sets, found.samples.x, strict=True):
        alone = samples_by_prefix(digits_model, x, 2, lengths=(0, 1, 4), temperature=0.0)
        torch.testing.assert_close(samples, alone.samples.x, rtol=1e-3, atol=0.02)


# --- large sets -------------------------------------------------------------------------------------------


def test_a_set_of_500_is_encoded_and_decoded_in_batches(digits_model, learnt_digits, monkeypatch):
    x = learnt_digits.elements[:500]
    sizes = []
    flow, inverse = digits_model.flow.forward, digits_model.flow.inverse

    def watched(way):
        return lambda batch: (sizes.append(len(batch)), way(batch))[1]

    monkeypatch.setitem(vars(digits_model.flow), "forward", watched(flow))
    monkeypatch.setitem(vars(digits_model.flow), "inverse", watched(inverse))
    found = samples_by_prefix(digits_model, x, 5, lengths=range(480, 501), generator=seeded(), batch_size=32)
    assert max(sizes) == 32
    assert found.samples.x.shape == (21, 5, 1, 8, 8)
    assert found.samples.x.isfinite().all()


# --- repeated elements ------------------------------------------------------------------------------------


def test_samples_differ_less_the_more_often_an_image_is_seen(digits_model, unseen_digits):
    x = unseen_digits.elements[[3, 40, 200]]
    found = spread_by_repeats(digits_model, x, generator=seeded())
    assert found.repeats == (1, 2, 5, 10, 20)
    assert torch.equal(found.inputs, x)
    assert found.samples.x.shape == (3, 5, 100, 1, 8, 8)
    for by_repeats in (*found.by_element, found.variance):
        assert list(by_repeats) == sorted(by_repeats, reverse=True)
        assert by_repeats[-1] < 0.9 * by_repeats[0]
    scaled = found.samples.x.double() / digits_model.levels
    assert found.by_element[1][2] == pytest.approx(scaled[1, 2].var(0).mean().item())


def test_the_variance_of_several_elements_is_their_mean(digits_model, unseen_digits):
    found = spread_by_repeats(digits_model, unseen_digits.elements[:4], (1, 3), samples=5)
    assert found.variance == pytest.approx(
        [sum(column) / 4 for column in zip(*found.by_element, strict=True)]
    )


def test_repeats_equal_a_set_of_copies(digits_model, unseen_digits):
    image = unseen_digits.elements[3]
    found = spread_by_repeats(digits_model, image.unsqueeze(0), (4,), samples=2, temperature=0.0)
    copies = digits_model.condition(image.expand(4, 1, 8, 8))
    expected = draw_samples(copies, 2, temperature=0.0).x
    torch.testing.assert_close(found.samples.x[0, 0], expected, rtol=1e-3, atol=0.02)


def test_the_spread_of_rows_is_in_standard_deviations_of_the_training_data():
    rows = torch.randn(50, 2) * torch.tensor([1.0, 1000.0])
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    model.initialise(rows)
    found = spread_by_repeats(model, rows[:1], (1,), generator=seeded())
    expected = (found.samples.x[0, 0] / rows.std(0)).var(0).mean().item()
    assert found.variance[0] == pytest.approx(expected, rel=0.1)


# --- errors -----------------------------------------------------------------------------------------------

IMAGES = torch.zeros((3, 1, 8, 8), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: prior_samples(m, 0), r"`samples` .*1; got 0"),
        (lambda m: prior_samples(m, 1, temperature=-1.0), r"`temperature` .*0; got -1.0"),
        (lambda m: samples_by_prefix(m, IMAGES[0], 1), r"`x` .*, n, 1, 8, 8\).*got shape \(1, 8, 8\)"),
        (lambda m: samples_by_prefix(m, IMAGES[:0], 1), r"`x` .*got shape \(0, .*`prior_samples`"),
        (lambda m: samples_by_prefix(m, IMAGES[..., :7], 1), r"`x` .*got \(3, 1, 8, 7\)"),
        (lambda m: samples_by_prefix(m, IMAGES, 1, lengths=(1, 4)), r"`lengths` .* 3.*got \(1, 4\)"),
        (lambda m: samples_by_prefix(m, IMAGES, 1, lengths=()), r"`lengths` .*; got \(\)"),
        (lambda m: spread_by_repeats(m, IMAGES[0]), r"`x` .*got shape \(1, 8, 8\).*unsqueeze"),
        (lambda m: spread_by_repeats(m, IMAGES, (1, 0)), r"`repeats` .*got \(1, 0\)"),
        (lambda m: spread_by_repeats(m, IMAGES, samples=1), r"`samples` .*2.*; got 1"),
    ],
)
def test_invalid_arguments_raise(digits_model, ask, message):
    with pytest.raises(ValueError, match=message):
        ask(digits_model)


@pytest.mark.parametrize("samples", [10**9, 10**15])
def test_more_samples_than_fit_into_memory_are_rejected(samples, monkeypatch):
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=rf"`samples` .*got {samples}.*BRUNO_MAX_COUNT.* 1000000"):
        prior_samples(model, samples)
    monkeypatch.setenv("BRUNO_MAX_COUNT", str(10**16))
    with pytest.raises(ValueError, match=rf"`samples` .*needs .* for {samples}; .*BRUNO_MAX_MEMORY"):
        prior_samples(model, samples)
