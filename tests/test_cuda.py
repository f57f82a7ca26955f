"""The same laws on a GPU, where there is one: `pytest tests/test_cuda.py`."""

import copy

import pytest
import torch

from bruno import Bruno, Evidence, FlowConfig, GaussianProcess, ModelConfig, StudentTProcess
from bruno.flow import set_network_dtype

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


def test_model_in_bf16_trains_and_in_float32_inverts():
    config = ModelConfig((1, 28, 28), flow=FlowConfig(filters=16, blocks=2, units=64, squeeze_first=True))
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
