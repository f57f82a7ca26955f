"""`bruno train` and `evaluate`."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from torch import distributed

from bruno.cli.opening import (
    chosen_split,
    examples_of,
    held_out_examples,
    is_own,
    length_of_sets,
    measured_on,
    open_model,
)
from bruno.cli.options import (
    Checkpoint,
    DataDir,
    Device,
    Invert,
    ModelName,
    OtherData,
    Seed,
    Settings,
    SkipBad,
    Split,
    check_number,
    choose_device,
    console,
)
from bruno.config import Recipe, load_recipe, named
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.reporting.plots import curves
from bruno.reporting.results import Result
from bruno.tasks.evaluation import BitsPerDim, measure_bits_per_dim
from bruno.training.clock import LogEntry
from bruno.training.run import Run
from bruno.training.trainer import Trainer, broadcast

_SETS = 200  # to measure bits/dim on, at least
_FAR = 100  # times as far apart as nine in ten numbers of a column are, on average

Steps = Annotated[int | None, typer.Option(help="How many steps; the recipe's number if left out.")]
Minutes = Annotated[
    float | None, typer.Option(help="How long instead: the schedule is planned to end on time.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")]
SaveEvery = Annotated[float, typer.Option(help="Seconds between checkpoints.")]
Validate = Annotated[
    int, typer.Option(help="Validation sets at every checkpoint, to keep the best; 0: none.")
]


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The group that torchrun's processes form, if any, ends with a command, and its threads with it.

    A thread of gloo's that is still letting go of a tensor when the interpreter ends aborts the process. They
    end with the last reference to their group, and what trained is full of cycles that hold one. It is to be
    put on the command as a decorator: what is within the command must be gone by then, too.
    """
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
            gc.collect()


@process_group()
def train(
    preset: Annotated[str, typer.Argument(help="A preset (see `bruno presets`) or a TOML file.")],
    settings: Settings = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/PRESET if left out.")] = None,
    steps: Steps = None,
    minutes: Minutes = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The seed of all random numbers; the recipe's if left out.", min=0, max=2**63 - 1),
    ] = None,
    resume: Resume = False,
    device: Device = "auto",
    save_every: SaveEvery = 60.0,
    validate: Validate = 64,
    skip_bad: SkipBad = False,
) -> None:
    """Train a model from a preset or a recipe of your own, into a folder from which it can be resumed."""
    if validate < 0 or validate == 1:
        raise ValueError(f"`--validate` must be at least 2 sets, or 0 for none; got {validate}.")
    overrides = [*(settings or []), *length_overrides(steps, minutes, settings or [])]
    overrides += [f"train.seed={seed}"] if seed is not None else []
    overrides += ["data.skip_bad=true"] if skip_bad else []
    recipe = located(load_recipe(preset, overrides))
    if is_own(recipe.data.name) and named(overrides, "data.name") and not named(overrides, "data.original"):
        # One's own images come in any size: what a preset says of those it is for does not hold for them.
        recipe = replace(recipe, data=replace(recipe.data, original=False))
    learnt = training_examples(recipe, data_dir)
    if is_own(recipe.data.name):
        recipe = as_far_as_there_is(recipe, learnt, overrides)
        recipe = replace(recipe, data=replace(recipe.data, columns=learnt.columns))
        _warn_of_far_numbers(learnt)
    run = Run(out or Path("runs") / Path(preset).stem)
    if resume:
        recipe = as_planned(recipe, run, overrides)
    device = choose_device(device)
    model = fresh_model(recipe, examples_of(recipe, recipe.data.split, data_dir), device)
    trainer = trainer_of(model, recipe, learnt, device)
    measure = _validation(recipe, data_dir, device, validate)
    run_to_the_end(run, recipe, trainer, measure, resume=resume, save_every=save_every)


