import io
import shutil
from functools import partial

import pytest
import torch
from torch import nn

from bruno.flow import (
    AffineCoupling,
    ConvNetwork,
    ConvRealNVP,
    DenseNetwork,
    DenseRealNVP,
    OddEven,
    initialise,
    set_compiled,
    set_dropout,
    set_network_dtype,
    set_recompute,
)
from bruno.flow.coupling import _compiled_forward

NETWORKS = {
    "dense": lambda **kwargs: (DenseNetwork(6, 3, 16, **kwargs), torch.randn(200, 6) * 5 + 2),
    "conv": lambda **kwargs: (ConvNetwork(2, 1, 8, 2, **kwargs), torch.randn(50, 2, 6, 6) * 5 + 2),
}
every_network = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)


@every_network
def test_initialisation_gives_every_layer_mean_0_and_variance_1(make):
    network, x = make()
    initialise(network, lambda: network(x))
    outputs = []
    for layer in network.modules():
        if hasattr(layer, "initialised"):
            layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    network(x)
    assert outputs
    for output in outputs:
        axes = [0, *range(2, output.ndim)]
        torch.testing.assert_close(output.mean(axes), torch.zeros(output.shape[1]), rtol=0, atol=1e-4)
        torch.testing.assert_close(output.std(axes), torch.ones(output.shape[1]), rtol=0.02, atol=0)


@every_network
def test_initialisation_happens_once_and_survives_saving(make):
    network, x = make()
    initialise(network, lambda: network(x))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    initialise(network, lambda: network(10 * x))
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    other, _ = make()
    other.load_state_dict(torch.load(file, weights_only=True))
    initialise(other, lambda: other(10 * x))
    for name, value in before.items():
        assert torch.equal(network.state_dict()[name], value)
        assert torch.equal(other.state_dict()[name], value)


@every_network
def test_networks_output_zero_at_first(make):
    for weight_norm in (True, False):
        network, x = make(weight_norm=weight_norm)
        assert not network(x).any()
        network(x).sum().backward()
        assert any(p.grad is not None and p.grad.any() for p in network.parameters())


@every_network
def test_weight_norm_can_be_switched_off(make):
    network, x = make(weight_norm=False)
    assert not any("magnitude" in name for name, _ in network.named_parameters())
    before = [p.clone() for p in network.parameters()]
    initialise(network, lambda: network(x))
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_a_constant_output_survives_initialisation():
    network = DenseNetwork(3, 2, 4)
    initialise(network, lambda: network(torch.zeros(5, 3)))
    assert all(p.isfinite().all() and p.abs().max() < 10 for p in network.parameters())


def test_samples_and_log_dets_stay_float32_when_networks_do_not():
    flow = DenseRealNVP((6,), couplings=2, units=8)
    for p in flow.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    x = torch.randn(4, 6)
    exact, _ = flow(x)
    set_network_dtype(flow, torch.bfloat16)
    seen = []
    flow.bijections[0].network.register_forward_hook(lambda m, i, output: seen.append(output.dtype))
    z, log_det = flow(x)
    assert seen == [torch.bfloat16]
    assert z.dtype == log_det.dtype == torch.float32
    torch.testing.assert_close(z, exact, rtol=0.05, atol=0.05)
    torch.testing.assert_close(flow.inverse(z)[0], x, rtol=0, atol=0.2)
    set_network_dtype(flow, None)
    assert torch.equal(flow(x)[0], exact)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputing_changes_only_memory_use(dropout):
    flow = ConvRealNVP((1, 8, 8), filters=4, blocks=1, dense_units=8)
    set_dropout(flow, dropout, torch.Generator().manual_seed(0))
    for p in flow.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    x = torch.randn(3, 1, 8, 8)

    def gradients():
        flow.zero_grad()
        z, log_det = flow(x)
        (z.square().sum() - log_det.sum()).backward()
        return [p.grad.clone() for p in flow.parameters()]

    plain = gradients()
    set_recompute(flow, True)
    torch.testing.assert_close(gradients(), plain)


@pytest.fixture
def compiler(request, monkeypatch):
    """Compile with another backend than in training; "eager" only traces."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))
    _compiled_forward.cache_clear()
    yield
    _compiled_forward.cache_clear()


NEEDS_GXX = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler", ["eager", pytest.param("inductor", marks=[pytest.mark.long, NEEDS_GXX])], indirect=True
)
@pytest.mark.usefixtures("compiler")
def test_compiling_changes_only_speed():
    coupling = AffineCoupling(OddEven(4, 0), DenseNetwork(2, 2, 4))
    for p in coupling.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    x = torch.randn(3, 4)
    set_dropout(coupling, 0.3, torch.Generator().manual_seed(0))
    plain = coupling(x)
    set_compiled(coupling, True)
    torch.testing.assert_close(coupling(x), plain)


def test_a_coupling_accepts_any_network():
    class Constant(nn.Module):
        def forward(self, x):
            return torch.cat([x * 0 + 0.5, x * 0 + 2], 1)

    x = torch.randn(3, 4)
    z, log_det = AffineCoupling(OddEven(4, 0), Constant())(x)
    assert torch.equal(z[:, ::2], x[:, ::2])
    torch.testing.assert_close(z[:, 1::2], x[:, 1::2] * torch.tensor(0.5).tanh().exp() + 2)
    torch.testing.assert_close(log_det, torch.full((3,), 2 * torch.tensor(0.5).tanh().item()))
