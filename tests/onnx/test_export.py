"""Exported graphs, run by onnxruntime, against torch. Tolerance: 1e-4, relative to 1 + |value|."""

import numpy as np
import onnxruntime as ort
import pytest
import torch

import bruno
from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig, ProcessConfig
from bruno.flow import AffineCoupling, Chain, DenseNetwork, OddEven
from bruno.flow.preprocessing import Standardise
from bruno.onnx import export_onnx
from bruno.onnx.functions import FUNCTIONS, given_noise
from bruno.process import GaussianProcess

DENSE = FlowConfig("dense", couplings=2, units=6)
SPLINE = FlowConfig("dense", couplings=2, units=6, coupling="spline", bins=2)
CONV = FlowConfig("conv", depth=1, filters=4, blocks=1, couplings=1, units=6)
CONV_SPLINE = FlowConfig(
    "conv",
    scales=1,
    depth=1,
    filters=4,
    blocks=1,
    couplings=1,
    units=6,
    squeeze_first=True,
    mixing=True,
    coupling="spline",
    bins=2,
    spline_scales=1,
)
CONFIGS = {
    "rows, affine": ModelConfig((3,), levels=0, flow=DENSE, process=ProcessConfig("gaussian")),
    "rows, spline": ModelConfig((3,), levels=0, flow=SPLINE, scales="auto"),
    "images, dense": ModelConfig((1, 2, 2), levels=2, flow=DENSE),
    "images, convolutional": ModelConfig((1, 4, 4), levels=256, flow=CONV),
    "images, convolutional spline": ModelConfig((1, 4, 4), levels=17, pixels="mixture", flow=CONV_SPLINE),
}
pytestmark = pytest.mark.usefixtures("without_shape_checks")


def elements_of(config: ModelConfig) -> torch.Tensor:
    x = torch.rand(20, *config.shape)
    if config.levels:
        return (x * config.levels).floor() + 0.5
    # A time in seconds since 1970, heavy tails, and positive numbers over several orders of magnitude.
    normal = torch.randn(20, 3, dtype=torch.double)
    return torch.stack([1.7e9 + 60 * normal[:, 0], normal[:, 1] ** 3, normal[:, 2].exp() ** 3], 1)


def model_of(config: ModelConfig, x: torch.Tensor) -> Bruno:
    model = Bruno.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.initialise(x)
    return model.requires_grad_(False)


def run(path, *, optimised: bool = False, **arguments) -> list[np.ndarray]:
    options = ort.SessionOptions()
    if not optimised:  # optimisation takes longer than everything else here
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {name: value.contiguous().numpy() for name, value in arguments.items()})


def evidence_of(posterior) -> dict[str, torch.Tensor]:
    return {name: getattr(posterior.evidence, name) for name in ("count", "mean", "scatter")}


def assert_close(found: np.ndarray, expected: torch.Tensor, tolerance: float = 1e-4):
    assert found.shape == expected.shape
    assert found.dtype == expected.numpy().dtype
    assert np.allclose(found, expected.numpy(), rtol=tolerance, atol=tolerance)


# Convolutions and splines are also in the last of the models, and affine couplings in the dense ones.
COVERED = ("images, convolutional", "rows, spline")
GRAPHS = [pytest.param(name, marks=[pytest.mark.long] * (name in COVERED)) for name in CONFIGS]


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_agree_with_torch(name, tmp_path):
    config = CONFIGS[name]
    x = elements_of(config)
    model = model_of(config, x)
    export_onnx(model, tmp_path)
    for batch in (1, 7):
        z, log_det = model.encode(x[:batch])
        found_z, found_log_det = run(tmp_path / "encode.onnx", x=x[:batch])
        assert_close(found_z, z)
        assert_close(found_log_det, log_det)
        assert_close(run(tmp_path / "decode.onnx", z=z)[0], model.decode(z))
        posterior = model.condition(x[:12].view(4, 3, *config.shape))
        found = run(tmp_path / "score.onnx", x=x[:batch], **evidence_of(posterior))[0]
        assert_close(found, posterior.score(x[:batch].unsqueeze(1)))


