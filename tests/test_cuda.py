"""The same laws on a GPU, if one is available: `pytest tests/test_cuda.py`."""

import copy
import math

import pytest
import torch
from attrs import evolve

from bruno import Bruno, Evidence, FlowConfig, GaussianProcess, ModelConfig, StudentTProcess
from bruno.config import TrainConfig
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.flow import set_network_dtype
from bruno.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", [StudentTProcess, GaussianProcess])
def test_process_agrees_with_the_cpu(kind):
    process = kind(30, correlation=torch.linspace(0, 0.999, 30))
    z = 1 + torch.randn(4, 25, 30)
    evidence = Evidence.of(torch.randn(4, 3, 30))
    gradients = {}
    for device in ("cpu", "cuda"):
        moved = copy.deepcopy(process).to(device)
        x = z.clone().to(device).requires_grad_()
        result = moved.step_log_prob(x, evidence.to(device))
        result.square().mean().backward()
        gradients[device] = [
            t.cpu() for t in (result.detach(), x.grad, *(p.grad for p in moved.parameters()))
        ]
    for a, b in zip(gradients["cpu"], gradients["cuda"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))


def test_a_step_can_be_captured_in_a_graph():
    process = StudentTProcess(30).cuda()
    z = torch.randn(4, 25, 30, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        process.step_log_prob(z).mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = process.step_log_prob(z)
    with torch.no_grad():
        z.copy_(torch.randn_like(z))
    graph.replay()
    torch.testing.assert_close(result, process.step_log_prob(z))


@pytest.mark.parametrize("coupling", ["affine", "spline"])
def test_model_in_bf16_trains_and_in_float32_inverts(coupling):
    flow = FlowConfig(filters=16, blocks=2, units=64, squeeze_first=True, coupling=coupling)
    config = ModelConfig((1, 28, 28), flow=flow)
    model = Bruno.from_config(config).cuda()
    x = torch.randint(0, 256, (4, 5, 1, 28, 28), device="cuda")
    model.initialise(x)
    set_network_dtype(model, torch.bfloat16)
    log_prob = model.log_prob(x, torch.Generator("cuda").manual_seed(0))
    assert log_prob.dtype == torch.float32
    log_prob.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    set_network_dtype(model, None)
    torch.testing.assert_close(model.decode(model.encode(x).z), x + 0.5, rtol=0, atol=0.02)
    samples = model.condition(x).sample(3, generator=torch.Generator("cuda").manual_seed(0))
    assert samples.images.shape == (3, 4, 1, 28, 28)


def test_elements_may_be_on_the_cpu():
    model = Bruno.from_config(
        ModelConfig((4,), levels=0, flow=FlowConfig("dense", couplings=2, units=8))
    ).cuda()
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(model.log_prob(x), model.log_prob(x.cuda()))
    posterior = model.condition(x[0])
    torch.testing.assert_close(posterior.score(x[1]), posterior.score(x[1].cuda()))


def trainer(size: int = 28, coupling: str = "affine", **settings) -> Trainer:
    torch.manual_seed(0)
    flow = FlowConfig(filters=8, blocks=1, units=32, squeeze_first=True, coupling=coupling)
    config = ModelConfig((1, 28, 28), pixels="mixture", flow=flow)
    images = torch.randint(0, 256, (200, 1, size, size), dtype=torch.uint8)
    examples = Examples(images, torch.arange(200) // 20, tuple(map(str, range(10))))
    plan = TrainConfig(steps=20, batch=4, set_size=5, episodes=2, way=3, precision="float32", ema=0.9)
    sampler = SetSampler(examples, rotations=True, device="cuda")
    return Trainer(Bruno.from_config(config).cuda(), sampler, evolve(plan, **settings))


@pytest.mark.parametrize(
    ("optimiser", "shared", "size", "coupling"),
    [
        ("adamw", False, 28, "affine"),
        ("adamw", True, 105, "affine"),
        ("rmsprop", False, 28, "affine"),
        ("adamw", False, 28, "spline"),
        ("muon", False, 28, "spline"),
    ],
)
def test_a_captured_step_is_the_same_step(optimiser, shared, size, coupling):
    settings = {"optimiser": optimiser, "discriminative": 0.1, "clip": 5.0, "shared": shared}
    settings |= {"coupling": coupling}
    settings |= {"mirror": True, "shift": 1, "slant": 0.1, "warp": 0.1, "size": size, "onset": 0.2}
    settings |= {"restyle": 0.5 * (size > 28), "dropout": 0.2}
    eager, captured = trainer(graph=False, **settings), trainer(**settings)
    for a, b in zip(eager.advance(10), captured.advance(10), strict=True):
        assert not b.skipped
        assert b.loss == pytest.approx(a.loss, rel=2e-3)
        assert b.rate == a.rate
        assert (b.loss > b.bits_per_dim) == (b.index > 4)  # from the onset on
    assert torch.equal(eager.generator.get_state(), captured.generator.get_state())
    x = torch.randint(0, 256, (2, 3, 1, 28, 28), device="cuda")
    assert captured.trained().log_prob(x).isfinite().all()


@pytest.mark.parametrize("noise", ["none", "varied"])
def test_episodes_begin_in_a_captured_run(noise):
    settings = {"discriminative": 0.5, "onset": 0.4, "episode_noise": noise, "shift": 1}
    eager, captured = trainer(graph=False, **settings), trainer(**settings)
    steps = list(zip(eager.advance(8) + eager.advance(8), captured.advance(16), strict=True))
    for a, b in steps:
        assert b.loss == pytest.approx(a.loss, rel=2e-3)
        assert math.isnan(b.accuracy) == (b.index <= 8)
    assert torch.equal(eager.generator.get_state(), captured.generator.get_state())


def test_a_captured_run_resumes_where_it_stopped():
    whole, part = trainer(), trainer()
    expected = whole.advance(12)
    part.advance(6)
    resumed = trainer()
    resumed.restore(part.state())
    for a, b in zip(expected[6:], resumed.advance(6), strict=True):
        assert b.loss == pytest.approx(a.loss, rel=2e-3)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_captured_step_that_is_not_finite_changes_nothing(optimiser):
    current = trainer(optimiser=optimiser)
    current.advance(6)
    with torch.no_grad():
        current.model.flow.bijections[-1].bound.fill_(torch.nan)
        before = [p.clone() for p in current.model.parameters()]
        assert all(step.skipped for step in current.advance(2))
        for a, b in zip(before, current.model.parameters(), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
        current.model.flow.bijections[-1].bound.fill_(1.0)
    assert not current.step().skipped


@pytest.mark.parametrize("coupling", ["affine", "spline"])
def test_a_captured_step_can_recompute_its_activations(coupling):
    plain = trainer(coupling=coupling, dropout=0.2)
    recomputed = trainer(coupling=coupling, dropout=0.2, recompute=True)
    for a, b in zip(plain.advance(8), recomputed.advance(8), strict=True):
        assert not b.skipped
        assert b.loss == pytest.approx(a.loss, rel=2e-3)
