from attrs import evolve
from tiny import SETS, TRAIN, FakeClock, trainer

from bruno.training.clock import Clock
from bruno.training.run import Run

MINUTE = evolve(SETS, minutes=1.0, warmup=0.0, decay="linear")


def entries(config, **options):
    """All log entries of a run whose steps take a second each."""
    current = trainer(config)
    clock = Clock(current, FakeClock(current, **options))
    while not clock.done():
        yield clock.advance(1)


def test_a_timed_run_ends_on_time():
    seen = list(entries(MINUTE))
    assert [entry.seconds for entry in seen] == list(range(1, 61))
    assert [entry.seconds_left for entry in seen] == list(range(59, -1, -1))
    assert seen[0].rate > 0.9 * MINUTE.learning_rate
    assert 0 < seen[-1].rate < 0.1 * MINUTE.learning_rate


def test_a_run_of_steps_ends_after_these_and_estimates_the_time_left():
    seen = list(entries(SETS, first=3.0))
    assert [entry.index for entry in seen] == [1, 2, 3, 4]
    assert [entry.seconds for entry in seen] == [3, 4, 5, 6]
    assert [entry.seconds_left for entry in seen] == [9, 2, 1, 0]  # the first step counts only at first
    assert [entry.step_seconds for entry in seen] == [3, 1, 1, 1]
    assert [entry.elements_per_second for entry in seen[1:]] == 3 * [SETS.elements]


def test_episodes_count_as_elements_from_the_onset_of_cross_entropy():
    config = evolve(TRAIN, steps=4, onset=0.5)
    speeds = [entry.elements_per_second for entry in entries(config)]
    assert speeds == 2 * [SETS.elements] + 2 * [config.elements]
    assert config.elements > SETS.elements


def test_no_more_steps_are_taken_than_are_left():
    current = trainer(SETS)
    clock = Clock(current, FakeClock(current))
    assert [clock.advance(3).index for _ in range(2)] == [3, 4]


def test_a_timed_run_takes_no_step_at_a_learning_rate_of_0():
    assert min(entry.rate for entry in entries(evolve(MINUTE, warmup=0.5))) > 0


def test_compilation_time_does_not_count_as_warm_up():
    config = evolve(MINUTE, warmup=0.2, decay="none")
    seen = list(entries(config, first=24.0))  # twice the time of the warm-up
    assert seen[1].rate < 0.2 * config.learning_rate
    assert sum(entry.rate < config.learning_rate for entry in seen) == 2 + int(
        0.2 * 36
    )  # a fifth of the time after it
    assert seen[-1].rate == config.learning_rate
    assert seen[-1].seconds == 60


def test_a_resumed_timed_run_trains_for_the_remaining_time(tmp_path):
    current = trainer(MINUTE)
    for entry in Run(tmp_path).train(current, save_every=10.5, now=FakeClock(current)):
        if entry.seconds == 55:  # just saved
            break
    resumed = trainer(MINUTE)
    assert Run(tmp_path).resume(resumed)
    assert resumed.seconds == 55
    rest = list(Run(tmp_path).train(resumed, now=FakeClock(resumed)))
    assert [entry.seconds for entry in rest] == [56, 57, 58, 59, 60]
    assert rest[0].rate < 0.1 * MINUTE.learning_rate
