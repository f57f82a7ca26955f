import copy
import itertools
import math
import re

import numpy as np
import pytest
import torch
from attrs import evolve
from PIL import Image

from bruno import Bruno, FlowConfig, ModelConfig, ProcessConfig, StudentTProcess
from bruno.flow import Bijection, DenseRealNVP, Flatten
from bruno.flow.preprocessing import Logit, Standardise
from bruno.kinds import Images, Rows

MODELS = {
    "8×8": ModelConfig((1, 8, 8), flow=FlowConfig(filters=4, blocks=1, units=16)),
    "28×28": ModelConfig((1, 28, 28), flow=FlowConfig(filters=4, blocks=1, units=16, squeeze_first=True)),
    "32×32×3": ModelConfig((3, 32, 32), flow=FlowConfig(filters=4, blocks=1, units=16)),
    "dense image": ModelConfig((1, 4, 4), flow=FlowConfig("dense", units=16)),
    "gaussianised image": ModelConfig((1, 4, 4), pixels="gaussianise", flow=FlowConfig("dense", units=16)),
    "vector of 7": ModelConfig((7,), levels=0, flow=FlowConfig("dense", units=16)),
    "gaussian": ModelConfig((1, 4, 4), flow=FlowConfig("dense", units=16), process=ProcessConfig("gaussian")),
}


def trained(config: ModelConfig) -> Bruno:
    """A float64 model with weights away from their initial values, as after training."""
    model = Bruno.from_config(config).double()
    for parameter in model.flow.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.process.raw_correlation.data.normal_(0, 2)
    return model


def elements(model: Bruno, *batch: int) -> torch.Tensor:
    if model.levels:
        return torch.randint(0, model.levels, (*batch, *model.shape), dtype=torch.uint8)
    return torch.randn(*batch, *model.shape, dtype=torch.double)


@pytest.fixture(params=MODELS)
def model(request):
    return trained(MODELS[request.param])


class TestLaws:
    def test_order_does_not_matter(self, model):
        x = elements(model, 2, 5)
        total = model.log_prob(x).sum(-1)
        torch.testing.assert_close(model.log_prob(x[:, torch.randperm(5)]).sum(-1), total)

    def test_steps_multiply_to_the_joint(self, model):
        x = elements(model, 2, 5)
        z, log_det = model.encode(x)
        joint = model.process.joint_log_prob(z) + log_det.sum(-1)
        torch.testing.assert_close(model.log_prob(x).sum(-1), joint)

    def test_each_step_is_the_density_given_the_elements_before(self, model):
        x = elements(model, 2, 4)
        steps = model.log_prob(x)
        assert steps.shape == (2, 4)
        torch.testing.assert_close(model.prior().log_prob(x[:, 0]), steps[:, 0])
        for n in range(1, 4):
            torch.testing.assert_close(model.condition(x[:, :n]).log_prob(x[:, n]), steps[:, n])

    def test_incremental_updates_equal_conditioning_at_once(self, model):
        x, query = elements(model, 5), elements(model, 3)
        at_once = model.condition(x).log_prob(query)
        one_by_one = model.prior()
        for element in x:
            one_by_one = one_by_one.update(element)
        merged = model.condition(x[:2]).merge(model.condition(x[2:]))
        more = model.condition(torch.cat([x, query])).remove(query[0]).remove(query[1:])
        for posterior in (one_by_one, merged, more, model.prior().update(x)):
            torch.testing.assert_close(posterior.log_prob(query), at_once)

    def test_score_is_the_gain_over_the_prior(self, model):
        x, query = elements(model, 5), elements(model, 3)
        posterior = model.condition(x)
        gain = posterior.log_prob(query) - model.prior().log_prob(query)
        torch.testing.assert_close(posterior.score(query), gain)
        torch.testing.assert_close(model.prior().score(query), torch.zeros(3).double())

    def test_many_sets_score_many_elements(self, model):
        x, query = elements(model, 4, 5), elements(model, 3)
        scores = model.condition(x).log_prob(query.unsqueeze(1))
        assert scores.shape == (3, 4)
        torch.testing.assert_close(scores[:, 2], model.condition(x[2]).log_prob(query))

    def test_decoding_undoes_encoding(self, model):
        x = elements(model, 2, 3)
        back = model.decode(model.encode(x).z)
        expected = x + 0.5 if model.levels else x
        torch.testing.assert_close(back, expected.double(), rtol=0, atol=1e-6)

    def test_gradients_reach_every_parameter(self, model):
        model.log_prob(elements(model, 2, 3), torch.Generator().manual_seed(0)).mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


