"""The command line: parses, calls one function, renders. Mistakes are one line and exit code 2."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bruno.checkpoint import read, save
from bruno.config import ModelConfig, Recipe, from_dict, load_recipe, presets, to_dict
from bruno.data import SOURCES, Examples, load_examples, locate
from bruno.evaluation import measure_bits_per_dim
from bruno.model import Bruno
from bruno.process import Evidence, StudentTProcess
from bruno.provenance import provenance
from bruno.runs import Run, StopSignal
from bruno.sequences import SetSampler
from bruno.training import Trainer

app = typer.Typer(help="Exact, exchangeable deep models of sets.", no_args_is_help=True, add_completion=False)
console = Console()
_RECIPE = "recipe.json"

DataDir = Annotated[Path | None, typer.Option(help="Where data sets are; $BRUNO_DATA if left out.")]


def main() -> None:
    """The command `bruno`; a user's mistake is a line, not a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)


@app.command()
def train(
    preset: Annotated[str, typer.Argument(help="A preset (see `bruno presets`) or a TOML file.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key.sub=value, as flow.filters=32.")
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/PRESET if left out.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps, whatever the preset says.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of all random numbers.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto for a GPU where there is one.")] = "auto",
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
) -> None:
    """Train a model: `bruno train digits`, or `bruno train omniglot --set process.kind=gaussian`."""
    overrides = list(settings or [])
    overrides += [f"train.steps={steps}"] if steps is not None else []
    overrides += [f"train.seed={seed}"] if seed is not None else []
    recipe = load_recipe(preset, overrides)
    run = Run(out or Path("runs") / Path(preset).stem)
    if run.checkpoints and not resume:
        raise ValueError(f"`--out` must be a new folder; {run.folder} has a run. Go on with it by --resume.")
    place = _device(device)
    trainer = _trainer(recipe, data_dir, place)
    if resume and not run.resume(trainer):
        raise ValueError(f"`--resume` needs a checkpoint; {run.folder} has none.")
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / _RECIPE).write_text(json.dumps(to_dict(recipe), indent=2) + "\n")
    _train(trainer, run, save_every)
    save(_trained(run, place)[0], run.folder / "model.safetensors")
    console.print(f"the model is in {run.folder / 'model.safetensors'}")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    split: Annotated[str, typer.Option(help="train, validation, trainval or test.")] = "test",
    sets: Annotated[int, typer.Option(help="How many sets to draw.")] = 200,
    data_dir: DataDir = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the sets drawn and of their noise.")] = 0,
) -> None:
    """Bits/dim of a run's model, without rotations: at the first position, for each, and their mean."""
    place = _device(device)
    model, recipe = _trained(Run(run), place)
    # Classes that the run was limited to are those it learnt from: in test, the others count too.
    limited = recipe.data.classes if split.startswith("train") else ()
    examples = _examples(replace(recipe, data=replace(recipe.data, classes=limited)), split, data_dir)
    result = measure_bits_per_dim(
        model,
        SetSampler(examples, device=place),
        sets=sets,
        length=min(recipe.train.length, int(examples.counts.min())),
        generator=torch.Generator(place).manual_seed(seed),
    )
    report = {"bits_per_dim": asdict(result), "split": split, "provenance": provenance(seed)}
    (run / f"bits-{split}.json").write_text(json.dumps(report, indent=2) + "\n")
    table = Table("position", "bits/dim", title=f"{run}: {split}, {sets} sets")
    for i, bits in enumerate(result.by_position, start=1):
        table.add_row(str(i), f"{bits:.4f}")
    table.add_row("mean", f"{result.mean:.4f} ± {result.error:.4f}", style="bold")
    console.print(table)


@app.command("presets")
def list_presets() -> None:
    """The recipes that come with the package."""
    table = Table("preset", "what it is")
    for name, title in presets().items():
        table.add_row(name, title)
    console.print(table)


