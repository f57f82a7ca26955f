import math

import pytest
import torch
from attrs import evolve

from bruno import Bruno, FlowConfig, ModelConfig, ProcessConfig
from bruno.config import TrainConfig, from_dict
from bruno.data import Examples, load_examples
from bruno.data.sampling import SetSampler
from bruno.flow.networks import DenseNetwork
from bruno.training.schedule import make_optimiser
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


@pytest.mark.slow
@pytest.mark.parametrize("process", ["student-t", "gaussian"])
@pytest.mark.parametrize("optimiser", ["adamw", "adam", "rmsprop", "muon"])
def test_training_lowers_bits_per_dim(sampler, process, optimiser):
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


def test_training_on_episodes_alone_does_not_need_classes_of_the_set_size(sampler):
    few = load_examples("digits")
    few = few.of_classes(range(3))
    keep = torch.cat([torch.where(few.labels == label)[0][:4] for label in range(3)])
    small = SetSampler(Examples(few.elements[keep], few.labels[keep], few.names, levels=few.levels))
    config = TrainConfig(steps=2, generative=0.0, discriminative=1.0, episodes=2, way=3, shot=2, set_size=20)
    model = fresh(ModelConfig((1, 8, 8), levels=17, flow=TINY.flow))
    assert [step.skipped for step in train_steps(model, small, config)] == [False, False]


@pytest.mark.slow
def test_training_on_episodes_raises_their_accuracy(sampler):
    model = fresh()
    config = TrainConfig(
        steps=150, generative=0.0, discriminative=1.0, episodes=8, way=5, shot=2, learning_rate=2e-3
    )
    steps = list(train_steps(model, sampler, config))
    accuracy = [step.accuracy for step in steps]
    assert sum(accuracy[:10]) / 10 < sum(accuracy[-20:]) / 20 - 0.1
    assert sum(accuracy[-20:]) / 20 > 0.7


def test_gradients_are_clipped(sampler):
    for clip in (1e-3, 0.0):
        trainer = Trainer(fresh(), sampler, TrainConfig(steps=1, batch=4, set_size=5, clip=clip))
        before = trainer.step().gradient_norm
        after = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item()
        assert after == pytest.approx(clip or before, rel=1e-3)
        assert before > 1e-2


def test_before_the_onset_of_cross_entropy_only_bits_per_dim_count(sampler):
    plan = {"steps": 6, "batch": 4, "set_size": 5, "episodes": 2, "way": 3}
    config = TrainConfig(**plan, discriminative=0.5, onset=0.5)
    steps = list(train_steps(fresh(), sampler, config))
    assert [step.loss > step.bits_per_dim for step in steps] == 3 * [False] + 3 * [True]
    assert [math.isnan(step.accuracy) for step in steps] == 3 * [True] + 3 * [False]
    shared = list(train_steps(fresh(), sampler, evolve(config, shared=True, shot=2, queries=3)))
    assert not any(math.isnan(step.accuracy) for step in shared)  # the episodes are the sets
    models = fresh(), fresh()
    list(train_steps(models[0], sampler, evolve(config, steps=2, onset=0.9)))
    list(train_steps(models[1], sampler, evolve(config, steps=2, discriminative=1e-30)))
    assert models[0].fingerprint() == models[1].fingerprint()
    with pytest.raises(ValueError, match=r"`train.onset` .*got 0.5"):
        evolve(config, generative=0.0)
    with pytest.raises(ValueError, match=r"`train.onset` .*got 1.0"):
        evolve(config, onset=1.0)


@pytest.mark.parametrize(("noise", "width"), [("full", 1.0), ("varied", 0.5), ("none", 0.0)])
def test_the_noise_of_episodes_has_the_width_of_the_setting(sampler, noise, width):
    plan = TrainConfig(steps=1, batch=4, set_size=5, episodes=40, way=3, discriminative=1.0)
    trainer = Trainer(fresh(), sampler, evolve(plan, episode_noise=noise))
    trainer.begin()
    drawn = []
    trainer._objective.register_forward_pre_hook(lambda _, elements: drawn.append(elements))
    trainer.step()
    sets, tasks = (2 * (x.frac() - 0.5).abs().flatten(-3).amax(-1) for x in drawn[0])  # of each element
    assert sets.min() > 0.9
    assert tasks.shape == (40, 3, 2)
    assert tasks.mean().item() == pytest.approx(width, abs=0.06)
    assert (tasks.std() > 0.2) == (noise == "varied")