class TestSampling:
    def test_samples_have_the_shape_and_range_of_the_data(self, model):
        samples = model.condition(elements(model, 2, 3)).sample(4, generator=torch.Generator().manual_seed(0))
        assert samples.x.shape == (4, 2, *model.shape)
        assert samples.x.isfinite().all()
        assert 0 <= samples.clamped < samples.x.numel() / 10
        if model.levels:
            assert ((samples.x >= 0) & (samples.x < model.levels)).all()
            assert samples.images.dtype == torch.uint8

    def test_a_generator_repeats_its_samples(self, model):
        draws = [model.prior().sample(3, generator=torch.Generator().manual_seed(5)).x for _ in range(2)]
        assert torch.equal(*draws)

    @pytest.mark.parametrize("scale", [1e2, 1e10, 1e30])
    def test_extreme_latents_decode_to_finite_elements(self, scale):
        model = Bruno.from_config(MODELS["8×8"])
        for parameter in model.flow.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        assert model.decode(scale * torch.randn(20, 64)).isfinite().all()
        wild = model.decode_samples(torch.full((2, 64), 3e38))
        assert wild.x.isfinite().all()

    def test_temperature_zero_is_the_mean(self, model):
        posterior = model.condition(elements(model, 3))
        samples = posterior.sample(2, generator=torch.Generator().manual_seed(0), temperature=0.0).x
        torch.testing.assert_close(samples[0], samples[1])
        mean = model.process.predictive(posterior.evidence).mean
        torch.testing.assert_close(samples[0], model.decode(mean))

    def test_samples_concentrate_when_an_element_is_repeated(self):
        model = trained(MODELS["vector of 7"])
        x = elements(model, 1)
        spreads = []
        for n in (1, 20):
            posterior = model.condition(x.expand(n, 7))
            samples = posterior.sample(500, generator=torch.Generator().manual_seed(0))
            spreads.append(model.encode(samples.x).z.var(0)[model.process.correlated(0.5)].mean())
        assert spreads[1] < 0.7 * spreads[0]


