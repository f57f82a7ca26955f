import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bruno.config import TrainConfig
from bruno.training.schedule import augmentation_factor, cross_entropy_weight, learning_rate_factor

DECAYS = ("linear", "cosine", "exponential", "none")
fractions = st.floats(0, 1)
settings = st.fixed_dictionaries(
    {
        "warmup": st.floats(0, 0.99),
        "decay": st.sampled_from(DECAYS),
        "final_learning_rate": st.floats(1e-6, 0.99),
        "fade": st.just(0.0) | st.floats(1e-3, 1),
        "discriminative": st.just(0.5),
        "onset": st.floats(0, 0.99),
    }
)


@given(settings, fractions)
def test_factors_are_from_0_to_1(settings, progress):
    config = TrainConfig(**settings)
    assert 0 <= learning_rate_factor(config, progress) <= 1
    assert 0 <= augmentation_factor(config, progress) <= 1
    assert cross_entropy_weight(config, progress) in (0, 0.5)


@given(settings)
def test_the_learning_rate_is_continuous_where_warm_up_ends(settings):
    config = TrainConfig(**settings)
    assert learning_rate_factor(config, config.warmup) == pytest.approx(1)
    assert learning_rate_factor(config, config.warmup * (1 - 1e-9)) == pytest.approx(1)
    assert learning_rate_factor(config, config.warmup + 1e-9) == pytest.approx(1, abs=1e-5)


@given(settings)
def test_the_learning_rate_starts_at_0_and_ends_at_its_final_value(settings):
    config = TrainConfig(**settings)
    if config.warmup:
        assert learning_rate_factor(config, 0.0) == 0
    end = 1.0 if config.decay == "none" else config.final_learning_rate
    assert learning_rate_factor(config, 1.0) == pytest.approx(end, abs=1e-9)


@given(settings, fractions, fractions)
def test_the_learning_rate_rises_during_warm_up_and_never_after_it(settings, one, other):
    config = TrainConfig(**settings)
    earlier, later = sorted((one, other))
    factors = [learning_rate_factor(config, progress) for progress in (earlier, later)]
    if later < config.warmup:
        assert factors[0] <= factors[1]
    elif earlier >= config.warmup:
        assert factors[0] >= factors[1] - 1e-12


@given(settings)
def test_augmentation_is_continuous_where_it_starts_to_fade(settings):
    config = TrainConfig(**settings)
    if config.fade:
        assert augmentation_factor(config, 1 - config.fade) == pytest.approx(1)
        assert augmentation_factor(config, 1.0) == 0
    else:
        assert augmentation_factor(config, 1.0) == 1


def test_values_halfway_through_the_decay():
    halves = {
        decay: learning_rate_factor(TrainConfig(warmup=0.0, decay=decay, final_learning_rate=0.04), 0.5)
        for decay in DECAYS
    }
    assert halves == pytest.approx({"linear": 0.52, "cosine": 0.52, "exponential": 0.2, "none": 1.0})
    early = learning_rate_factor(TrainConfig(warmup=0.0, decay="cosine", final_learning_rate=0.0), 0.25)
    assert early == pytest.approx((1 + 0.5**0.5) / 2)


def test_augmentation_fades_linearly_over_the_last_fraction_of_a_run():
    late = TrainConfig(fade=0.2)
    assert [augmentation_factor(late, p) for p in (0.0, 0.5, 0.79)] == [1, 1, 1]
    assert augmentation_factor(late, 0.9) == pytest.approx(0.5)
    assert augmentation_factor(TrainConfig(), 0.25) == 0.75


def test_cross_entropy_counts_from_its_onset():
    config = TrainConfig(discriminative=0.5, onset=0.3)
    weights = [cross_entropy_weight(config, i / 10) for i in range(11)]
    assert weights == 3 * [0] + 8 * [0.5]
    assert all(a <= b for a, b in itertools.pairwise(weights))