def evaluate(
    run: ModelName,
    split: Split = None,
    sets: Annotated[
        int | None, typer.Option(help="How many sets to draw; if left out, each class equally often.")
    ] = None,
    length: Annotated[int, typer.Option(help="Elements in a set, if every class has so many.")] = 20,
    checkpoint: Checkpoint = "last",
    data: OtherData = None,
    data_dir: DataDir = None,
    invert: Invert = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Bits/dim of a model, without rotations: at the first position, for each, and their mean."""
    if sets is not None and sets < 2:
        raise ValueError(f"`--sets` must be at least 2, for an error to be told; got {sets}.")
    check_number("--length", length, 1)
    opened = open_model(run, checkpoint, device)
    data = opened.at_hand(data, data_dir)
    split = chosen_split(split, data)
    examples = opened.examples(split, data_dir, data, invert=invert)
    result = measure_bits_per_dim(
        opened.model,
        SetSampler(examples, device=opened.device),
        sets=sets,
        rounds=rounds_of(examples),
        set_size=length_of_sets(examples, length),
        generator=torch.Generator(opened.device).manual_seed(seed),
    )
    rows = [(str(i), f"{bits:.4f}") for i, bits in enumerate(result.by_position, start=1)]
    rows.append(("mean", bits_with_error(result)))
    positions = range(1, len(result.by_position) + 1)
    where = measured_on(split, data)
    found = Result(
        f"bits-{where}",
        f"Bits/dim, {where}, by how many were seen before",
        {"split": where, **asdict(result)},
        ("position", "bits/dim"),
        tuple(rows),
        f"{result.sets} sets{'; ± standard error' * (result.error is not None)}.",
        curves({where: (positions, result.by_position)}, "position in the set", "bits/dim"),
    )
    opened.keep(found, seed)


def located(recipe: Recipe) -> Recipe:
    """With the whole path of data of one's own: a run is of use from any folder."""
    if not is_own(recipe.data.name):
        return recipe
    return replace(recipe, data=replace(recipe.data, name=str(Path(recipe.data.name).resolve())))


def as_planned(recipe: Recipe, run: Run, overrides: Sequence[str]) -> Recipe:
    """A recipe with the length that a run to be resumed was planned with, unless that is told anew."""
    if not run.checkpoints or named(overrides, "train.steps", "train.minutes"):
        return recipe
    planned = run.recipe.train
    return replace(recipe, train=replace(recipe.train, steps=planned.steps, minutes=planned.minutes))


def fresh_model(recipe: Recipe, examples: Examples, device: str) -> Bruno:
    """A model of such examples, not trained yet."""
    torch.manual_seed(recipe.train.seed)
    return Bruno.from_config(recipe.model(examples.shape, examples.levels)).to(device)


def training_examples(recipe: Recipe, data_dir: Path | None) -> Examples:
    """What a recipe learns from: images as its model takes them, or larger ones that are downsample last."""
    return examples_of(recipe, recipe.data.split, data_dir, original=recipe.data.original)


def as_far_as_there_is(recipe: Recipe, learnt: Examples, overrides: Sequence[str]) -> Recipe:
    """With episodes of no more classes and sets of no more elements than there are, unless that is told."""
    train = recipe.train
    if not named(overrides, "train.way"):
        train = replace(train, way=max(2, min(train.way, len(learnt.names))))
    min_count = int(learnt.counts.min())
    if min_count < train.set_size and not named(overrides, "train.set_size"):
        short = f"{learnt.names[int(learnt.counts.argmin())]!r} has {min_count}"
        way_out = "leave out such classes" + " (--set data.skip_bad=true)" * (not recipe.data.skip_bad)
        if min_count < 2:
            raise ValueError(f"every class must have two elements, to learn from; {short}: {way_out}.")
        console.print(f"sets are of {min_count} elements, not of {train.set_size}: {short}; or {way_out}")
        train = replace(train, set_size=min_count)
    return replace(recipe, train=train)


def _warn_of_far_numbers(learnt: Examples) -> None:
    """Say which columns of a table get their scale from a few numbers that are far from all others."""
    if learnt.levels:
        return
    ordered, margin = learnt.elements.sort(0).values, len(learnt) // 20
    middle = ordered[-1 - margin] - ordered[margin]  # of nine in ten
    far = (middle > 0) & (ordered.std(0) > _FAR * middle)
    names = learnt.columns or tuple(map(str, range(1, len(far) + 1)))
    for i in far.nonzero().flatten().tolist():
        most = ordered[:, i][ordered[:, i].abs().argmax()].item()
        console.print(
            f"column {names[i]!r}: a few numbers, as {most:g}, are so far out that all others look alike; if "
            "they stand for missing ones, leave those rows out",
            soft_wrap=True,
        )


def rounds_of(examples: Examples) -> int:
    """How often to measure every class: once where there are many, oftener where there are few."""
    return math.ceil(_SETS / len(examples.names))


def bits_with_error(bits: BitsPerDim) -> str:
    """A mean with its standard error, where there is one."""
    return f"{bits.mean:.4f}" + ("" if bits.error is None else f" ± {bits.error:.4f}")


def length_overrides(steps: int | None, minutes: float | None, settings: Sequence[str]) -> list[str]:
    """What --steps or --minutes change in a recipe; a number of steps that is set ends its minutes."""
    if steps is not None and minutes is not None:
        raise ValueError(f"`--steps` and `--minutes` exclude each other; got {steps} and {minutes}.")
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"`--minutes` must be above 0, and not for ever; got {minutes}.")
    if steps is not None:
        return [f"train.steps={steps}", "train.minutes=0"]
    if minutes is not None:
        return [f"train.minutes={minutes}"]
    counted = named(settings, "train.steps") and not named(settings, "train.minutes")
    return ["train.minutes=0"] if counted else []