class TestArrays:
    """Arrays, lists and PIL images are accepted wherever tensors are."""

    FORMS = {  # noqa: RUF012
        "array": lambda x: x.numpy(),
        "array with negative strides": lambda x: np.flip(np.flip(x.numpy(), 0).copy(), 0),
        "read-only array": lambda x: np.frombuffer(x.numpy().tobytes(), x.numpy().dtype).reshape(x.shape),
        "list of arrays": lambda x: [part.numpy() for part in x],
        "list of tensors": list,
        "tuple of tensors": tuple,
        "nested list": lambda x: x.tolist(),
    }

    @pytest.mark.parametrize(
        ("form", "name"),
        [*((form, "vector of 7") for form in FORMS), ("array", "8×8"), ("nested list", "8×8")],
    )
    def test_arrays_and_lists_give_the_same_results_as_tensors(self, form, name):
        model = trained(MODELS[name])
        x, convert = elements(model, 3), self.FORMS[form]
        posterior = model.condition(x)
        for ask in (
            lambda x: model.log_prob(x),
            lambda x: model.encode(x).z,
            lambda x: model.latents(x),
            lambda x: model.normalised(x),
            lambda x: model.condition(x).evidence.scatter,
            lambda x: posterior.log_prob(x),
            lambda x: posterior.score(x),
            lambda x: posterior.update(x).evidence.mean,
            lambda x: posterior.remove(x).evidence.count,
        ):
            assert torch.equal(ask(convert(x)), ask(x))

    def test_initialise_accepts_arrays(self):
        x = torch.randint(0, 256, (20, 1, 8, 8))
        model = Bruno.from_config(MODELS["8×8"])
        models = model, copy.deepcopy(model)
        models[0].initialise(x)
        models[1].initialise(x.numpy())
        assert models[0].fingerprint() == models[1].fingerprint()

    @pytest.mark.parametrize("levels", [2, 17, 256])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_pil_images_become_elements(self, levels, channels):
        config = ModelConfig((channels, 8, 8), levels, flow=FlowConfig("dense", couplings=2, units=8))
        model = Bruno.from_config(config)
        array = torch.randint(0, 256, (3, 20, 10, 3), dtype=torch.uint8).numpy()
        images = [Image.fromarray(part) for part in array]
        z = model.encode(images).z
        assert z.shape == (3, model.dim)
        torch.testing.assert_close(model.encode(images[1]).z, z[1])
        torch.testing.assert_close(model.condition(images).evidence.mean, z.double().mean(0))
        white = Image.new("L", (30, 30), 255)
        assert torch.equal(model.normalised(white), torch.full(model.shape, (levels - 1) / levels))

    def test_a_model_of_rows_rejects_images(self):
        model = Bruno.from_config(MODELS["vector of 7"])
        with pytest.raises(TypeError, match=r"`x` must not be a PIL image.*got <PIL"):
            model.encode(Image.new("L", (7, 7)))

    def test_a_list_of_different_shapes_is_rejected(self):
        model = Bruno.from_config(MODELS["8×8"])
        with pytest.raises(ValueError, match=r"`x` must be .*one shape; got \(1, 8, 8\) and \(1, 9, 9\)"):
            model.condition([np.zeros((1, 8, 8), np.uint8), np.zeros((1, 9, 9), np.uint8)])
        with pytest.raises(ValueError, match=r"`x` must hold at least one element; got an empty list"):
            model.condition([])

    def test_samples_convert_to_arrays(self):
        model = trained(MODELS["8×8"])
        samples = model.condition(elements(model, 3)).sample(2)
        arrays = samples.numpy()
        assert arrays["clamped"] == samples.clamped
        np.testing.assert_array_equal(arrays["x"], samples.x.numpy())
        np.testing.assert_array_equal(arrays["images"], samples.images.numpy())
        assert "images" not in trained(MODELS["vector of 7"]).prior().sample(2).numpy()


class TestKind:
    def test_a_model_knows_its_kind_of_element(self):
        assert Bruno.from_config(MODELS["8×8"]).kind == Images((1, 8, 8), 256)
        assert Bruno.from_config(MODELS["vector of 7"]).kind == Rows((7,))

    def test_normalised_pixels_lie_between_0_and_1(self):
        model = trained(MODELS["8×8"])
        x = elements(model, 2, 3)
        torch.testing.assert_close(model.normalised(x) * 256, x.float())
        assert model.normalised(model.prior().sample(2).x).max() <= 1

    def test_normalised_columns_are_standardised(self):
        model = Bruno.from_config(MODELS["vector of 7"])
        x = 1000 + 3 * torch.randn(5, 40, 7).double()
        model.initialise(x)
        scaled = model.normalised(x)
        torch.testing.assert_close(scaled.mean((0, 1)), torch.zeros(7).double())
        torch.testing.assert_close(scaled.std((0, 1), correction=0), torch.ones(7).double())

    def test_the_device_is_where_the_weights_are(self):
        model = Bruno.from_config(MODELS["vector of 7"])
        assert model.device == torch.device("cpu")
        assert model.to("meta").device == torch.device("meta")


