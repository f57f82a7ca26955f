"""Few-shot accuracy on images from other sources, with and without normalisation of drawings.

    python benchmarks/foreign.py omniglot
    python benchmarks/foreign.py runs/omniglot --trials 20

Digits of MNIST's test split, letters of the fonts that matplotlib installs, and Omniglot's test characters
reduced from 105 × 105 by several filters. Without dequantisation noise, without rotations; the nearest pixels
are measured on the same episodes. Prints a table and writes results/omniglot/foreign/MODEL.json.
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table

import bruno
from bruno.data import Examples, load_examples
from bruno.data.images import fit_all, normalise_drawings
from bruno.provenance import provenance
from bruno.tasks import FewShotProtocol, compare_few_shot

RESULTS = Path(__file__).parents[1] / "results" / "omniglot" / "foreign"
FILTERS = ("BILINEAR", "BICUBIC", "BOX", "LANCZOS", "AREA")
MNIST_IMAGES = 100  # of each digit, the first of the test split
SEED = 0

FONTS = Path(matplotlib.__file__).parent / "mpl-data" / "fonts" / "ttf"
STYLES = {
    "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
    "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
    "cm": ("b10", "mi10", "r10", "ss10", "ti10", "tt10"),
}
FACES = [family + style for family, styles in STYLES.items() for style in styles]
LETTERS = string.ascii_uppercase + "abdefghijlmnqrty"  # without small letters that look like their capitals
_SIDE, _FINE = 105, 420  # of a letter, and of the canvas it is drawn on


class Source(NamedTuple):
    """Images at their own size, and the settings to measure on them."""

    name: str
    examples: Examples
    ways: tuple[int, ...]
    shots: tuple[int, ...]


def font_letters(seed: int = SEED) -> Examples:
    """Dark letters on white, 105 × 105: a class for each letter, with one slightly varied image per face."""
    random = np.random.default_rng(seed)
    images = [_letter(letter, face, random) for letter in LETTERS for face in FACES]
    labels = torch.arange(len(LETTERS)).repeat_interleave(len(FACES))
    return Examples(np.stack(images)[:, None], labels, tuple(LETTERS))


def _letter(letter: str, face: str, random: np.random.Generator) -> np.ndarray:
    """A letter of half the height of the image, rotated, sheared, stretched and moved a little."""
    image, centre = Image.new("L", (_FINE, _FINE), 255), np.full(2, _FINE / 2)
    font = ImageFont.truetype(str(FONTS / f"{face}.ttf"), _FINE // 2)
    ImageDraw.Draw(image).text(tuple(centre), letter, font=font, fill=0, anchor="mm")
    angle, shear = random.normal(0, 0.05, 2)
    stretch, shift = np.exp(random.normal(0, 0.06, 2)), random.normal(0, 0.02 * _FINE, 2)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    linear = rotation @ np.array([[1, shear], [0, 1]]) @ np.diag(stretch)
    affine = np.column_stack([linear, centre - linear @ (centre + shift)]).ravel()
    bicubic = Image.Resampling.BICUBIC
    image = image.transform(image.size, Image.Transform.AFFINE, tuple(affine), bicubic, fillcolor=255)
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX))


def mnist_digits() -> Examples:
    """The first images of each digit of MNIST's test split."""
    test = load_examples("mnist", "test")
    first = [(test.labels == i).nonzero().flatten()[:MNIST_IMAGES] for i in range(len(test.names))]
    kept = torch.cat(first)
    return replace(test, elements=test.elements[kept], labels=test.labels[kept])


def reduced(originals: Examples, filter: str) -> Examples:
    """Drawings reduced to 28 × 28 by a filter of Pillow, or "AREA": exact means of 3.75 × 3.75 pixels."""
    images = originals.elements[:, 0].numpy()
    if filter == "AREA":  # each pixel four times along both axes: 420 = 15 · 28
        fine = images.repeat(4, 1).repeat(4, 2).reshape(len(images), 28, 15, 28, 15)
        small = fine.mean((2, 4)).round().astype(np.uint8)
    else:
        resample = Image.Resampling[filter]
        small = np.stack([np.asarray(Image.fromarray(image).resize((28, 28), resample)) for image in images])
    return replace(originals, elements=torch.from_numpy(small)[:, None])


def sources(split: str) -> Iterator[Source]:
    """The sets of images to measure on."""
    yield Source("MNIST", mnist_digits(), (5,), (1, 5))
    yield Source("font letters", font_letters(), (5,), (1, 5))
    originals = load_examples("omniglot", split, original=True)
    yield Source("Omniglot, original size", originals, (20,), (1,))
    for filter in FILTERS:
        yield Source(f"Omniglot, {filter}", reduced(originals, filter), (20,), (1,))


def prepared(source: Source, normalise: bool) -> Examples:
    """The images as a model of 28 × 28 reads them: normalised, or resized, with bright ink."""
    pixels = source.examples.elements.numpy()
    if normalise:
        return replace(source.examples, elements=torch.from_numpy(normalise_drawings(pixels, 28)))
    small = fit_all(pixels, 28, True)
    return replace(source.examples, elements=torch.from_numpy(255 - small if small.mean() > 127 else small))


def measured(model: bruno.Bruno, source: Source, normalise: bool, trials: int) -> Iterator[dict[str, Any]]:
    """Accuracy of the model and of the nearest pixels, at every setting."""
    examples = prepared(source, normalise)
    # Every class is queried once per trial: as many queries for ten digits as for many characters.
    trials = max(trials, min(200, 4000 // len(examples.names)))
    protocol = FewShotProtocol(ways=source.ways, shots=source.shots, trials=trials, noise=False)
    found = compare_few_shot(model, examples, protocol, generator=torch.Generator().manual_seed(SEED))
    for own, pixels in zip(found.model, found.baseline, strict=True):
        yield {
            "images": source.name,
            "normalised": normalise,
            "way": own.way,
            "shot": own.shot,
            "accuracy": own.accuracy,
            "error": own.error,
            "nearest pixels": pixels.accuracy,
            "episodes": own.episodes,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a run folder, a model file, or a pretrained model")
    parser.add_argument("--split", default="test", help="of Omniglot")
    parser.add_argument("--trials", type=int, default=5, help="at least this many trials")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="the JSON; by default in results/omniglot/foreign/")
    arguments = parser.parse_args()
    trained = bruno.open(arguments.model, device=arguments.device)
    rows: list[dict[str, Any]] = []
    for source in sources(arguments.split):
        for normalise in (False, True):
            rows += measured(trained.model, source, normalise, arguments.trials)
    table = Table("images", "setting", "normalised", "accuracy %", "nearest pixels %", title=arguments.model)
    for row in rows:
        setting, normalised = f"{row['way']}-way {row['shot']}-shot", "yes" if row["normalised"] else "no"
        accuracy = f"{100 * row['accuracy']:.1f} ± {100 * row['error']:.1f}"
        table.add_row(row["images"], setting, normalised, accuracy, f"{100 * row['nearest pixels']:.1f}")
    Console().print(table)
    out = arguments.out or RESULTS / f"{Path(arguments.model).stem}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"provenance": provenance(SEED), "model": trained.model.fingerprint(), "rows": rows}
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
