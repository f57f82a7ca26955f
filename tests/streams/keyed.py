"""A small model of rows with a calibration, and a stream of several machines, without training."""

import math
from functools import cache
from pathlib import Path

import numpy as np
import torch

from bruno import Bruno, FlowConfig, ModelConfig, ProcessConfig
from bruno.data import Examples, SetSampler
from bruno.streams.judgements import Judgements
from bruno.tasks.anomaly import reference_density
from bruno.tasks.calibration import GroupCalibration, fixed_cutoffs
from bruno.tasks.detector import Detector
from bruno.tasks.groups import Groups
from bruno.trained import KeyedDetector, Trained

DIM = 4
FIELDS = (
    "score",
    "seen",
    "position",
    "threshold",
    "outlier",
    "out_of_distribution",
    "p",
    "exact",
    "in_evidence",
)


def small_model(coupling: str = "affine", kind: str = "student-t", scales: str = "auto") -> Bruno:
    """A dense flow with random weights; its columns are on a linear, a log and an asinh scale."""
    torch.manual_seed(0)
    config = ModelConfig(
        (DIM,),
        levels=0,
        flow=FlowConfig("dense", couplings=2, units=8, coupling=coupling),
        process=ProcessConfig(kind=kind, dof=30.0, correlation=0.8),
        missing="impute",
        scales=scales,
    )
    model = Bruno.from_config(config)
    rows = torch.from_numpy(machines(40, 20, seed=1)).reshape(-1, DIM)
    model.initialise(rows)
    with torch.no_grad():
        for parameter in model.flow.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.imputer.fit(model.preprocessing(rows)[0], torch.arange(40).repeat_interleave(20))
    return model.requires_grad_(False)


def machines(count: int, rows: int, seed: int) -> np.ndarray:
    """Rows of machines that differ, (count, rows, DIM)."""
    random = np.random.default_rng(seed)
    normal = random.normal(size=(count, 1, DIM)) + 0.3 * random.normal(size=(count, rows, DIM))
    normal[..., 1] = np.exp(normal[..., 1])
    normal[..., 2] = normal[..., 2] ** 3
    return normal


@cache
def trained() -> Trained:
    return Trained(small_model(), None, Path("nowhere"))


@cache
def calibration() -> GroupCalibration:
    model, generator = trained().model, torch.Generator().manual_seed(0)
    x = torch.from_numpy(machines(20, 24, seed=2)).reshape(-1, DIM)
    examples = Examples(x, torch.arange(20).repeat_interleave(24), tuple(map(str, range(20))))
    reference = reference_density(model, SetSampler(examples), generator=generator)
    groups = Groups.of(model, examples, generator=generator, reference=reference)
    cutoffs = fixed_cutoffs(model, groups)
    return GroupCalibration(model, groups, cutoffs, -80.0, "", True, reference=reference)


@cache
def detector(count_all: bool = False, rate: float = 0.1) -> Detector:
    return Detector.calibrated(calibration(), rate=rate, count_all=count_all)


def stream(count: int, rows: int, seed: int = 3) -> tuple[list[str], np.ndarray]:
    """Rows of several machines in random order, 5 % of them outliers, and their keys."""
    random = np.random.default_rng(seed)
    x = machines(count, rows, seed)
    faulty = random.random((count, rows)) < 0.05
    x[faulty] += random.normal(0, 3, (int(faulty.sum()), DIM))
    order = random.permutation(np.repeat(np.arange(count), rows))
    position, found = np.zeros(count, int), []
    for machine in order:
        found.append(x[machine, position[machine]])
        position[machine] += 1
    return [f"m{machine}" for machine in order], np.stack(found)


def keyed(store: object = ":memory:", **settings: object) -> KeyedDetector:
    settings = {"detector": detector(), **settings}
    return KeyedDetector(trained(), store, **settings)


ARRAYS = [name for name in Judgements.__annotations__ if name != "evidence"]


def in_steps(judge: KeyedDetector, keys: list[str], x: np.ndarray, size: int, **more: object) -> Judgements:
    """The judgements of all rows, in batches of `size`."""
    found = [judge.step(keys[i : i + size], x[i : i + size], **more) for i in range(0, len(keys), size)]
    return Judgements(*(np.concatenate([getattr(one, name) for one in found]) for name in ARRAYS))


def assert_same(first: Judgements, second: Judgements) -> None:
    """Equal, bit for bit."""
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


def assert_same_states(first: KeyedDetector, second: KeyedDetector) -> None:
    """Every set of both has the same state, bit for bit."""
    names = list(first)
    assert names == list(second)
    assert first.store.states(names) == second.store.states(names)


NAN = math.nan
