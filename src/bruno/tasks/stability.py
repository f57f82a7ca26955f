"""Stability of training under stress, with a Student-t and with a Gaussian process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Generator, Tensor

from bruno.config import FlowConfig, ModelConfig, ProcessConfig, TrainConfig, to_dict
from bruno.data import Examples, check_source, load_examples
from bruno.data.sampling import SetSampler
from bruno.devices import resolve_device
from bruno.files import atomic_write
from bruno.model import Bruno
from bruno.settings import check_same
from bruno.tasks.evaluation import measure_bits_per_dim
from bruno.tasks.progress import Progress
from bruno.training.trainer import Step, Trainer

_FINAL_SETS = 32  # sets on which a trained model of the study is measured


@dataclass(frozen=True)
class Variant:
    """Settings of one model of the study.

    Attributes:
        name: name in the results.
        weight_norm: weight-normalise the flow's networks, with data-dependent initialisation.
        rate: factor on the study's learning rate.
        correlation: range from which the initial correlation of each dimension is drawn uniformly.
        white_every: the last image of every set is white at every `white_every`-th step; 0 for never.
    """

    name: str
    weight_norm: bool = True
    rate: float = 1.0
    correlation: tuple[float, float] = (0.1, 0.1)
    white_every: int = 0

    def __post_init__(self) -> None:
        low, high = self.correlation
        if not 0 < low <= high < 1:
            raise ValueError(f"`correlation` must be a range between 0 and 1; got {self.correlation}.")
        if self.white_every < 0:
            raise ValueError(f"`white_every` must be at least 0; got {self.white_every}.")


# The left plot of the paper compares training with and without weight norm, at initial correlations from a
# range; the middle plot has twice the learning rate, the right plot high initial correlations. The text of
# the paper describes outliers, but not in which plots they are used: here, they are a separate variant.
VARIANTS = (
    Variant("ordinary"),
    Variant("weight norm, mixed correlations", correlation=(0.1, 0.95)),
    Variant("no weight norm, mixed correlations", weight_norm=False, correlation=(0.1, 0.95)),
    Variant("high rate", rate=2.0),
    Variant("high correlation", correlation=(0.95, 0.95)),
    Variant("white outliers", white_every=100),
)

# Convolutional as in the paper, but small: a step on 8 × 8 digits takes about 50 ms on one CPU core.
STUDY_FLOW = FlowConfig(filters=16, blocks=1, couplings=2, units=64)
# The paper's optimiser at a constant learning rate; a schedule or gradient clipping would hide instability.
STUDY_TRAIN = TrainConfig(
    optimiser="rmsprop", process_learning_rate=1.0, warmup=0.0, decay="none", batch=8, precision="float32"
)
# The network and the batch size of the paper: for a GPU.
FULL_FLOW, FULL_TRAIN = FlowConfig(), evolve(STUDY_TRAIN, batch=32)


@dataclass(frozen=True)
class Curve:
    """Learning curve of one model of the study.

    Attributes:
        process: "student-t" or "gaussian".
        variant: name of the variant.
        seed: seed of weights, correlations and sets; all variants and processes train on the same sets.
        bits_per_dim: bits/dim of the batch of each step; NaN or infinite where training diverged.
        skipped: number of steps skipped because their gradient was not finite.
        final: bits/dim of new sets of the same examples after the last step, without outliers.
    """

    process: str
    variant: str
    seed: int
    bits_per_dim: tuple[float, ...]
    skipped: int
    final: float


@dataclass(frozen=True)
class StabilityStudy:
    """The learning curves of a study, the name of its data, and the settings that all models share."""

    name: str
    steps: int
    curves: tuple[Curve, ...]
    flow: FlowConfig = STUDY_FLOW
    train: TrainConfig = STUDY_TRAIN

    @property
    def config(self) -> dict[str, Any]:
        """The shared settings, ready for JSON."""
        return {"steps": self.steps, "flow": to_dict(self.flow), "train": to_dict(self.train)}


def stability_study(
    examples: Examples,
    *,
    variants: Sequence[Variant] = VARIANTS,
    processes: Sequence[str] = ("student-t", "gaussian"),
    steps: int = 500,
    seeds: Sequence[int] = (0,),
    flow: FlowConfig = STUDY_FLOW,
    train: TrainConfig = STUDY_TRAIN,
    alpha: float = 1e-6,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    progress: Progress | None = None,
) -> list[Curve]:
    """Learning curves of every variant, with each process and each seed, in this order: appendix G.

    A model that diverges is a result, not an error.

    Args:
        examples: the data; images if a variant has white outliers.
        variants: the settings to compare.
        processes: "student-t", "gaussian" or both.
        steps: training steps of each model.
        seeds: seeds of each variant and process.
        flow: the flow of all models, except for the settings of a variant.
        train: the training settings of all models, except for those of a variant.
        alpha: α of the logit preprocessing.
        device: the device to train on.
        folder: each curve is written to this folder as soon as its model is trained, so that a study that was
            stopped continues with the next model. Curves of other settings raise ValueError.
        progress: called as progress(done, total), in steps of all models.
    """
    if not examples.is_images and any(variant.white_every for variant in variants):
        raise ValueError("`examples` must be images for variants with white outliers; got real numbers.")
    sampler = _WhiteSampler(examples, device)
    runs = list(itertools.product(variants, processes, seeds))
    curves = []
    for number, (variant, process, seed) in enumerate(runs):
        own_flow = evolve(flow, weight_norm=variant.weight_norm)
        model = ModelConfig(
            examples.shape, examples.levels, alpha=alpha, flow=own_flow, process=ProcessConfig(process)
        )
        own_train = evolve(train, steps=steps, learning_rate=train.learning_rate * variant.rate, seed=seed)
        kept = None if folder is None else folder / f"{variant.name}, {process}, seed {seed}.json"
        settings = {"model": to_dict(model), "train": to_dict(own_train), "variant": asdict(variant)}
        curve = None if kept is None else _read_curve(kept, settings)
        if curve is None:
            fresh = _fresh_model(model, variant.correlation, seed).to(device)
            trainer, trained = Trainer(fresh, sampler, own_train), []
            for step in _steps(trainer, sampler, variant):
                trained.append(step)
                if progress is not None:
                    progress(number * steps + step.index, len(runs) * steps)
            curve = _curve(trainer, trained, process, variant.name)
            if kept is not None:
                _write_curve(kept, settings, curve)
        curves.append(curve)
    return curves


def stability_studies(
    data: Sequence[str],
    out: str | Path,
    *,
    steps: int = 500,
    full_size: bool = False,
    data_dir: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[StabilityStudy]:
    """Yield the study of each dataset, with all variants and both processes, once it is complete.

    Args:
        data: known datasets, or paths of user data.
        out: the folder in which each curve is kept as soon as its model is trained, in curves-NAME; studies
            that were stopped continue there.
        steps: training steps of each model.
        full_size: train the network of the paper with its batch size, not a small one: on a GPU.
        data_dir: the folder of published datasets; $BRUNO_DATA by default.
        device: "auto", "cpu", "cuda" or "cuda:NUMBER".
        seed: of each variant and process.
        progress: called as progress(done, total), in steps of all models of all datasets.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"`out` must be a folder; {out} is a file.")
    device = resolve_device(device)
    flow, train = (FULL_FLOW, FULL_TRAIN) if full_size else (STUDY_FLOW, STUDY_TRAIN)
    # All are loaded before the first is trained on: training takes minutes.
    for name in data:
        check_source(name)
    loaded = {name: load_examples(name, data_dir=data_dir) for name in data}
    for number, (path, examples) in enumerate(loaded.items()):
        name = Path(path).stem
        curves = stability_study(
            examples,
            steps=steps,
            seeds=(seed,),
            flow=flow,
            train=train,
            device=device,
            folder=out / f"curves-{name}",
            progress=None if progress is None else _part_of(progress, number, len(loaded)),
        )
        yield StabilityStudy(name, steps, tuple(curves), flow, train)


