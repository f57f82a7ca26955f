"""Muon: orthogonalised updates of matrices, AdamW for everything else."""

import pytest
import torch

from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig, TrainConfig
from bruno.training.muon import Muon, orthogonalised
from bruno.training.schedule import make_optimiser

RATE = 0.01


def stepped(shape, gradient, **group):
    """How a weight of this shape moves in a step, in units of the learning rate."""
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = gradient.clone()
    optimiser = Muon([{"params": [weight], "lr": torch.tensor(RATE), **group}], weight_decay=0.0, fused=True)
    optimiser.step()
    return weight.detach() / RATE


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 4, 50), (2, 50, 4), (1, 1, 7)])
def test_singular_values_become_approximately_one(shape):
    x = torch.randn(shape) * torch.tensor(1e-3)
    found = torch.linalg.svdvals(orthogonalised(x))
    assert found.min() > 0.6
    assert found.max() < 1.3


def test_singular_vectors_stay():
    x = torch.randn(1, 6, 20)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    diagonal = (u.mT @ orthogonalised(x) @ v.mT)[0]
    assert torch.allclose(diagonal, torch.diag(diagonal.diag()), atol=1e-4)


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (16, 8, 3, 3)])
def test_an_update_has_the_size_of_one_of_adam(shape):
    moved = stepped(shape, torch.randn(shape), orthogonal=True)
    assert moved.square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


def test_the_scale_of_a_gradient_does_not_matter():
    gradient = torch.randn(8, 8)
    small, large = (stepped((8, 8), scale * gradient, orthogonal=True) for scale in (1e-3, 1e3))
    assert torch.allclose(small, large, atol=1e-3)


def test_a_gradient_of_zero_changes_nothing():
    assert not stepped((4, 6), torch.zeros(4, 6), orthogonal=True).any()


def test_other_groups_are_updated_by_adamw():
    gradient = torch.randn(4, 6)
    expected = torch.nn.Parameter(torch.zeros(4, 6))
    expected.grad = gradient
    torch.optim.AdamW([expected], lr=torch.tensor(RATE), weight_decay=0.0, fused=True).step()
    assert torch.equal(stepped((4, 6), gradient), expected.detach() / RATE)


def test_a_closure_computes_the_gradients_first():
    weight = torch.nn.Parameter(torch.ones(2, 3, 4))
    optimiser = Muon([{"params": [weight], "lr": torch.tensor(RATE), "orthogonal": True}], fused=True)

    def closure():
        optimiser.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimiser.step(closure) == 24
    assert not torch.equal(weight, torch.ones(2, 3, 4))


def test_hidden_matrices_are_orthogonalised_and_nothing_else():
    flow = FlowConfig(squeeze_first=True, mixing=True, depth=1, blocks=1, filters=4, couplings=1, units=4)
    model = Bruno.from_config(ModelConfig((1, 8, 8), flow=flow))
    groups = make_optimiser(model, TrainConfig(optimiser="muon", weight_decay=0.1)).param_groups
    matrices, rest, process = (group["params"] for group in groups)
    names = {parameter: name for name, parameter in model.named_parameters()}
    hidden = ("_block.direction", "layers.0.direction", "layers.2.direction")
    assert all(names[weight].endswith(hidden) for weight in matrices)
    assert not any(names[weight].endswith(hidden) for weight in rest)
    assert {*matrices, *rest, *process} == {*model.parameters()}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