@pytest.mark.parametrize("name", ["rows, affine", "images, dense"])
def test_graphs_of_latents_agree_with_torch(name, tmp_path):
    config = CONFIGS[name]
    x = elements_of(config)
    model = model_of(config, x)
    export_onnx(model, tmp_path, functions=("score_latents", "predict", "sample_latents"))
    posterior, z = model.condition(x[:15].view(5, 3, *config.shape)), model.encode(x).z
    evidence = evidence_of(posterior)
    score, log_prior = run(tmp_path / "score_latents.onnx", optimised=True, z=z, **evidence)
    assert_close(score, posterior.score(x.unsqueeze(1)))
    assert_close(log_prior, model.process.log_prob(z))
    predictive = model.process.predictive(posterior.evidence)
    location, scale, dof = run(tmp_path / "predict.onnx", **evidence)
    assert_close(location, predictive.loc)
    assert_close(scale, predictive.scale)
    assert_close(dof, getattr(predictive, "df", torch.full_like(predictive.loc, torch.inf)))
    noise = torch.rand(*([2] if hasattr(predictive, "df") else []), 6, 5, model.dim)
    with given_noise(noise):
        samples = predictive.sample((6,))
    for temperature in (torch.tensor(1.0), torch.tensor(0.5)):
        found = run(tmp_path / "sample_latents.onnx", **evidence, noise=noise, temperature=temperature)[0]
        assert_close(found, predictive.loc + temperature * (samples - predictive.loc))


def test_a_model_without_a_config_is_exported_by_its_process(tmp_path):
    flow = Chain([AffineCoupling(OddEven(4, parity), DenseNetwork(2, 2, 4)) for parity in (0, 1)])
    model = Bruno((4,), flow, GaussianProcess(4), Standardise((4,))).requires_grad_(False)
    export_onnx(model, tmp_path, functions=("sample_latents",))
    evidence = {name: value.unsqueeze(0) for name, value in evidence_of(model.prior()).items()}
    found = run(
        tmp_path / "sample_latents.onnx", **evidence, noise=torch.rand(6, 1, 4), temperature=torch.ones(())
    )
    assert found[0].shape == (6, 1, 4)


def test_an_empty_set_scores_0(tmp_path):
    config = CONFIGS["images, dense"]
    x = elements_of(config)
    model = model_of(config, x)
    export_onnx(model, tmp_path, functions=("score",))
    evidence = {name: value.unsqueeze(0) for name, value in evidence_of(model.prior()).items()}
    assert (run(tmp_path / "score.onnx", x=x, **evidence)[0] == 0).all()


@pytest.mark.slow
def test_all_graphs_share_one_file_of_weights(tmp_path):
    config = CONFIGS["images, convolutional"]
    model = model_of(config, elements_of(config))
    export_onnx(model, tmp_path / "one", functions=("decode",))
    export_onnx(model, tmp_path / "two", functions=("encode", "decode"))
    one, two = ((tmp_path / name / "weights.bin").stat().st_size for name in ("one", "two"))
    assert two < 1.1 * one


def test_half_precision_gives_the_same_numbers_as_a_file_in_half_precision(tmp_path):
    config = CONFIGS["images, dense"]
    x = elements_of(config)
    model = model_of(config, x)
    bruno.save(model, tmp_path / "half.safetensors", half=True)
    export_onnx(model, tmp_path, functions=("encode",), half=True)
    loaded = bruno.load(tmp_path / "half.safetensors")
    assert_close(run(tmp_path / "encode.onnx", optimised=True, x=x)[0], loaded.encode(x).z)


def test_an_unknown_function_is_reported(tmp_path):
    with pytest.raises(ValueError, match=r"`functions` .*'decoder'"):
        export_onnx(Bruno.from_config(CONFIGS["rows, affine"]), tmp_path, functions=("decoder",))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`folder` .*file"):
        export_onnx(Bruno.from_config(CONFIGS["rows, affine"]), tmp_path / "file")


def test_every_function_is_described():
    assert all(f"    {name} " in export_onnx.__doc__ for name in FUNCTIONS)
