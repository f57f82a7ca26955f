import pytest
import torch
from attrs import evolve
from tiny import MODEL, SETS, TRAIN, FakeClock, digits, trainer

from bruno import Bruno
from bruno.config import TrainConfig
from bruno.training.clock import Clock
from bruno.training.step_cost import (
    ElementCost,
    affordable_elements,
    few_steps_warning,
    measure_cost,
    suitable_steps,
    with_elements,
)

SHARED = TrainConfig(discriminative=1.0, shared=True, episodes=3, way=20, shot=1, queries=19)
CONFIGS = [SETS, TRAIN, SHARED, evolve(TRAIN, generative=0.0), TrainConfig()]


@pytest.mark.parametrize("most", [1, 7, 50, 333, 10**6])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_is_as_large_as_is_affordable(config, most):
    smaller = with_elements(config, most)
    least = evolve(config, batch=1, set_size=2, episodes=1, way=2, queries=1)
    assert min(config.elements, least.elements) <= smaller.elements <= max(most, least.elements)
    assert with_elements(config, config.elements) == config
    if smaller.elements < config.elements:
        assert smaller.elements > min(most, config.elements) / 4  # not needlessly small


def test_sets_and_episodes_become_fewer_before_they_become_smaller():
    assert with_elements(SHARED, 500) == evolve(SHARED, episodes=1)
    assert with_elements(SHARED, 150) == evolve(SHARED, episodes=1, queries=6)
    assert with_elements(SHARED, 10) == evolve(SHARED, episodes=1, queries=1, way=5)
    assert with_elements(SHARED, 10, fixed={"way"}) == evolve(SHARED, episodes=1, queries=1)
    assert with_elements(TrainConfig(), 70) == evolve(TrainConfig(), batch=3)


def test_time_and_memory_limit_a_step():
    quick, small = 1e-6, 1.0
    assert affordable_elements(ElementCost(quick, small), 4.0) == affordable_elements(
        ElementCost(quick, small), 0.0
    )
    slow = affordable_elements(ElementCost(0.01, small), 4.0)
    assert 100 * slow * 0.01 < 240 < 200 * slow * 0.01
    assert affordable_elements(ElementCost(0.01, small), 0.0) > slow
    assert affordable_elements(ElementCost(quick, 2.0**23), 0.0) * 2**23 < 2**30
    assert affordable_elements(ElementCost(1e9, 2.0**40), 1.0) == 40


def test_the_cost_of_an_element_is_its_share_of_the_time_and_of_the_activations():
    ticks = iter(range(100))
    model, generator = Bruno.from_config(MODEL), torch.Generator().manual_seed(0)
    costs = [
        measure_cost(model, digits().sets(n, 5, generator), generator, lambda: float(next(ticks)))
        for n in (4, 8)
    ]
    assert costs[0].seconds == pytest.approx(1 / 20)
    assert costs[1].seconds == pytest.approx(1 / 40)
    assert costs[0].memory == pytest.approx(costs[1].memory, rel=0.5)
    assert costs[0].memory > 4 * 64  # at least the element itself
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("config", CONFIGS)
def test_a_run_with_too_few_steps_is_given_settings_that_allow_enough(config):
    config = evolve(config, minutes=4.0)
    assert few_steps_warning(config, 100, 2.4) == ""
    note = few_steps_warning(config, 40, 6.0)
    assert "4 minutes" in note
    assert "40 steps" in note
    assert "10 minutes" in note
    assert "train." in note


def notes(config: TrainConfig, **options) -> dict[int, str]:
    """The notes of the first steps of a timed run whose steps take a second each, by step."""
    current = trainer(config)
    clock = Clock(current, FakeClock(current, **options))
    seen = {}
    for _ in range(6):
        entry = clock.advance(1)
        if entry.note:
            seen[entry.index] = entry.note
    return seen


def test_a_timed_run_warns_after_its_first_steps_once():
    assert list(notes(evolve(SETS, minutes=1.0))) == [3]
    assert list(notes(evolve(SETS, minutes=0.2))) == [1]  # a step takes a twelfth of the time
    assert notes(evolve(SETS, minutes=2.0), first=5.0) == {}  # only the first step is slow
    assert notes(evolve(SETS, steps=6)) == {}


def test_the_estimate_of_the_steps_is_that_of_the_whole_run():
    (note,) = notes(evolve(SETS, minutes=1.0)).values()
    assert "60 steps of 1 s" in note
    assert "train.batch=2" in note  # instead of 4


def test_validation_sets_choose_the_length_of_a_run():
    tried = []

    def run_of(steps: int):
        tried.append(steps)
        return trainer(evolve(SETS, steps=steps))

    bits = {1: 3.0, 2: 1.0, 6: 2.0, 20: float("nan")}
    assert suitable_steps(run_of, lambda model: bits[tried[-1]], 20) == 2
    assert tried == [1, 2, 6, 20]
