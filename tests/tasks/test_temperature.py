import math
from dataclasses import replace

import pytest
import torch
from tasks.machines import machine_model, machines

from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.tasks.classification import classify
from bruno.tasks.episodes import FewShotProtocol, draw_episodes
from bruno.tasks.few_shot import episode_scores
from bruno.tasks.groups import Groups
from bruno.tasks.metrics import calibration_error, log_loss
from bruno.tasks.temperature import best_temperature, fit_temperature, fit_temperature_to_groups


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def halves(unseen_digits: Examples) -> tuple[Examples, Examples]:
    """The unseen digits, in two halves that share no image."""
    return tuple(
        replace(unseen_digits, elements=unseen_digits.elements[part], labels=unseen_digits.labels[part])
        for part in (slice(0, None, 2), slice(1, None, 2))
    )


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


@pytest.mark.parametrize("views", [False, True])
def test_a_temperature_is_fitted_to_the_log_scores_of_classify(digits_model, unseen_digits, views):
    protocol = FewShotProtocol((3,), (2,), trials=2, noise=False, views=views)
    found = episode_scores(digits_model, unseen_digits, protocol, generator=seeded())
    seeds, sampler = torch.randint(2**62, (2, 2), generator=seeded())[:, 0], SetSampler(unseen_digits)
    expected = [
        classify(
            digits_model, list(map(sampler.at, support)), sampler.at(query.unsqueeze(0)), views=views
        ).log_scores
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


@pytest.mark.parametrize(("least", "misses"), [(40.0, [-0.5]), (10.0, [-0.2, -0.4]), (5.0, [-0.01])])
def test_few_mistakes_hardly_move_the_temperature(least, misses):
    right = least + 20 * torch.rand(600, generator=seeded())
    log_scores = torch.stack([torch.cat([right, torch.tensor(misses)]), torch.zeros(600 + len(misses))], 1)
    labels = torch.zeros(len(log_scores), dtype=torch.long)
    fitted = best_temperature(labels, log_scores, spread=math.inf)
    assert not 0.75 < fitted < 1.3
    assert abs(math.log(best_temperature(labels, log_scores))) < 0.5 * abs(math.log(fitted))


def test_a_temperature_fitted_to_no_or_only_mistakes_is_bounded():
    scores = torch.tensor([[5.0, 0.0], [3.0, 1.0]])
    right, wrong = torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.long)
    assert best_temperature(right, scores, spread=math.inf) == pytest.approx(1e-3)
    assert best_temperature(wrong, scores, spread=math.inf) == pytest.approx(1e6)
    assert log_loss(wrong, scores, 1e6) == pytest.approx(math.log(2), rel=1e-4)


def test_a_temperature_is_fitted_to_encoded_groups():
    model, data = machine_model(), machines(12, 20, seed=1)
    groups = Groups.of(model, data, generator=seeded())
    found = fit_temperature_to_groups(model, groups, way=8, shot=1, generator=seeded())
    assert (found.episodes, found.mistakes > 0) == (600, True)
    assert found.log_loss <= found.log_loss_before
    apart = replace(groups, latents=0.01 * groups.latents + groups.labels.unsqueeze(1) / 12)
    easy = fit_temperature_to_groups(model, apart, way=2, shot=9, generator=seeded(), episodes=50)
    assert (easy.mistakes, easy.temperature) == (0, 1.0)
    assert fit_temperature_to_groups(model, groups, way=2, shot=20, generator=seeded()) is None