class TestIsADensity:
    @pytest.mark.slow
    @pytest.mark.parametrize("pixels", ["logit", "gaussianise"])
    def test_probabilities_of_all_tiny_images_sum_to_one(self, pixels):
        """All 256 images of 2 × 2 pixels with 4 levels; each probability is an average over noise."""
        flow = FlowConfig("dense", units=8, couplings=2)
        model = trained(ModelConfig((1, 2, 2), levels=4, pixels=pixels, alpha=0.05, flow=flow))
        images = torch.tensor(list(itertools.product(range(4), repeat=4))).view(256, 1, 2, 2)
        model.initialise(images[:37])  # levels are not equally frequent in these
        seen = model.condition(images[[3, 77, 200]])
        generator, draws = torch.Generator().manual_seed(0), 400
        for posterior in (model.prior(), seen):
            repeated = images.repeat(draws, 1, 1, 1)
            with torch.no_grad():
                p = posterior.log_prob(repeated, generator).exp().view(draws, 256)
            totals = p.sum(1)  # each row is an unbiased estimate of the mass inside the range of pixels
            error = totals.std() / math.sqrt(draws)
            inside = self.mass_inside(model, posterior)
            assert abs(totals.mean() - inside) < 4 * error + 1e-3
            assert error < 0.02

    @staticmethod
    def mass_inside(model, posterior):
        """The fraction of samples that need no clamping: the map covers a little more than [0, 4)."""
        z = model.process.predictive(posterior.evidence).sample(
            (200_000,), generator=torch.Generator().manual_seed(1)
        )
        with torch.no_grad():
            x = model.preprocessing.inverse(model.flow.inverse(z)[0])[0]
        return ((x >= 0) & (x < 4)).flatten(1).all(1).double().mean()

    def test_one_dimension_integrates_to_one(self):
        class Tilt(Bijection):
            def forward(self, x):
                return x + x**3, torch.log1p(3 * x**2).sum(1)

            def inverse(self, z):
                raise NotImplementedError

        process = StudentTProcess(1, dof=4.0, correlation=0.7, dtype=torch.double)
        model = Bruno((1,), Tilt(), process, Logit(alpha=1e-6))
        x = torch.linspace(0, 256, 400_001, dtype=torch.double).unsqueeze(-1)
        for posterior in (model.prior(), model.condition(torch.tensor([[40.5], [60.5], [45.5]]).double())):
            density = posterior.log_prob(x).exp()
            torch.testing.assert_close(
                torch.trapezoid(density, x.squeeze(-1)), torch.tensor(1.0).double(), rtol=0, atol=1e-4
            )


def test_splines_with_the_same_weights_on_another_interval_are_a_different_model():
    def model(interval: float) -> Bruno:
        torch.manual_seed(0)
        flow = FlowConfig("dense", couplings=2, units=8, coupling="spline", interval=interval)
        return Bruno.from_config(ModelConfig((7,), levels=0, flow=flow))

    assert model(5.0).is_same(model(5.0))
    assert not model(5.0).is_same(model(4.0))


def test_rows_are_standardised_by_the_first_data():
    model = Bruno.from_config(MODELS["vector of 7"])
    x = 1000 + 3 * torch.randn(50, 7)
    model.initialise(x)
    assert model.preprocessing(x)[0].mean().abs() < 1e-3
    before = model.fingerprint()
    model.initialise(x * 2)
    assert model.fingerprint() == before


def test_images_can_be_removed_one_by_one_in_float32():
    model = trained(MODELS["28×28"]).float()
    x = elements(model, 5)
    posterior = model.condition(x)
    for image in x:
        posterior = posterior.remove(image)
    assert posterior.evidence.count == 0


def test_a_posterior_can_be_copied():
    model = trained(MODELS["dense image"])
    posterior = copy.deepcopy(model.condition(elements(model, 3)).detach())
    assert posterior.evidence.count == 3


