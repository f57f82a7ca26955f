import itertools

import pytest
import torch
from attrs import evolve

from bruno import Bruno, FlowConfig, ModelConfig, ProcessConfig
from bruno.config import TrainConfig, from_dict
from bruno.data import Examples, load_examples
from bruno.data.sampling import SetSampler
from bruno.training.objective import Objective, episode_log_probs
from bruno.training.schedule import augmentation_factor, learning_rate_factor, make_optimiser
from bruno.training.trainer import Trainer, train_steps

TINY = ModelConfig(
    (1, 8, 8), flow=FlowConfig("dense", couplings=4, units=32), process=ProcessConfig(dof=50.0)
)


@pytest.fixture(scope="module")
def sampler():
    return SetSampler(load_examples("digits"))


def fresh(config: ModelConfig = TINY) -> Bruno:
    torch.manual_seed(0)
    return Bruno.from_config(config)


@pytest.mark.parametrize("process", ["student-t", "gaussian"])
@pytest.mark.parametrize("optimiser", ["adamw", "adam", "rmsprop"])
def test_bits_fall(sampler, process, optimiser):
    model = fresh(ModelConfig((1, 8, 8), flow=TINY.flow, process=ProcessConfig(process)))
    steps = list(
        train_steps(
            model, sampler, TrainConfig(steps=60, batch=8, set_size=6, optimiser=optimiser, clip=10.0)
        )
    )
    bits = [step.bits_per_dim for step in steps]
    assert sum(bits[-10:]) / 10 < sum(bits[:5]) / 5 - 0.3
    assert not any(step.skipped for step in steps)
    assert [step.index for step in steps] == list(range(1, 61))


def test_episodes_alone_need_no_sets_of_the_length(sampler):
    few = load_examples("digits")
    few = few.of_classes(range(3))
    keep = torch.cat([torch.where(few.labels == label)[0][:4] for label in range(3)])
    small = SetSampler(Examples(few.elements[keep], few.labels[keep], few.names, levels=few.levels))
    config = TrainConfig(steps=2, generative=0.0, discriminative=1.0, episodes=2, way=3, shot=2, set_size=20)
    model = fresh(ModelConfig((1, 8, 8), levels=17, flow=TINY.flow))
    assert [step.skipped for step in train_steps(model, small, config)] == [False, False]


@pytest.mark.slow
def test_episodes_teach_to_tell_classes_apart(sampler):
    model = fresh()
    config = TrainConfig(steps=150, generative=0.0, discriminative=1.0, episodes=8, way=5, shot=2, rate=2e-3)
    steps = list(train_steps(model, sampler, config))
    accuracy = [step.accuracy for step in steps]
    assert sum(accuracy[:10]) / 10 < sum(accuracy[-20:]) / 20 - 0.1
    assert sum(accuracy[-20:]) / 20 > 0.7


def test_episode_scores_are_those_of_posteriors(sampler):
    model = fresh().double()
    tasks = sampler.tasks(3, 4, 5, torch.Generator().manual_seed(0))
    scores = episode_log_probs(model.process, model.encode(tasks).z, 2)
    assert scores.shape == (3, 4, 3, 4)
    posterior = model.condition(tasks[1, :, :2])
    expected = posterior.score(tasks[1, :, 2:].unsqueeze(2))
    difference = scores[1] - expected  # the prior of a query is the same under every class
    torch.testing.assert_close(difference, difference[..., :1].expand(4, 3, 4))


def test_shared_images_count_for_both_losses(sampler):
    config = TrainConfig(discriminative=0.5, episodes=2, way=3, shot=2, queries=4, shared=True)
    assert config.elements == 36
    trainer = Trainer(fresh(), sampler, config)
    sets, tasks = trainer._draw()
    assert sets is None
    weight = torch.tensor(0.5)
    loss, bits, accuracy = Objective(trainer.model, config, weight)(None, tasks)
    alone = evolve(config, shared=False)
    expected, *_ = Objective(trainer.model, alone, weight)(tasks.flatten(0, 1), tasks)
    torch.testing.assert_close(loss, expected)
    assert loss > bits
    assert 0 <= accuracy <= 1


def test_both_losses_add_up_by_their_weights(sampler):
    model = fresh()
    config = TrainConfig(steps=3, batch=4, set_size=5, generative=0.7, discriminative=0.5, episodes=2, way=3)
    for step in train_steps(model, sampler, config):
        assert step.bits_per_dim > 0
        assert 0 <= step.accuracy <= 1
        assert step.loss > 0.7 * step.bits_per_dim
    trainer = Trainer(model, sampler, config)
    sets, tasks = trainer._draw()
    loss, bits, _ = Objective(model, config, torch.tensor(0.5))(sets, tasks)
    scores = episode_log_probs(model.process, model.encode(tasks).z, config.shot)
    error = -scores.log_softmax(3).diagonal(dim1=1, dim2=3).mean()  # of class i under class i
    torch.testing.assert_close(bits, model.bits_per_dim(model.log_prob(sets)).mean())
    torch.testing.assert_close(loss, 0.7 * bits + 0.5 * error)


