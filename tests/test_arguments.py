"""Wrong arguments from Python: each is a ValueError or TypeError that names the argument."""

import math

import numpy as np
import pytest
import torch

from bruno import Bruno, Evidence, FlowConfig, GaussianProcess, ModelConfig, Posterior, StudentTProcess
from bruno.checks import check_count, check_rate, check_whole, check_whole_numbers
from bruno.config import DataConfig, ProcessConfig
from bruno.data import Examples, SetSampler, load_examples
from bruno.data.sampling import seeded_generator
from bruno.tasks import (
    FewShotProtocol,
    Index,
    classify,
    log_prob_by_position,
    measure_bits_per_dim,
    prior_samples,
)

pytestmark = pytest.mark.usefixtures("without_shape_checks")  # they would reject these calls first

MODEL = Bruno.from_config(ModelConfig((3,), levels=0, flow=FlowConfig("dense", couplings=2, units=4)))
POSTERIOR = MODEL.condition(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
SUPPORT = {"a": torch.zeros(1, 3), "b": torch.ones(1, 3)}
EXAMPLES = Examples(torch.zeros(4, 3), torch.tensor([0, 0, 1, 1]), ("a", "b"), levels=0)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: POSTERIOR.sample(temperature=math.inf), "temperature"),
        (lambda: POSTERIOR.sample(temperature=10**400), "temperature"),
        (lambda: POSTERIOR.sample(temperature=math.nan), "temperature"),
        (lambda: POSTERIOR.sample(2.0), "n"),
        (lambda: POSTERIOR.sample("2"), "n"),
        (lambda: Posterior.stack(["x"]), "posteriors"),
        (lambda: MODEL.decode(1.0), "z"),
        (lambda: MODEL.decode(np.zeros((3, 2))), "z"),
        (lambda: MODEL.impute(np.full(3, np.nan)), "x"),
        (lambda: MODEL.impute(np.zeros((4, 2))), "x"),
        (lambda: MODEL.process.log_prob(1.0), "z"),
        (lambda: Evidence.empty(-1), "dim"),
        (lambda: Evidence.empty(2.5), "dim"),
        (lambda: StudentTProcess(0), "dim"),
        (lambda: GaussianProcess(math.nan), "dim"),
        (lambda: ProcessConfig(dof=2), "process.dof"),
        (lambda: ProcessConfig(variance=-1), "process.variance"),
        (lambda: ProcessConfig(correlation=1), "process.correlation"),
        (lambda: ProcessConfig(leading_correlation=-1), "process.leading_correlation"),
        (lambda: ModelConfig((3,), levels=0, alpha=-1.0), "alpha"),
        (lambda: DataConfig(""), "data.name"),
        (lambda: load_examples(""), "name"),
        (lambda: load_examples("digits", group="machine"), "group"),
        (lambda: load_examples("digits", columns=["a"]), "columns"),
        (lambda: SetSampler(EXAMPLES).at([0.5]), "indices"),
        (lambda: SetSampler(EXAMPLES).at([math.inf]), "indices"),
        (lambda: check_count("sets", 2.5), "sets"),
        (lambda: seeded_generator("a"), "seed"),
        (lambda: seeded_generator(-1), "seed"),
        (lambda: seeded_generator(2**63), "seed"),
        (lambda: check_whole("sets", "three"), "sets"),
        (lambda: check_whole_numbers("prefixes", "5"), "prefixes"),
        (lambda: check_whole_numbers("prefixes", 5), "prefixes"),
        (lambda: check_whole_numbers("prefixes", [0, 2.5]), "prefixes"),
        (lambda: check_rate("rate", "1%"), "rate"),
        (lambda: check_rate("rate", math.nan), "rate"),
        (lambda: FewShotProtocol(ways=3), "ways"),
        (lambda: FewShotProtocol(shots="1"), "shots"),
        (lambda: classify(MODEL, SUPPORT, torch.zeros(1, 3), prior={"a": 1}), "prior"),
        (lambda: classify(MODEL, SUPPORT, torch.zeros(1, 3), temperature="hot"), "temperature"),
    ],
)
def test_a_wrong_argument_is_named(call, argument):
    with pytest.raises((ValueError, TypeError), match=f"`{argument}`"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda size: measure_bits_per_dim(
            MODEL, SetSampler(EXAMPLES), sets=None, set_size=2, generator=torch.Generator(), batch_size=size
        ),
        lambda size: log_prob_by_position(
            MODEL, SetSampler(EXAMPLES), sets=2, set_size=2, generator=torch.Generator(), batch_size=size
        ),
        lambda size: prior_samples(MODEL, 2, batch_size=size),
        lambda size: Index.of(MODEL, EXAMPLES, batch_size=size),
    ],
)
@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_no_elements_is_an_error(call, size):
    with pytest.raises(ValueError, match=rf"`batch_size` .*at least 1; got {size}"):
        call(size)


def test_whole_numbers_of_numpy_and_torch_are_whole():
    for number in (np.int64(2), np.uint8(2), torch.tensor(2)):
        assert len(POSTERIOR.sample(number).x) == 2
        check_count("sets", number)


def test_examples_are_saved_and_loaded_by_any_kind_of_path(tmp_path):
    EXAMPLES.save(str(tmp_path / "examples.npz"))
    assert torch.equal(Examples.load(str(tmp_path / "examples.npz")).elements, EXAMPLES.elements)
