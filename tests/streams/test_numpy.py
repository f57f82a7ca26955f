"""The flow and the process in numpy equal those in torch, and a row is the same in any batch."""

import numpy as np
import pytest
import torch
from streams.keyed import DIM, machines, small_model

from bruno import Bruno, Evidence, FlowConfig, ModelConfig
from bruno.flow import AffineCoupling
from bruno.process import GaussianProcess, StudentTProcess
from bruno.streams.densities import RowDensities
from bruno.streams.encoder import RowEncoder, TorchEncoder, encoder_of
from bruno.streams.evidence import SetEvidence, evidence_inside, with_element, without_element
from bruno.tasks.robust_evidence import scores_within

ROWS = machines(5, 20, seed=7).reshape(-1, DIM)


@pytest.fixture(params=["affine", "spline"])
def model(request) -> Bruno:
    return small_model(request.param)


@pytest.mark.parametrize("scales", ["auto", "linear"])
@pytest.mark.parametrize("coupling", ["affine", "spline"])
def test_rows_have_the_latents_of_the_model(coupling, scales):
    model = small_model(coupling, scales=scales)
    encode = encoder_of(model)
    assert isinstance(encode, RowEncoder)
    z, log_det = encode(ROWS)
    expected = model.encode(torch.from_numpy(ROWS))
    np.testing.assert_allclose(z, expected.z.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(log_det, expected.log_det.numpy(), rtol=1e-5, atol=1e-5)


def test_far_rows_have_finite_latents_like_those_of_the_model(model):
    far = np.array([[1e20, -1e30, 3e38, 0.0], [-3e38] * 4, [1e9, 1e9, -1e9, 1e9]])
    z, log_det = encoder_of(model)(far)
    expected = model.encode(torch.from_numpy(far))
    assert np.isfinite(z).all()
    np.testing.assert_allclose(z, expected.z.numpy(), rtol=1e-5)
    np.testing.assert_allclose(log_det, expected.log_det.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 8, 31])
def test_latents_of_a_row_do_not_depend_on_its_batch(model, size):
    encode = encoder_of(model)
    whole = encode(ROWS)
    for start in range(0, len(ROWS), size):
        part = encode(ROWS[start : start + size])
        np.testing.assert_array_equal(part.z, whole.z[start : start + size])
        np.testing.assert_array_equal(part.log_det, whole.log_det[start : start + size])


def test_no_rows_have_no_latents(model):
    z, log_det = encoder_of(model)(ROWS[:0])
    assert z.shape == (0, DIM)
    assert log_det.shape == (0,)


def test_wide_networks_have_larger_tiles_and_the_same_latents():
    torch.manual_seed(0)
    model = Bruno.from_config(ModelConfig((DIM,), levels=0, flow=FlowConfig("dense", couplings=3, units=300)))
    model.initialise(torch.from_numpy(ROWS))
    encode = RowEncoder(model.requires_grad_(False))
    np.testing.assert_array_equal(encode(ROWS[:1]).z, encode(ROWS).z[:1])
    np.testing.assert_allclose(encode(ROWS).z, model.encode(torch.from_numpy(ROWS)).z, rtol=1e-5, atol=1e-5)


def test_a_single_column_has_no_couplings():
    model = Bruno.from_config(ModelConfig((1,), levels=0, flow=FlowConfig("dense", couplings=2, units=4)))
    model.initialise(torch.from_numpy(ROWS[:, :1]))
    np.testing.assert_allclose(encoder_of(model)(ROWS[:, :1]).z, model.latents(ROWS[:, :1]), rtol=1e-5)


def test_other_models_are_encoded_in_torch(tiny_images):
    encode = encoder_of(tiny_images)
    assert isinstance(encode, TorchEncoder)
    x = torch.randint(0, 256, (5, 1, 2, 2))
    np.testing.assert_allclose(encode(x).z, tiny_images.latents(x).numpy(), rtol=1e-6)


def test_a_flow_of_other_parts_is_not_exported():
    model = small_model()
    model.flow.bijections[0].network = torch.nn.Linear(2, 4)
    assert isinstance(model.flow.bijections[0], AffineCoupling)
    assert isinstance(encoder_of(model), TorchEncoder)