def test_a_custom_flow_works():
    class Halve(Bijection):
        def forward(self, x):
            return x.flatten(1) / 2, torch.full((len(x),), -4 * math.log(2))

        def inverse(self, z):
            return z.view(-1, 1, 2, 2) * 2, torch.full((len(z),), 4 * math.log(2))

        def output_shape(self, shape):
            return (4,)

    model = Bruno((1, 2, 2), Halve(), StudentTProcess(4), Logit())
    x = torch.randint(0, 256, (3, 5, 1, 2, 2))
    assert model.log_prob(x).shape == (3, 5)
    assert model.condition(x).sample(2).images.shape == (2, 3, 1, 2, 2)


def test_initialising_from_data_happens_once():
    model = Bruno.from_config(MODELS["8×8"])
    x = elements(model, 30)
    model.initialise(x)
    before = model.fingerprint()
    model.initialise(x // 3)
    assert model.fingerprint() == before


def test_latents_can_be_arrays():
    model = trained(MODELS["8×8"])
    z = torch.randn(3, 64, dtype=torch.double)
    for form in (z.numpy(), z.tolist()):
        torch.testing.assert_close(model.decode_samples(form).x, model.decode_samples(z).x)
    with pytest.raises(ValueError, match=r"`z` must end in 64 dimensions; got shape \(3, 5\)"):
        model.decode_samples(z[:, :5].numpy())


def test_latents_convert_to_arrays():
    encoded = Bruno.from_config(MODELS["vector of 7"]).encode(torch.randn(3, 7))
    found = encoded.numpy()
    assert list(found) == ["z", "log_det"]
    np.testing.assert_array_equal(found["z"], encoded.z.detach())
    z, log_det = encoded
    assert z is encoded.z
    assert log_det is encoded.log_det


def test_a_list_of_whole_numbers_is_a_row():
    model = Bruno.from_config(MODELS["vector of 7"])
    row = list(range(7))
    expected = model.encode(torch.tensor(row, dtype=torch.double))
    torch.testing.assert_close(model.encode(row), expected)
    torch.testing.assert_close(
        model.condition([row, row]).score([row]), model.condition([row, row]).score(np.array([row], float))
    )


def with_settings(**settings) -> Bruno:
    """A model with the same weights for any settings."""
    config = ModelConfig((1, 4, 4), flow=FlowConfig("dense", couplings=2, units=8))
    torch.manual_seed(0)
    return Bruno.from_config(evolve(config, **settings))


def test_a_fingerprint_covers_everything_that_latents_depend_on():
    different = {
        "weights": Bruno.from_config(with_settings().config),
        "reference": with_settings(),
        "levels": with_settings(levels=255),
        "alpha": with_settings(alpha=1e-5),
        "pixels": with_settings(pixels="gaussianise"),
        "shape": with_settings(shape=(1, 2, 8)),
        "precision": with_settings().double(),
    }
    assert len({model.fingerprint() for model in different.values()}) == len(different)
    assert with_settings().fingerprint() == different["reference"].fingerprint()


@pytest.mark.parametrize("settings", [{"alpha": 1e-5}, {"levels": 255}])
def test_posteriors_of_models_that_differ_in_one_setting_do_not_merge(settings):
    with pytest.raises(ValueError, match="`other` must be a posterior of the same model"):
        with_settings().prior().merge(with_settings(**settings).prior())


@pytest.mark.usefixtures("without_shape_checks")
class TestMistakes:
    def test_wrong_shapes_are_rejected(self):
        model = Bruno.from_config(MODELS["8×8"])
        with pytest.raises(ValueError, match=r"`x` must end in shape \(1, 8, 8\); got \(2, 3, 1, 9, 8\)"):
            model.log_prob(torch.zeros(2, 3, 1, 9, 8))
        with pytest.raises(ValueError, match=r"Channels come first: torch.movedim"):
            model.log_prob(torch.zeros(2, 3, 8, 8, 1))
        with pytest.raises(ValueError, match=r"must be sets.*A set of one element is \[x\]"):
            model.condition(torch.zeros(1, 8, 8))
        with pytest.raises(ValueError, match=r"`x` must be sets .*got shape \(1, 8, 8\)"):
            model.log_prob(torch.zeros(1, 8, 8))

    def test_wrong_types_are_rejected(self):
        with pytest.raises(TypeError, match=r"must be integers or floating point; got torch.bool"):
            Bruno.from_config(MODELS["8×8"]).encode(torch.zeros(1, 8, 8, dtype=torch.bool))
        with pytest.raises(TypeError, match=r"`x` must be floating point .*; got torch.int64"):
            Bruno.from_config(MODELS["vector of 7"]).encode(torch.zeros(7, dtype=torch.long))
        with pytest.raises(TypeError, match=r"got torch.int64. Use x.astype\(float\)"):
            Bruno.from_config(MODELS["vector of 7"]).encode(np.zeros(7, int))
        with pytest.raises(TypeError, match=r"`n` must be a whole number; got 2.5"):
            Bruno.from_config(MODELS["vector of 7"]).prior().sample(2.5)
        assert len(Bruno.from_config(MODELS["vector of 7"]).prior().sample(torch.tensor(3)).x) == 3
        with pytest.raises(ValueError, match=r"`images` needs a model of images.*levels = 0"):
            _ = Bruno.from_config(MODELS["vector of 7"]).prior().sample(1).images

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (300, "from 0 to 255.*got 300"),
            (-5, "got -5"),
            (math.nan, "got nan"),
            (math.inf, "from 0 to 256.*got inf"),
        ],
    )
    def test_values_out_of_range_are_rejected(self, value, message):
        model = Bruno.from_config(MODELS["8×8"])
        x = torch.full((2, 1, 8, 8), value)
        for ask in (model.log_prob, model.condition, model.prior().log_prob, model.prior().score):
            with pytest.raises(ValueError, match=rf"`x` must be .*{message}"):
                ask(x)

    @pytest.mark.parametrize(
        "x", [None, "image.png", {1: 2}, [None], [["a"]], object()], ids=lambda x: type(x).__name__
    )
    def test_a_wrong_type_is_a_type_error_that_names_the_argument(self, x):
        model = Bruno.from_config(MODELS["8×8"])
        prior = model.prior()
        for ask in (model.log_prob, model.condition, model.encode, model.latents, model.normalised):
            with pytest.raises(TypeError, match=r"`x` must be a tensor, a numpy array"):
                ask(x)
        for ask in (prior.log_prob, prior.score, prior.update, prior.remove, model.initialise):
            with pytest.raises(TypeError, match=r"`x` must be a tensor, a numpy array"):
                ask(x)
        with pytest.raises(TypeError, match=r"`z` must be a tensor, a numpy array"):
            model.decode(x)
        with pytest.raises(TypeError, match=r"`other` must be .*Posterior; got"):
            prior.merge(x)
        with pytest.raises(TypeError, match=r"`config` must be .*ModelConfig; got"):
            Bruno.from_config(x)

    def test_an_empty_set_is_rejected(self):
        model = Bruno.from_config(MODELS["8×8"])
        for ask in (model.log_prob, model.condition, model.encode, model.prior().score):
            with pytest.raises(
                ValueError,
                match=r"`x` must hold at least one element; got shape \(0, 1, 8, 8\).*model.prior\(\)",
            ):
                ask(torch.zeros(0, 1, 8, 8, dtype=torch.uint8))

    def test_floating_point_integers_are_a_warning(self):
        model = trained(MODELS["28×28"]).float()
        x = elements(model, 3)
        with pytest.warns(UserWarning, match=r"`x` .*whole numbers.*x\.byte\(\)"):
            model.encode(x.float())

    def test_brightness_from_0_to_1_is_a_warning(self):
        model = Bruno.from_config(MODELS["8×8"])
        x = torch.rand(2, 1, 8, 8)
        with pytest.warns(UserWarning, match=r"`x` .*from 0 to 256.*above 1.*\(x \* 255\)"):
            model.condition(x)
        model.condition((x * 255).round().byte())
        model.condition(torch.zeros(2, 1, 8, 8))  # a black image is valid

    def test_sampling_settings_out_of_range_are_rejected(self):
        prior = Bruno.from_config(MODELS["8×8"]).prior()
        for settings in ({"n": 0}, {"temperature": -1.0}, {"temperature": math.nan}):
            with pytest.raises(ValueError, match=rf"`{next(iter(settings))}` must be at least"):
                prior.sample(**settings)

    def test_rows_that_are_not_finite_are_rejected(self):
        with pytest.raises(ValueError, match=r"`x` must be finite; got nan"):
            Bruno.from_config(MODELS["vector of 7"]).log_prob(torch.full((2, 7), math.nan))

    def test_one_element_is_not_enough_to_initialise(self):
        with pytest.raises(ValueError, match=r"`x` must have at least two elements, .*got \(1, 1, 8, 8\)"):
            Bruno.from_config(MODELS["8×8"]).initialise(torch.zeros(1, 1, 8, 8))

    def test_a_flow_that_does_not_return_vectors_is_rejected(self):
        with pytest.raises(ValueError, match=r"`flow` .*got \(1, 2, 2\). Put Flatten"):
            Bruno((1, 2, 2), Bijection(), StudentTProcess(4), Logit())
        with pytest.raises(ValueError, match=r"`shape` .*\(1, 4, 1\).*got \(1, 2, 2\)"):
            Bruno((1, 2, 2), Flatten((1, 4, 1)), StudentTProcess(4), Logit())

    def test_a_process_of_another_size_is_rejected(self):
        flow = Bruno.from_config(MODELS["8×8"]).flow
        with pytest.raises(ValueError, match=r"`process` must have 64 dimensions for \(1, 8, 8\); got 3"):
            Bruno((1, 8, 8), flow, StudentTProcess(3), Logit())

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ({"shape": 3}, "`shape` must be of type tuple or list; got int"),
            ({"flow": torch.nn.Linear(3, 3)}, "`flow` must be of type Bijection; got Linear"),
            ({"process": 3}, "`process` must be of type ExchangeableProcess; got int"),
            ({"preprocessing": None}, "`preprocessing` must be of type Pixels or Standardise; got NoneType"),
        ],
    )
    def test_parts_of_other_types_are_rejected(self, parts, message):
        whole = {"shape": (3,), "flow": DenseRealNVP((3,)), "process": StudentTProcess(3)}
        with pytest.raises(TypeError, match=re.escape(message)):
            Bruno(**{**whole, "preprocessing": Standardise((3,)), **parts})

    @pytest.mark.parametrize("generator", [0, np.random.default_rng()])
    def test_a_generator_of_another_kind_is_rejected(self, generator):
        model = Bruno.from_config(MODELS["vector of 7"])
        message = rf"`generator` must be a torch.Generator; got {type(generator).__name__}"
        for use in (model.log_prob, model.condition):
            with pytest.raises(TypeError, match=message):
                use(torch.zeros(2, 7), generator)
        with pytest.raises(TypeError, match=message):
            model.prior().sample(2, generator=generator)

    def test_labels_of_another_length_are_rejected(self, imputing_model):
        model, rows = imputing_model
        with pytest.raises(ValueError, match=r"`labels` must be one number for each of 8 rows; got 3"):
            model.impute(rows[0].masked_fill(rows[0] == rows[0, 0], torch.nan), torch.zeros(3))

    def test_an_imputer_that_was_not_fitted_imputes_nothing(self):
        model = Bruno.from_config(ModelConfig((3,), 0, flow=FlowConfig("dense", units=8), missing="impute"))
        with pytest.raises(ValueError, match=r"got missing numbers .*model\.fit_preprocessing"):
            model.impute(torch.tensor([[0.0, 1.0, torch.nan]]))

    def test_posteriors_of_different_models_do_not_merge(self):
        a, b = trained(MODELS["dense image"]), trained(MODELS["dense image"])
        with pytest.raises(ValueError, match=r"posterior of the same model"):
            a.prior().merge(b.prior())


