"""The demo: what the pretrained model can do, and a model that is trained on handwritten digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bruno.fit import train
from bruno.page.symbols import as_examples, draw_symbols
from bruno.reporting.page import report
from bruno.reporting.results import Result
from bruno.reporting.summaries import class_samples_picture, summarise
from bruno.trained import Trained, open
from bruno.training import LogEntry

_PRETRAINED = "omniglot"
_TEMPERATURE = 0.5  # of the samples of the pretrained model: clean strokes
_BLANK = 3  # an image with at most this many bright pixels is almost blank


@dataclass(frozen=True)
class Demo:
    """What the demo made.

    Attributes:
        trained: the model that was trained on digits.
        pretrained: results of the pretrained model.
        digits: results of the trained model.
        page: the page of all results.
    """

    trained: Trained
    pretrained: tuple[Result, ...]
    digits: tuple[Result, ...]
    page: Path


def demo(
    out: str | Path = "runs/demo",
    *,
    steps: int | None = None,
    seed: int = 0,
    progress: Callable[[LogEntry], None] | None = None,
) -> Demo:
    """Train on handwritten digits, and show what this model and the pretrained model can do, on one page.

    Args:
        out: the run folder; a number is appended if it exists.
        steps: training steps; those of the preset by default.
        seed: seed of the training and of all samples.
        progress: called with a log entry after every training step, or every few steps on a GPU.

    Raises:
        TrainingInterrupted: after SIGINT or SIGTERM; its `folder` is the run to resume.
    """
    folder = _unused(Path(out))
    settings = {"seed": seed} | ({} if steps is None else {"steps": steps})
    trained = train("digits", folder, progress=progress, train=settings)
    pretrained, digits = pretrained_results(seed), digits_results(trained, seed)
    for result in pretrained:
        result.write(folder, config={"model": _PRETRAINED}, seed=seed)
    for result in digits:
        trained.save_result(result, seed)
    return Demo(trained, pretrained, digits, report(folder))


def pretrained_results(seed: int) -> tuple[Result, ...]:
    """New characters, more of the same, and the odd one out, by the pretrained model."""
    trained = open(_PRETRAINED)
    symbols = as_examples(draw_symbols(), trained.model.shape[-1])
    new = trained.sample_prior(36, temperature=_TEMPERATURE, seed=seed)
    more = trained.sample_classes(examples=symbols, given=4, temperature=_TEMPERATURE, seed=seed)
    snail, hook = (
        symbols.elements[symbols.labels == symbols.names.index(name)] for name in ("snail", "hook")
    )
    row = snail.clone()
    row[5] = hook[0]
    odd = summarise(trained.judge_batch(row, threshold=0.0))
    by, at = f"By the pretrained model {_PRETRAINED}", f"drawn at a temperature of {_TEMPERATURE}"
    bright = (new.x > (trained.model.levels - 1) / 2).flatten(1).sum(1)
    blank = int((bright <= _BLANK).sum())
    fault = f": {blank} of {len(new.x)} are almost blank, which is a fault of the model" * (blank > 0)
    return (
        replace(
            summarise(new),
            name="new-characters",
            title="New characters",
            note=f"{by}, given nothing, {at}. None was left out{fault}.",
        ),
        replace(
            summarise(more),
            name="more-of-the-same",
            title="More of the same",
            note=f"{by}. Left: four drawings of a symbol that it has never seen. Right: samples given "
            f"these, {at}.",
            picture=class_samples_picture(more),
        ),
        replace(odd, name="odd-one-out", title="Odd one out", note=f"{by}. {odd.note}"),
    )


def digits_results(trained: Trained, seed: int) -> tuple[Result, ...]:
    """More of the digits, few-shot accuracy and bits/dim of the model that was just trained."""
    samples = trained.sample_classes(split="all", seed=seed)
    pictured = replace(
        summarise(samples),
        name="samples-by-class",
        title="Digits: more of the same",
        note="Left: six examples of a digit. Right: samples given these. 2, 5 and 8 were held out.",
        picture=class_samples_picture(samples),
    )
    few_shot = summarise(trained.few_shot(trials=100, noise=False, rotations=False, seed=seed))
    return pictured, few_shot, summarise(trained.evaluate(seed=seed))


def _unused(folder: Path) -> Path:
    """The folder, or the first one with a number that does not exist."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