def _part_of(progress: Progress, number: int, count: int) -> Progress:
    """The progress of one of several studies of equal length."""
    return lambda done, total: progress(number * total + done, count * total)


def _steps(trainer: Trainer, sampler: _WhiteSampler, variant: Variant) -> Iterator[Step]:
    """Take all training steps, with white outliers at the steps of the variant."""
    for index in range(1, trainer.config.steps + 1):
        sampler.white.fill_(variant.white_every > 0 and index % variant.white_every == 0)
        yield trainer.step()
    sampler.white.fill_(False)


def _write_curve(path: Path, settings: dict[str, Any], curve: Curve) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps({"settings": settings, "curve": asdict(curve)}), "utf-8")


def _read_curve(path: Path, settings: dict[str, Any]) -> Curve | None:
    """The curve in a file; None if there is no file. Raises if it was trained with other settings."""
    if not path.is_file():
        return None
    found = json.loads(path.read_text("utf-8"))
    check_same(path.parent.name, found["settings"], settings)
    return Curve(**found["curve"] | {"bits_per_dim": tuple(found["curve"]["bits_per_dim"])})


def _curve(trainer: Trainer, trained: Sequence[Step], process: str, variant: str) -> Curve:
    seed = trainer.config.seed
    final = measure_bits_per_dim(
        trainer.trained(),
        trainer.sampler,
        sets=_FINAL_SETS,
        set_size=trainer.config.set_size,
        generator=Generator(trainer.device).manual_seed(seed),
    )
    bits = tuple(step.bits_per_dim for step in trained)
    return Curve(process, variant, seed, bits, sum(step.skipped for step in trained), final.mean)


class _WhiteSampler(SetSampler):
    """A sampler of sets whose last image is white while `white` is true.

    `white` is a tensor, so that a step captured as a CUDA graph sees it change.
    """

    def __init__(self, examples: Examples, device: torch.device | str) -> None:
        super().__init__(examples, device=device)
        self.white = torch.zeros((), dtype=torch.bool, device=device)
        self._brightest = max(0, examples.levels - 1)

    def sets(self, batch: int, n: int, generator: Generator) -> Tensor:
        x = super().sets(batch, n, generator)
        return torch.cat([x[:, :-1], x[:, -1:].masked_fill(self.white, self._brightest)], 1)


def _fresh_model(settings: ModelConfig, correlation: tuple[float, float], seed: int) -> Bruno:
    """A model whose weights and correlations depend on the seed alone; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model = Bruno.from_config(settings)
        drawn = torch.empty(model.dim, dtype=torch.double).uniform_(*correlation)
        model.process.raw_correlation.copy_(drawn.logit())
    return model
