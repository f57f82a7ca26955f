import dataclasses
import json
import math

import pytest
import torch
from attrs import evolve

from bruno import Bruno, FlowConfig, ModelConfig, ProcessConfig
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.tasks import stability
from bruno.tasks.stability import (
    FULL_FLOW,
    STUDY_FLOW,
    STUDY_TRAIN,
    VARIANTS,
    Curve,
    Variant,
    stability_studies,
    stability_study,
)
from bruno.training import train_steps

SMALL_FLOW = FlowConfig(kind="dense", couplings=2, units=32)
SMALL_TRAIN = evolve(STUDY_TRAIN, batch=4, set_size=10)


def small_study(examples: Examples, *variants: Variant, steps: int, **settings) -> list[Curve]:
    settings = {"flow": SMALL_FLOW, "train": SMALL_TRAIN, **settings}
    return stability_study(examples, variants=variants, steps=steps, **settings)


@pytest.fixture(scope="module")
def study(learnt_digits) -> dict[tuple[str, str], Curve]:
    ordinary, outliers = VARIANTS[0], dataclasses.replace(VARIANTS[-1], white_every=50)
    curves = small_study(learnt_digits, ordinary, outliers, steps=110)
    return {(curve.variant, curve.process): curve for curve in curves}


@pytest.mark.slow
def test_the_study_has_a_curve_for_each_variant_and_process(learnt_digits):
    every_fifth = dataclasses.replace(VARIANTS[-1], white_every=5)
    curves = small_study(learnt_digits, *VARIANTS[:-1], every_fifth, steps=10)
    names = [(variant.name, process) for variant in VARIANTS for process in ("student-t", "gaussian")]
    assert [(curve.variant, curve.process) for curve in curves] == names
    assert {len(curve.bits_per_dim) for curve in curves} == {10}
    assert len({curve.bits_per_dim for curve in curves}) == len(names)


@pytest.mark.long
@pytest.mark.parametrize("process", ["student-t", "gaussian"])
def test_bits_decrease_in_the_ordinary_variant(study, process):
    curve = study["ordinary", process]
    early, late = (sum(curve.bits_per_dim[i : i + 20]) / 20 for i in (0, 90))
    assert late < early - 0.5
    assert curve.final == pytest.approx(late, abs=0.1)
    assert curve.skipped == 0


@pytest.mark.long
@pytest.mark.parametrize("process", ["student-t", "gaussian"])
def test_white_outliers_raise_the_bits_of_every_fiftieth_step(study, process):
    bits = study["white outliers", process].bits_per_dim
    ordinary = study["ordinary", process].bits_per_dim
    assert bits[:49] == ordinary[:49]
    for step in (50, 100):
        around = [bits[i - 1] for i in range(step - 10, step + 11) if i != step]
        assert bits[step - 1] > max(around) + 0.2


def test_only_the_last_image_of_a_set_is_white(learnt_digits):
    still = evolve(SMALL_TRAIN, set_size=2, batch=3)
    (curve,) = small_study(
        learnt_digits,
        Variant("white", white_every=1, rate=1e-12),
        steps=1,
        processes=["gaussian"],
        train=still,
    )
    torch.manual_seed(0)
    model = Bruno.from_config(ModelConfig((1, 8, 8), 17, flow=SMALL_FLOW, process=ProcessConfig("gaussian")))
    sampler, generator = SetSampler(learnt_digits), torch.Generator().manual_seed(0)
    model.initialise(sampler.sets(3, 2, generator) + torch.rand((3, 2, 1, 8, 8), generator=generator))
    x = sampler.sets(3, 2, generator)
    x[:, 1] = 16
    expected = model.bits_per_dim(model.log_prob(x, generator)).mean().item()
    assert curve.bits_per_dim == pytest.approx((expected,), rel=1e-5)


@pytest.mark.parametrize(
    ("variant", "flow", "process", "rate"),
    [
        (Variant("a"), {}, {"correlation": 0.1}, 1e-3),
        (Variant("b", weight_norm=False), {"weight_norm": False}, {"correlation": 0.1}, 1e-3),
        (Variant("c", rate=2.0), {}, {"correlation": 0.1}, 2e-3),
        (Variant("d", correlation=(0.95, 0.95)), {}, {"correlation": 0.95}, 1e-3),
    ],
    ids=["ordinary", "no weight norm", "rate", "correlation"],
)
def test_a_variant_is_ordinary_training_with_one_setting_changed(learnt_digits, variant, flow, process, rate):
    (curve,) = small_study(learnt_digits, variant, steps=15, processes=["student-t"], seeds=[7])
    torch.manual_seed(7)
    settings = ModelConfig((1, 8, 8), 17, flow=evolve(SMALL_FLOW, **flow), process=ProcessConfig(**process))
    config = evolve(SMALL_TRAIN, steps=15, learning_rate=rate, seed=7)
    steps = train_steps(Bruno.from_config(settings), SetSampler(learnt_digits), config)
    assert curve.bits_per_dim == pytest.approx([step.bits_per_dim for step in steps], rel=1e-4)


