"""Do samples look like their character to a classifier that is not this model?

Trains a small ConvNet on 15 of the 20 drawings of every Omniglot test character, and tests it on the other
five. Then it classifies samples of each model, given 1, 5 and 19 drawings of a test character, among that
character and 19 others. Writes results/omniglot/judge.json:

    python benchmarks/judge.py omniglot omniglot-small runs/other/model.safetensors

`BRUNO_DATA` is the folder of the data. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Generator, Tensor, nn
from torch.nn import functional as F

import bruno
from bruno import Evidence, Posterior
from bruno.data import Examples, load_examples
from bruno.data.augmentation import apply_affine, random_affines, random_shift
from bruno.provenance import provenance
from bruno.tasks.generation import draw_samples
from bruno.tasks.metrics import mean_and_error

RESULTS = Path(__file__).parents[1] / "results" / "omniglot"
GIVEN = (1, 5, 19)  # drawings that a sample is given
WAY = 20  # the character and 19 others
DRAWINGS = 20  # of each character
TRAINED_ON = 15  # of these, the drawings that the judge is trained on
BATCH = 128


class Judge(nn.Module):
    """Four convolutions with batch norm: (images, 1, 28, 28) -> logits (images, classes)."""

    def __init__(self, classes: int, filters: int = 48) -> None:
        super().__init__()
        widths = (1, filters, filters, 2 * filters, 2 * filters)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
            layers += [nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3))
        self.last = nn.Linear(2 * filters * 4, classes)

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        return self.last(self.features(images.float() / 255))  # type: ignore[no-any-return]


def by_class(examples: Examples) -> Tensor:
    """The drawings of every character: (classes, 20, 1, 28, 28)."""
    return examples.elements[torch.argsort(examples.labels, stable=True)].view(-1, DRAWINGS, *examples.shape)


def train_judge(drawings: Tensor, epochs: int, generator: Generator) -> Judge:
    """A judge of these characters, trained on shifted and warped drawings."""
    judge = Judge(len(drawings))
    images = drawings[:, :TRAINED_ON].flatten(0, 1)
    labels = torch.arange(len(drawings)).repeat_interleave(TRAINED_ON)
    steps = epochs * (len(images) // BATCH)
    optimiser = torch.optim.AdamW(judge.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator).split(BATCH)[:-1]:
            x = random_shift(images[rows], 2, generator)
            x = apply_affine(x, random_affines(len(x), 0.1, generator))
            loss = F.cross_entropy(judge(x), labels[rows], label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return judge.eval()


@torch.no_grad()
def share_of_own_class(
    judge: Judge, images: Tensor, labels: Tensor, generator: Generator
) -> dict[str, float]:
    """Share of images given to their own class, among it and 19 random others, with its standard error."""
    logits = torch.cat([judge(part) for part in images.split(512)])
    noise = torch.rand(logits.shape, generator=generator)
    noise[torch.arange(len(labels)), labels] = -1.0  # not among the others
    others = noise.topk(WAY - 1).indices
    own = logits.gather(1, labels.unsqueeze(1))
    share, error = mean_and_error((own > logits.gather(1, others).amax(1, keepdim=True)).double().flatten())
    return {"share": share.item(), "error": error.item(), "images": len(labels)}


@torch.no_grad()
def samples_of(model: bruno.Bruno, drawings: Tensor, given: int, each: int, generator: Generator) -> Tensor:
    """Samples given random drawings of each character: (classes · each, 1, 28, 28)."""
    parts = []
    for some in drawings.split(32):
        order = torch.rand(some.shape[:2], generator=generator).argsort(1)[:, :given]
        chosen = some[torch.arange(len(some)).unsqueeze(1), order]
        posterior = Posterior(model, Evidence.of(model.latents(chosen, generator)))
        parts.append(draw_samples(posterior, each, generator=generator).images)
    return torch.cat(parts).flatten(0, 1)


def measure(judge: Judge, name: str, drawings: Tensor, each: int, seed: int) -> dict[str, Any]:
    """The judged samples of one model, by the number of drawings given."""
    model = bruno.open(name, device="cpu").model
    labels = torch.arange(len(drawings)).repeat_interleave(each)
    generator = Generator().manual_seed(seed)
    return {
        str(given): share_of_own_class(
            judge, samples_of(model, drawings, given, each, generator), labels, generator
        )
        for given in GIVEN
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="names or paths of models")
    parser.add_argument("--samples", type=int, default=3, help="samples of each character")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of the judge's training")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    generator = Generator().manual_seed(arguments.seed)
    drawings = by_class(load_examples("omniglot", "test"))
    judge = train_judge(drawings, arguments.epochs, generator)
    held_out = drawings[:, TRAINED_ON:].flatten(0, 1)
    labels = torch.arange(len(drawings)).repeat_interleave(DRAWINGS - TRAINED_ON)
    real = share_of_own_class(judge, held_out, labels, generator)
    judged = {
        Path(name).parent.name if Path(name).is_file() else name: measure(
            judge, name, drawings, arguments.samples, arguments.seed
        )
        for name in arguments.models
    }
    table = Table("", *(f"given {given}" for given in GIVEN), title="Samples given to their own class, %")
    for name, by_given in judged.items():
        table.add_row(name, *(f"{100 * v['share']:.1f} ± {100 * v['error']:.1f}" for v in by_given.values()))
    Console().print(table, f"held-out drawings: {100 * real['share']:.1f} ± {100 * real['error']:.1f} %")
    result = {"held-out drawings": real, "samples": judged, "provenance": provenance(arguments.seed)}
    (RESULTS / "judge.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