@pytest.mark.parametrize(
    "flow",
    [FlowConfig(couplings=1000, units=2**14), FlowConfig(filters=2**14), FlowConfig("dense", units=2**16)],
)
def test_a_model_that_does_not_fit_into_memory_is_not_built(flow):
    with pytest.raises(ValueError, match=r"`flow` .*BRUNO_MAX_MEMORY"):
        Bruno.from_config(ModelConfig((1, 28, 28), flow=flow))


def test_an_integer_correlation_does_not_truncate_that_of_the_leading_dimensions():
    config = ModelConfig(
        (4,), levels=0, flow=FlowConfig("dense"), process=ProcessConfig(correlation=0, leading=2)
    )
    correlation = Bruno.from_config(config).process.correlation
    torch.testing.assert_close(correlation, torch.tensor([0.9, 0.9, 0.0, 0.0]), atol=1e-6, rtol=0)


# --- rows with missing numbers ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imputing_model() -> tuple[Bruno, torch.Tensor]:
    """A model of three columns that keep a fixed difference within a set, and the rows of 20 sets."""
    generator = torch.Generator().manual_seed(0)
    sets = 5 * torch.randn(20, 1, 3, generator=generator) + torch.randn(20, 8, 1, generator=generator)
    rows = (sets + 0.01 * torch.randn(20, 8, 3, generator=generator)).double()
    flow = FlowConfig("dense", couplings=2, units=8)
    model = Bruno.from_config(ModelConfig((3,), 0, flow=flow, missing="impute"))
    model.initialise(rows)
    model.imputer.fit(model.preprocessing(rows.flatten(0, 1))[0], torch.arange(20).repeat_interleave(8))
    return model, rows