@app.command("data")
def list_data(data_dir: DataDir = None) -> None:
    """The named data sets: what is there, what is missing, and where to get it."""
    table = Table("data set", "what it is", "file", "where")
    for name, source in SOURCES.items():
        files = locate(name, data_dir)
        table.add_row(name, source.title, *([] if files else ["", "built in"]))
        for remote in source.files:
            place = files[remote.path]
            table.add_row("", "", remote.path, str(place) if place else f"missing: {remote.mirrors[0]}")
    console.print(table)


@app.command()
def demo() -> None:
    """A stream of measurements, each scored before it is learnt; the odd one out stands out."""
    console.print("The exchangeable process at work. (A demo that trains on digits comes next.)\n")
    process = StudentTProcess(3, dof=10.0, correlation=0.8)
    generator = torch.Generator().manual_seed(0)
    stream = torch.tensor([1.0, -0.5, 0.3]) + 0.3 * torch.randn(10, 3, generator=generator)
    stream[7] += torch.tensor([-2.5, 2.0, -2.0])
    evidence = Evidence.empty(3)
    prior = process.predictive(evidence)
    table = Table("element", "log p(x | seen) − log p(x)", "")
    for i, x in enumerate(stream, start=1):
        score = (process.predictive(evidence).log_prob(x) - prior.log_prob(x)).sum().item()
        table.add_row(str(i), f"{score:+.2f}", "odd one out" if score < 0 else "")
        if score >= 0:
            evidence = evidence.add(x)
    console.print(table)


def _trainer(recipe: Recipe, data_dir: Path | None, device: str) -> Trainer:
    examples = _examples(recipe, "train", data_dir)
    torch.manual_seed(recipe.train.seed)
    model = Bruno.from_config(recipe.model(examples.shape, examples.levels)).to(device)
    sampler = SetSampler(examples, rotations=recipe.data.rotations, device=device)
    return Trainer(model, sampler, recipe.train)


def _trained(run: Run, device: str) -> tuple[Bruno, Recipe]:
    """The model of a run, with averaged weights if it has them, and what it was made from."""
    if not run.checkpoints or not (run.folder / _RECIPE).is_file():
        raise ValueError(f"`run` must be the folder of a training run; {run.folder} has no checkpoint.")
    recipe = from_dict(Recipe, json.loads((run.folder / _RECIPE).read_text()))
    tensors, header = read(run.checkpoints[-1], device)
    part = "average." if any(name.startswith("average.") for name in tensors) else "model."
    model = Bruno.from_config(from_dict(ModelConfig, header["config"])).to(device)
    model.load_state_dict({n.removeprefix(part): t for n, t in tensors.items() if n.startswith(part)})
    return model, recipe


def _examples(recipe: Recipe, split: str, data_dir: Path | None) -> Examples:
    data = recipe.data
    examples = load_examples(
        data.name,
        split,
        data_dir=data_dir,
        size=data.size or None,
        grey=not data.colour,
        group=data.group,
        skip_bad=data.skip_bad,
    )
    if examples.skipped:
        console.print(f"left out {len(examples.skipped)} that could not be read, first {examples.skipped[0]}")
    return examples.named(data.classes) if data.classes else examples


def _train(trainer: Trainer, run: Run, save_every: float) -> None:
    """All remaining steps, with a progress bar on a terminal, a log, and a checkpoint now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    elements = trainer.config.batch * trainer.config.length
    bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
    with bar as progress, StopSignal() as stop:
        task = progress.add_task("training", total=trainer.config.steps, completed=trainer.index)
        saved = begun = time.monotonic()
        first = trainer.index
        while trainer.index < trainer.config.steps and not stop.number:
            step = trainer.step()
            now = time.monotonic()
            speed = (trainer.index - first) * elements / (now - begun)
            run.log(step, elements_per_second=speed)
            progress.update(task, completed=step.index, description=f"{step.bits_per_dim:.3f} bits/dim")
            if now - saved > save_every:
                run.save(trainer)
                saved = now
        run.save(trainer)
    if stop.number:
        console.print(f"stopped after step {trainer.index} and saved; go on with --resume")
        raise typer.Exit(128 + stop.number)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"`--device` must be one that is there; got {name}, and there is no GPU. Use cpu.")
    return name