@pytest.fixture
def tiny_images() -> Bruno:
    config = ModelConfig(shape=(1, 2, 2), flow=FlowConfig(kind="dense", couplings=2, units=4))
    return Bruno.from_config(config).requires_grad_(False)


# --- densities -------------------------------------------------------------------------------------------

PROCESSES = [
    StudentTProcess(3, dof=[2.5, 30.0, 1e6], variance=[0.5, 1.0, 2.0], correlation=[0.1, 0.9, 0.5]).double(),
    GaussianProcess(3, variance=[0.5, 1.0, 2.0], correlation=[0.1, 0.9, 0.5], mean=0.3).double(),
]


@pytest.mark.parametrize("process", PROCESSES, ids=["student", "gaussian"])
@pytest.mark.parametrize("count", [0, 1, 2, 50, 3000])
def test_densities_match_the_process(process, count):
    z = torch.randn(7, count + 1, 3, dtype=torch.double)
    evidence = Evidence.of(z[:, :-1]) if count else Evidence.empty(3, (7,))
    expected = process.log_prob(z[:, -1], evidence).detach().numpy()
    count_, mean, scatter = (
        part.double().numpy() for part in (evidence.count, evidence.mean, evidence.scatter)
    )
    densities = RowDensities(process)
    found = densities(z[:, -1].numpy(), count_, mean, scatter)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    one = [
        densities(z[i : i + 1, -1].numpy(), count_[i : i + 1], mean[i : i + 1], scatter[i : i + 1])
        for i in range(7)
    ]
    np.testing.assert_array_equal(found, np.concatenate(one))


@pytest.mark.parametrize("process", PROCESSES, ids=["student", "gaussian"])
def test_one_set_has_the_density_that_it_has_in_a_batch(process):
    count = np.array([0.0, 1.0, 31.0, 32.0, 33.5, 2047.0, 2048.0, 1e6])
    random = np.random.default_rng(0)
    z, mean, scatter = random.normal(size=(3, len(count), 3))
    scatter = count[:, None] * scatter**2
    densities = RowDensities(process)
    found = densities(z, count, mean, scatter)
    for _ in range(2):  # the second time, coefficients are known
        one = [densities(z[i], n, mean[i], scatter[i]) for i, n in enumerate(count.tolist())]
        np.testing.assert_array_equal(found, np.stack(one))
    np.testing.assert_array_equal(densities.prior(z), np.stack([densities.prior(one) for one in z]))


def test_coefficients_take_bounded_memory(monkeypatch):
    monkeypatch.setattr("bruno.streams.densities._BLOCKS_BYTES", 10_000)
    densities, z = RowDensities(PROCESSES[0]), np.zeros(3)
    for n in range(0, 5000, 10):
        densities(z, float(n), z, z)
    assert len(densities._blocks) <= 2


def test_scores_within_sets_match_robust_evidence():
    model = small_model()
    model = Bruno(model.shape, model.flow, model.process.double(), model.preprocessing)
    z, inside = torch.randn(6, 9, DIM, dtype=torch.double), torch.rand(6, 9) < 0.6
    inside[0], inside[1] = False, torch.arange(9) == 3
    densities = RowDensities(model.process)
    found = densities.scores_within(z.numpy(), inside.numpy(), densities.prior(z.view(-1, DIM).numpy()))
    np.testing.assert_allclose(found, scores_within(model, z, inside).numpy(), rtol=1e-9, atol=1e-9)


# --- evidence --------------------------------------------------------------------------------------------


def test_an_element_that_is_added_and_removed_leaves_the_evidence_unchanged():
    z = np.random.default_rng(0).normal(size=(6, 9, 3))
    given = evidence_inside(z[:, :-1], np.ones((6, 8), bool))
    given = given._replace(n=given.n[:, None])
    more = with_element(given, z[:, -1])
    whole = evidence_inside(z, np.ones((6, 9), bool))
    for found, expected in zip((more.n[:, 0], *more[1:]), whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    for found, expected in zip(without_element(more, z[:, -1]), given, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_the_last_element_leaves_no_evidence():
    far = np.array([1e9, -3.0])
    one = SetEvidence(1.0, far, np.zeros(2))
    two = with_element(one, np.array([0.1, 0.2]))
    np.testing.assert_array_equal(without_element(two, far).scatter, 0.0)
    assert without_element(one, far).n == 0
    np.testing.assert_array_equal(without_element(one, far).mean, 0.0)