def test_gradients_are_clipped(sampler):
    for clip in (1e-3, 0.0):
        trainer = Trainer(fresh(), sampler, TrainConfig(steps=1, batch=4, set_size=5, clip=clip))
        before = trainer.step().gradient_norm
        after = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item()
        assert after == pytest.approx(clip or before, rel=1e-3)
        assert before > 1e-2


def test_cross_entropy_counts_from_its_onset_on(sampler):
    plan = {"steps": 6, "batch": 4, "set_size": 5, "episodes": 2, "way": 3}
    config = TrainConfig(**plan, discriminative=0.5, onset=0.5)
    steps = list(train_steps(fresh(), sampler, config))
    assert [step.loss > step.bits_per_dim for step in steps] == 3 * [False] + 3 * [True]
    assert all(0 <= step.accuracy <= 1 for step in steps)  # it is told all along
    models = fresh(), fresh()
    list(train_steps(models[0], sampler, evolve(config, steps=2, onset=0.9)))
    list(train_steps(models[1], sampler, evolve(config, steps=2, discriminative=1e-30)))
    assert models[0].fingerprint() == models[1].fingerprint()
    with pytest.raises(ValueError, match=r"`train.onset` needs a weight of bits/dim above 0.*got 0.5"):
        evolve(config, generative=0.0)
    with pytest.raises(ValueError, match=r"`train.onset` must be from 0 up to 1; got 1.0"):
        evolve(config, onset=1.0)


def test_the_same_seed_trains_the_same_model(sampler):
    prints = []
    for seed in (1, 1, 2):
        model = fresh()
        list(train_steps(model, sampler, TrainConfig(steps=4, batch=4, set_size=5, seed=seed)))
        prints.append(model.fingerprint())
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("optimiser", ["adamw", "adam", "rmsprop"])
def test_a_step_that_is_not_finite_changes_nothing(sampler, optimiser):
    model = fresh()
    run = train_steps(
        model, sampler, TrainConfig(steps=3, batch=4, set_size=5, optimiser=optimiser, clip=1.0)
    )
    next(run)
    with torch.no_grad():
        model.flow.bijections[1].bound.fill_(torch.nan)
    before = model.fingerprint()
    step = next(run)
    assert step.skipped
    assert model.fingerprint() == before
    with torch.no_grad():
        model.flow.bijections[1].bound.fill_(1.0)
    assert not next(run).skipped