def test_missing_numbers_are_imputed_from_their_set(imputing_model):
    model, rows = imputing_model
    holed = rows[0].clone()
    holed[3, 1] = holed[5, 0] = torch.nan
    torch.testing.assert_close(model.impute(holed), rows[0], atol=0.2, rtol=0)
    assert torch.equal(
        model.condition(holed).evidence.mean, model.condition(model.impute(holed)).evidence.mean
    )
    both = model.log_prob(torch.stack([holed, rows[1]]))
    torch.testing.assert_close(both[0], model.log_prob(model.impute(holed)))


def test_a_posterior_imputes_the_next_rows(imputing_model):
    model, rows = imputing_model
    posterior = model.condition(rows[:2, :7])
    holed = rows[:2, 7].clone()
    holed[0, 2] = torch.nan
    filled = posterior.impute(holed)
    assert not filled.isnan().any()
    assert torch.equal(filled[1], rows[1, 7])
    torch.testing.assert_close(posterior.score(holed), posterior.score(filled))
    torch.testing.assert_close(posterior.update(holed).evidence.mean, posterior.update(filled).evidence.mean)
    several = posterior.update(holed.unsqueeze(1).expand(2, 3, 3))
    assert several.evidence.count.tolist() == [10, 10]
    sets = torch.tensor([1, 0, 1])
    found, expected = posterior.impute(holed[[0, 0, 0]], sets), posterior[sets].impute(holed[0])
    torch.testing.assert_close(found, expected)


def test_missing_numbers_are_rejected_where_they_cannot_be_imputed(imputing_model):
    model, rows = imputing_model
    holed = rows[0].index_fill(1, torch.tensor([1]), torch.nan)
    with pytest.raises(ValueError, match=r"`x` must be finite; got nan.*impute"):
        model.encode(holed)
    plain = Bruno.from_config(ModelConfig((3,), 0, flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=r"`x` .*missing.*`missing` set to 'impute'"):
        plain.impute(holed)
    with pytest.raises(ValueError, match=r"`missing` .*images; got 'impute'"):
        ModelConfig((1, 4, 4), 256, missing="impute")