def test_mixed_correlations_are_drawn_from_the_range(learnt_digits):
    def first_bits(low: float, high: float) -> float:
        variant = Variant("mixed", correlation=(low, high))
        return small_study(learnt_digits, variant, steps=1, processes=["gaussian"])[0].bits_per_dim[0]

    # Before training, bits grow with the correlation here, so a mixture is between its ends.
    assert first_bits(0.1, 0.1) < first_bits(0.1, 0.95) < first_bits(0.95, 0.95)


def test_the_study_is_repeatable_and_does_not_use_the_global_generator(learnt_digits):
    before = torch.get_rng_state()
    first, other = small_study(learnt_digits, VARIANTS[1], steps=8, processes=["student-t"], seeds=[1, 2])
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(5)
    again = small_study(learnt_digits, VARIANTS[1], steps=8, processes=["student-t"], seeds=[1])
    assert again == [first]
    assert (first.seed, other.seed) == (1, 2)
    assert first.bits_per_dim != other.bits_per_dim


def test_divergence_is_a_result(learnt_digits):
    (curve,) = small_study(learnt_digits, Variant("wild", rate=1e6), steps=12, processes=["gaussian"])
    assert len(curve.bits_per_dim) == 12
    assert not all(map(math.isfinite, curve.bits_per_dim))
    assert not math.isfinite(curve.final)
    assert 0 < curve.skipped < 12


def test_progress_counts_the_steps_of_all_models(learnt_digits):
    calls: list[tuple[int, int]] = []
    small_study(learnt_digits, VARIANTS[0], steps=3, progress=lambda *done: calls.append(done))
    assert calls == [(i, 6) for i in range(1, 7)]


def test_a_study_that_was_stopped_continues_with_the_next_model(learnt_digits, tmp_path):
    def stop(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    whole = small_study(learnt_digits, VARIANTS[0], steps=3)
    with pytest.raises(KeyboardInterrupt):
        small_study(learnt_digits, VARIANTS[0], steps=3, folder=tmp_path, progress=stop)
    calls: list[int] = []
    for _ in range(2):
        again = small_study(
            learnt_digits, VARIANTS[0], steps=3, folder=tmp_path, progress=lambda done, _: calls.append(done)
        )
        assert again == whole
    assert calls == [4, 5, 6]


def test_kept_curves_of_other_settings_raise(learnt_digits, tmp_path):
    small_study(learnt_digits, VARIANTS[0], steps=1, processes=["gaussian"], folder=tmp_path)
    with pytest.raises(ValueError, match=r"`train.steps` must be 1.*; got 2"):
        small_study(learnt_digits, VARIANTS[0], steps=2, processes=["gaussian"], folder=tmp_path)


def test_white_outliers_need_images():
    rows = Examples(torch.randn(40, 5), torch.arange(40) % 2, ("a", "b"))
    with pytest.raises(ValueError, match=r"`examples` .*images.*white outliers"):
        small_study(rows, Variant("white", white_every=100), steps=2)
    assert len(small_study(rows, Variant("plain"), steps=2)) == 2


@pytest.mark.parametrize("correlation", [(0.0, 0.5), (0.5, 1.0), (0.9, 0.1)])
def test_correlations_outside_0_to_1_raise(correlation):
    with pytest.raises(ValueError, match=r"`correlation` .*; got \(0\."):
        Variant("x", correlation=correlation)


@pytest.mark.parametrize(("full_size", "flow"), [(False, STUDY_FLOW), (True, FULL_FLOW)])
def test_studies_of_several_datasets_share_their_settings(tmp_path, monkeypatch, full_size, flow):
    asked, calls = [], []

    def train(examples: Examples, *, progress, **settings) -> list[Curve]:
        asked.append(settings)
        progress(1, 2)
        return []

    monkeypatch.setattr(stability, "stability_study", train)
    one, other = stability_studies(
        ["digits", "drawn"],
        tmp_path,
        steps=4,
        full_size=full_size,
        device="cpu",
        seed=7,
        progress=lambda *done: calls.append(done),
    )
    assert (one.name, other.name, one.flow, one.steps) == ("digits", "drawn", flow, 4)
    assert [settings["folder"].name for settings in asked] == ["curves-digits", "curves-drawn"]
    assert {settings["seeds"] for settings in asked} == {(7,)}
    assert calls == [(1, 4), (3, 4)]


def test_a_mistake_in_studies_is_named_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`out` .*file"):
        next(stability_studies(["digits"], tmp_path / "file"))
    with pytest.raises(ValueError, match="'nowhere'"):
        next(stability_studies(["digits", "nowhere"], tmp_path / "new"))


def test_a_curve_can_be_written_as_json(learnt_digits):
    curve, _ = small_study(learnt_digits, VARIANTS[0], steps=2)
    values = dataclasses.asdict(curve)
    assert json.loads(json.dumps(values)).keys() == values.keys()