def trainer_of(model: Bruno, recipe: Recipe, examples: Examples, device: str) -> Trainer:
    """A trainer of a model on a recipe's examples."""
    sampler = SetSampler(examples, rotations=recipe.data.rotations, device=device)
    return Trainer(model, sampler, recipe.train)


def _validation(
    recipe: Recipe, data_dir: Path | None, device: str, sets: int
) -> Callable[[Bruno], float] | None:
    """Bits/dim on the same sets each time; none where training takes the validation classes too."""
    if not sets or recipe.data.split == "trainval":
        return None
    examples = held_out_examples(recipe, "validation", data_dir)
    sampler, length = (
        SetSampler(examples, device=device),
        min(recipe.train.set_size, int(examples.counts.min())),
    )

    def measure(model: Bruno) -> float:
        generator = torch.Generator(device).manual_seed(0)
        return measure_bits_per_dim(model, sampler, sets=sets, set_size=length, generator=generator).mean

    return measure


def run_to_the_end(
    run: Run,
    recipe: Recipe,
    trainer: Trainer,
    measure: Callable[[Bruno], float] | None = None,
    *,
    resume: bool = False,
    save_every: float = 60.0,
    go_on: str = "--resume",
) -> None:
    """All remaining steps with a progress bar on a terminal; then the model in a file of its own.

    What to type to go on is told if it is stopped.
    """
    check_number("--save-every", save_every, 0)
    if broadcast(run.folder.exists() and not run.folder.is_dir()):
        raise ValueError(f"`--out` must be a folder; {run.folder} is a file.")
    if broadcast(bool(run.checkpoints)) and not resume:
        raise ValueError(f"`--out` must be a new folder; {run.folder} has a run. Go on with it by --resume.")
    if resume and trainer.rank == 0:
        run.check_recipe(recipe)
    if resume and not run.resume(trainer):
        raise ValueError(f"`--resume` needs a checkpoint; {run.folder} has none.")
    if trainer.rank == 0:
        run.keep_recipe(recipe)
    line, skipped = None, 0
    for line in _shown(run.train(trainer, save_every=save_every, measure=measure)):
        skipped += line.skipped
        if line.note:
            console.print(line.note)
    if skipped:
        console.print(f"left out {skipped} step{'s' * (skipped != 1)} whose gradient was not finite")
    if run.stop_signal:
        console.print(f"stopped after step {trainer.index} and saved; go on with {go_on}")
        raise typer.Exit(128 + run.stop_signal)
    if trainer.rank == 0:
        run.export(run.folder / "model.safetensors")
    if line is None:
        console.print(f"it was finished, after {trainer.index:,} steps; for more, name --steps or --minutes")
    else:
        count = f"{trainer.index:,} step{'s' * (trainer.index != 1)} in {_duration(line.seconds)}"
        speed = f"{1000 * line.step_seconds:.0f} ms a step, {line.elements_per_second:,.0f} elements/s"
        console.print(f"{count}; at last {speed}, {_memory(line.memory)}")
    console.print(f"the model is in {run.folder / 'model.safetensors'}", soft_wrap=True)


def _shown(run: Iterator[LogEntry]) -> Iterator[LogEntry]:
    """The same, with a bar on a terminal."""
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("starting", total=1.0)
        for line in run:
            share = line.seconds / max(1e-9, line.seconds + line.seconds_left)
            words = [f"step {line.index:,}", f"{line.elements_per_second:,.0f}/s", _memory(line.memory)]
            words += [f"{line.bits_per_dim:.3f} bits/dim"] if line.bits_per_dim == line.bits_per_dim else []
            words += [f"{100 * line.accuracy:.0f} % right"] if line.accuracy == line.accuracy else []
            words += [f"{_duration(line.seconds_left)} left"]
            bar.update(task, completed=share, description=" · ".join(words))
            yield line


def _memory(amount: int) -> str:
    return f"{amount / 2**30:.1f} GiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