def test_the_process_has_a_rate_of_its_own():
    model = fresh()
    flow, process = make_optimiser(
        model, TrainConfig(rate=1e-2, process_rate=0.1, weight_decay=0.3)
    ).param_groups
    assert flow["rate"] == 1e-2
    assert process["rate"] == pytest.approx(1e-3)
    assert (flow["weight_decay"], process["weight_decay"]) == (0.3, 0.0)
    assert len(flow["params"]) + len(process["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("decay", ["linear", "cosine", "exponential", "none"])
def test_the_rate_rises_then_falls(decay):
    config = TrainConfig(warmup=0.1, decay=decay, final_rate=0.01)
    rates = [learning_rate_factor(config, i / 100) for i in range(101)]
    assert rates[0] == 0
    assert rates[10] == pytest.approx(1)
    assert all(a <= b for a, b in itertools.pairwise(rates[:11]))
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(1.0 if decay == "none" else 0.01)


def test_half_way_through_the_decay():
    halves = {
        decay: learning_rate_factor(TrainConfig(warmup=0.0, decay=decay, final_rate=0.04), 0.5)
        for decay in ("linear", "cosine", "exponential", "none")
    }
    assert halves == pytest.approx({"linear": 0.52, "cosine": 0.52, "exponential": 0.2, "none": 1.0})
    early = learning_rate_factor(TrainConfig(warmup=0.0, decay="cosine", final_rate=0.0), 0.25)
    assert early == pytest.approx((1 + 0.5**0.5) / 2)


def test_a_state_can_be_gone_back_to_again_and_again(sampler):
    trainer = Trainer(fresh(), sampler, TrainConfig(steps=9, batch=4, set_size=5, ema=0.9))
    trainer.advance(3)
    state = trainer.state()
    losses = []
    for _ in range(2):
        trainer.restore(state)
        losses.append([step.loss for step in trainer.advance(3)])
    assert losses[0] == losses[1]


def test_averages_of_large_numbers_that_no_step_changes_stay_what_they_are(sampler):
    rows = 1.7e9 + 1e4 * torch.randn(60, 2).double()
    model = fresh(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    of_rows = SetSampler(Examples(rows, torch.arange(60) % 6, tuple("abcdef")))
    trainer = Trainer(model, of_rows, TrainConfig(steps=9, batch=4, set_size=5, ema=0.9))
    trainer.advance(1)
    assert torch.equal(trainer.trained().preprocessing.mean, model.preprocessing.mean)


def test_distortions_fade_over_the_last_share_of_a_run():
    late = TrainConfig(fade=0.2)
    assert [augmentation_factor(late, p) for p in (0.0, 0.5, 0.79)] == [1, 1, 1]
    assert augmentation_factor(late, 0.9) == pytest.approx(0.5)
    assert [augmentation_factor(config, 1.0) for config in (late, TrainConfig(), TrainConfig(fade=0.0))] == [
        0,
        0,
        1,
    ]
    assert augmentation_factor(TrainConfig(), 0.25) == 0.75


def test_no_step_is_wasted_at_a_rate_of_zero(sampler):
    rates = [
        step.rate
        for step in train_steps(fresh(), sampler, TrainConfig(steps=5, batch=4, set_size=5, warmup=0.5))
    ]
    assert min(rates) > 0


def test_averaged_weights_keep_a_share_of_what_they_were(sampler):
    trainer = Trainer(fresh(), sampler, TrainConfig(steps=30, batch=4, set_size=5, rate=1e-2, ema=0.7))
    trainer.begin()
    expected = {name: value.clone() for name, value in trainer.model.named_parameters()}
    for index in range(1, 31):
        trainer.step()
        keep = min(0.7, index / (index + 9))  # less at first, when there is nothing worth keeping
        for name, value in trainer.model.named_parameters():
            expected[name] = keep * expected[name] + (1 - keep) * value.detach()
    for name, value in trainer.trained().named_parameters():
        torch.testing.assert_close(value, expected[name])


def test_columns_are_scaled_by_all_rows_not_by_the_first_batch():
    rows = torch.randn(600, 2)
    rows[:, 1] = 0
    rows[::100, 1] = 1e4  # rare, in one class
    sampler = SetSampler(Examples(rows, torch.arange(600) % 100, tuple(map(str, range(100)))))
    model = fresh(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    Trainer(model, sampler, TrainConfig(steps=1, batch=2, set_size=3)).begin()
    torch.testing.assert_close(model.preprocessing.deviation, rows.double().std(0, correction=0))


def test_rows_of_a_table_are_trained_on_too():
    common = torch.randn(30, 1, 4)
    rows = (5 + common + 0.3 * torch.randn(30, 10, 4)).flatten(0, 1)
    names = tuple(map(str, range(30)))
    sampler = SetSampler(Examples(rows, torch.arange(30).repeat_interleave(10), names))
    model = fresh(ModelConfig((4,), levels=0, flow=FlowConfig("dense", couplings=2, units=16)))
    steps = list(train_steps(model, sampler, TrainConfig(steps=150, batch=16, set_size=8, rate=1e-2)))
    assert steps[-1].bits_per_dim < steps[0].bits_per_dim - 0.2
    assert model.process.correlation.mean() > 0.3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimiser": "sgd"}, "`train.optimiser` must be 'adamw' or 'adam' or 'rmsprop'; got 'sgd'"),
        ({"way": 1}, "`train.way` must be at least 2; got 1"),
        ({"fade": 1.5}, "`train.fade` must be from 0 to 1; got 1.5"),
        ({"generative": 0.0}, "got 0 for both"),
        ({"shared": True}, "`train.shared` needs weights above 0 for both losses"),
        ({"warmup": 1.5}, "`train.warmup` must be from 0 up to 1; got 1.5"),
        ({"decay": "exponential"}, "`train.final_rate` must be above 0"),
        ({"stepz": 3}, r"did you mean `train.steps`\?"),
    ],
)
def test_mistakes_in_the_settings(values, message):
    with pytest.raises(ValueError, match=message):
        from_dict(TrainConfig, values)


def test_steps_from_python_end_with_the_average(sampler):
    config = TrainConfig(steps=12, batch=4, set_size=4, ema=0.9)
    model, plain = fresh(), fresh()
    list(train_steps(model, sampler, config))
    list(train_steps(plain, sampler, evolve(config, ema=0.0)))
    trainer = Trainer(fresh(), sampler, config)
    trainer.advance(12)
    assert model.fingerprint() == trainer.trained().fingerprint() != plain.fingerprint()
    with pytest.raises(ValueError, match=r"`train.minutes` must be 0"):
        next(train_steps(model, sampler, evolve(config, minutes=1.0)))