def test_the_noise_of_rows_in_episodes_varies():
    x = torch.randint(0, 5, (60, 3), generator=torch.Generator().manual_seed(0)).double()
    rows = SetSampler(Examples(x, torch.arange(60) // 20, tuple("abc")))
    model = Bruno.from_config(ModelConfig((3,), levels=0, scales="auto", flow=FlowConfig("dense", units=8)))
    plan = TrainConfig(steps=1, batch=4, set_size=5, episodes=30, way=3, discriminative=1.0)
    trainer = Trainer(model, rows, evolve(plan, episode_noise="varied"))
    trainer.begin()
    tasks = trainer._draw()[1]
    assert (tasks - tasks.round()).abs().mean().item() == pytest.approx(0.125, abs=0.02)


def test_the_same_seed_trains_the_same_model(sampler):
    prints = []
    for seed in (1, 1, 2):
        model = fresh()
        list(train_steps(model, sampler, TrainConfig(steps=4, batch=4, set_size=5, seed=seed)))
        prints.append(model.fingerprint())
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("optimiser", ["adamw", "adam", "rmsprop", "muon"])
def test_a_step_with_a_gradient_that_is_not_finite_changes_no_weight(sampler, optimiser):
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


def test_the_process_has_its_own_learning_rate_and_no_weight_decay():
    model = fresh()
    flow, process = make_optimiser(
        model, TrainConfig(learning_rate=1e-2, process_learning_rate=0.1, weight_decay=0.3)
    ).param_groups
    assert flow["rate"] == 1e-2
    assert process["rate"] == pytest.approx(1e-3)
    assert (flow["weight_decay"], process["weight_decay"]) == (0.3, 0.0)
    assert len(flow["params"]) + len(process["params"]) == len(list(model.parameters()))


def test_the_moving_average_copies_buffers_exactly(sampler):
    rows = 1.7e9 + 1e4 * torch.randn(60, 2).double()
    model = fresh(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    of_rows = SetSampler(Examples(rows, torch.arange(60) % 6, tuple("abcdef")))
    trainer = Trainer(model, of_rows, TrainConfig(steps=9, batch=4, set_size=5, ema=0.9))
    trainer.advance(1)
    assert torch.equal(trainer.trained().preprocessing.mean, model.preprocessing.mean)


def test_no_step_has_a_learning_rate_of_0(sampler):
    rates = [
        step.rate
        for step in train_steps(fresh(), sampler, TrainConfig(steps=5, batch=4, set_size=5, warmup=0.5))
    ]
    assert min(rates) > 0


@pytest.mark.slow
def test_the_moving_average_decays_exponentially_and_faster_at_first(sampler):
    trainer = Trainer(
        fresh(), sampler, TrainConfig(steps=30, batch=4, set_size=5, learning_rate=1e-2, ema=0.7)
    )
    trainer.begin()
    expected = {name: value.clone() for name, value in trainer.model.named_parameters()}
    for index in range(1, 31):
        trainer.step()
        keep = min(0.7, index / (index + 9))  # faster at first
        for name, value in trainer.model.named_parameters():
            expected[name] = keep * expected[name] + (1 - keep) * value.detach()
    for name, value in trainer.trained().named_parameters():
        torch.testing.assert_close(value, expected[name])


def test_columns_are_standardised_by_all_rows_not_by_the_first_batch():
    rows = torch.randn(600, 2)
    rows[:, 1] = 0
    rows[::100, 1] = 1e4  # rare, and all in one class
    sampler = SetSampler(Examples(rows, torch.arange(600) % 100, tuple(map(str, range(100)))))
    model = fresh(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    Trainer(model, sampler, TrainConfig(steps=1, batch=2, set_size=3)).begin()
    torch.testing.assert_close(model.preprocessing.deviation, rows.double().std(0, correction=0))


def test_the_distribution_of_pixels_is_that_of_all_training_images():
    examples = load_examples("digits")
    model = fresh(evolve(TINY, levels=17, pixels="gaussianise"))
    Trainer(model, SetSampler(examples), TrainConfig(steps=1, batch=2, set_size=3)).begin()
    counts = examples.elements.flatten().long().bincount(minlength=17).double()
    torch.testing.assert_close(model.preprocessing.shares, 0.99 * counts / counts.sum() + 0.01 / 17)


def test_larger_images_give_the_distribution_of_pixels_at_the_size_of_the_model():
    bright = torch.zeros(20, 1, 16, 16, dtype=torch.uint8)
    bright[:, :, :8] = 255
    sampler = SetSampler(Examples(bright, torch.arange(20) // 5, tuple("abcd")))
    model = fresh(evolve(TINY, pixels="gaussianise"))
    Trainer(model, sampler, TrainConfig(steps=1, batch=2, set_size=3)).begin()
    shares = model.preprocessing.shares
    assert shares[0] == pytest.approx(0.99 * 3 / 8, abs=1e-3)  # rows 3 and 4 of 8 are between black and white
    assert shares[255] == pytest.approx(0.99 * 3 / 8, abs=1e-3)


def machines_with_relations(sets: int = 60, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose second column is nearly twice the deviation of the first from its mean in the set."""
    generator = torch.Generator().manual_seed(0)
    level, deviation = (torch.randn(sets, n, 1, generator=generator) for n in (1, size))
    rows = torch.cat([level + deviation, 2 * deviation], 2)
    rows += 0.05 * torch.randn(rows.shape, generator=generator)
    return rows.flatten(0, 1), torch.arange(sets).repeat_interleave(size)


def test_a_loop_of_your_own_fits_the_imputer_to_all_rows():
    rows, labels = machines_with_relations()
    model = fresh(ModelConfig((2,), levels=0, flow=FlowConfig("dense", units=8), missing="impute"))
    names = tuple(map(str, range(int(labels.max()) + 1)))
    list(
        train_steps(
            model, SetSampler(Examples(rows, labels, names)), TrainConfig(steps=1, batch=2, set_size=4)
        )
    )
    holed = rows.clone()
    holed[::4, 1] = torch.nan
    error = (model.impute(holed, labels) - rows)[::4, 1]
    assert error.square().mean().sqrt() < 0.25 * rows[::4, 1].std()


def test_rows_with_missing_numbers_are_rejected_until_they_are_imputed():
    rows, labels = machines_with_relations()
    rows[3, 1] = torch.nan
    sampler = SetSampler(Examples(rows, labels, tuple(map(str, range(60)))))
    model = fresh(ModelConfig((2,), levels=0, flow=FlowConfig("dense", units=8), missing="impute"))
    with pytest.raises(ValueError, match=r"`sampler` must have complete rows; got missing .*fit_preproc"):
        Trainer(model, sampler, TrainConfig(steps=1, batch=2, set_size=4))


@pytest.mark.slow
def test_training_on_rows_of_a_table_lowers_bits_per_dim_and_finds_correlation():
    common = torch.randn(30, 1, 4)
    rows = (5 + common + 0.3 * torch.randn(30, 10, 4)).flatten(0, 1)
    names = tuple(map(str, range(30)))
    sampler = SetSampler(Examples(rows, torch.arange(30).repeat_interleave(10), names))
    model = fresh(ModelConfig((4,), levels=0, flow=FlowConfig("dense", couplings=2, units=16)))
    steps = list(
        train_steps(model, sampler, TrainConfig(steps=150, batch=16, set_size=8, learning_rate=1e-2))
    )
    assert steps[-1].bits_per_dim < steps[0].bits_per_dim - 0.2
    assert model.process.correlation.mean() > 0.3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"optimiser": "sgd"},
            "`train.optimiser` must be 'adamw' or 'adam' or 'rmsprop' or 'muon'; got 'sgd",
        ),
        ({"way": 1}, "`train.way` must be at least 2; got 1"),
        ({"fade": 1.5}, "`train.fade` must be from 0 to 1; got 1.5"),
        ({"generative": 0.0}, "got 0 for both"),
        ({"shared": True}, "`train.shared` needs weights above 0 for both losses"),
        (
            {"shared": True, "discriminative": 1.0, "episode_noise": "varied"},
            "`train.shared` must be false unless `train.episode_noise` is 'full', .*got 'varied'",
        ),
        ({"warmup": 1.5}, "`train.warmup` must be at least 0 and below 1; got 1.5"),
        ({"decay": "exponential"}, "`train.final_learning_rate` must be above 0"),
        ({"stepz": 3}, r"did you mean `train.steps`\?"),
    ],
)
def test_invalid_settings_are_errors(values, message):
    with pytest.raises(ValueError, match=message):
        from_dict(TrainConfig, values)


@pytest.mark.slow
def test_train_steps_leaves_the_averaged_weights_in_the_model(sampler):
    config = TrainConfig(steps=12, batch=4, set_size=4, ema=0.9)
    model, plain = fresh(), fresh()
    list(train_steps(model, sampler, config))
    list(train_steps(plain, sampler, evolve(config, ema=0.0)))
    trainer = Trainer(fresh(), sampler, config)
    trainer.advance(12)
    assert model.fingerprint() == trainer.trained().fingerprint() != plain.fingerprint()
    with pytest.raises(ValueError, match=r"`train.minutes` must be 0 .*got 1.0"):
        next(train_steps(model, sampler, evolve(config, minutes=1.0)))


def test_recomputing_activations_gives_the_same_gradients(sampler, monkeypatch):
    calls, forward = [0], DenseNetwork.forward

    def counted(self, x):
        calls[0] += torch.is_grad_enabled()
        return forward(self, x)

    monkeypatch.setattr(DenseNetwork, "forward", counted)
    config = TrainConfig(steps=2, batch=4, set_size=5, discriminative=0.5, episodes=2, way=3)
    plain, recomputing = (Trainer(fresh(), sampler, evolve(config, recompute=r)) for r in (False, True))
    for trainer, times in ((plain, 1), (recomputing, 2)):
        trainer.begin()
        calls[0] = 0
        trainer.step()
        assert calls[0] == times * 2 * TINY.flow.couplings  # for sets and for episodes
    for a, b in zip(plain.model.parameters(), recomputing.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
    calls[0] = 0
    recomputing.model.log_prob(sampler.sets(2, 3, torch.Generator())).sum().backward()
    assert calls[0] == TINY.flow.couplings  # only during training


@pytest.mark.parametrize("setting", [{"mirror": True}, {"shift": 1}, {"slant": 0.1}, {"warp": 0.1}])
def test_rows_of_a_table_cannot_be_augmented(setting):
    rows = SetSampler(Examples(torch.randn(60, 2), torch.arange(60) % 6, tuple("abcdef")))
    model = fresh(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=r"`train.mirror`.* are for images; got elements \(2,\)"):
        Trainer(model, rows, TrainConfig(batch=4, set_size=5, **setting))


def test_elements_of_another_shape_are_rejected(sampler):
    model = fresh(ModelConfig((1, 9, 9), flow=TINY.flow))
    with pytest.raises(ValueError, match=r"`sampler` must .*\(1, 9, 9\).*got \(1, 8, 8\)"):
        Trainer(model, sampler, TrainConfig(batch=4, set_size=5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shift": 8}, r"`train.shift` .*8 × 8; got 8"),
        ({"batch": 2**20, "set_size": 20}, r"`train.batch` needs 5.0 GiB for 20971520 .*_MAX_MEMORY"),
    ],
)
def test_a_step_that_does_not_fit_into_memory_is_rejected(sampler, settings, message):
    with pytest.raises(ValueError, match=message):
        Trainer(fresh(), sampler, TrainConfig(**settings))


def test_dropout_acts_in_training_steps_only_and_continues_after_a_resume(sampler):
    config = TrainConfig(steps=6, batch=4, set_size=5, dropout=0.3)
    whole, first = Trainer(fresh(), sampler, config), Trainer(fresh(), sampler, config)
    losses = [step.loss for step in whole.advance(6)]
    first.advance(3)
    resumed = Trainer(fresh(), sampler, config)
    resumed.restore(first.state())
    assert [step.loss for step in resumed.advance(3)] == losses[3:]
    plain = Trainer(fresh(), sampler, evolve(config, dropout=0.0))
    assert [step.loss for step in plain.advance(6)] != losses
    x = torch.randint(0, 17, (2, 5, 1, 8, 8))
    assert torch.equal(whole.model.encode(x).z, whole.model.encode(x).z)
    with pytest.raises(ValueError, match=r"`train.dropout` .*got 1"):
        evolve(config, dropout=1.0)


def test_a_model_that_has_nothing_to_fit_is_not_given_all_images(monkeypatch):
    monkeypatch.setattr(Bruno, "fit_preprocessing", lambda *_: pytest.fail("called"))
    sampler = SetSampler(load_examples("digits"))
    for config in (TINY, evolve(TINY, levels=17, pixels="gaussianise")):
        model = fresh(evolve(config, levels=17))
        assert model.is_fitted == (config is TINY)
        if not model.is_fitted:
            model.preprocessing.fit(sampler.elements)
        Trainer(model, sampler, TrainConfig(steps=1, batch=2, set_size=3)).begin()
