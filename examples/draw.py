"""Draws the images beside this file, which no model has seen, and two tables: `python examples/draw.py`.

known/a ... known/e   five drawings of each of five characters
new/                  three more of each, to classify, or to rank by what they have in common
stream/               twelve of a sixth character, one after the other; the 8th and 11th are strangers
machines.csv          heat, speed and current of sixty machines, twenty times each, to learn from
machine.csv           thirty of one more machine; in the 14th and the 23rd its current is another's
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from bruno.data.synthetic import draw_characters

SEED = 115  # of which the package itself draws none
LETTERS = "abcde"
KNOWN, NEW, STREAM = 5, 3, 12
STRANGERS = (8, 11)
MACHINES, ROWS, MORE_ROWS = 60, 20, 30
ODD_ROWS = (14, 23)


def draw(to: Path) -> None:
    """All of them, bright ink on black, in the size of Omniglot's drawings."""
    drawn = draw_characters(len(LETTERS) + 1, STREAM, size=105, seed=SEED)
    *characters, other = drawn.elements.numpy()[:, 0].reshape(-1, STREAM, 105, 105)
    images = {}
    for letter, drawings in zip(LETTERS, characters, strict=True):
        for i, drawing in enumerate(drawings[: KNOWN + NEW], 1):
            images[f"known/{letter}/{i}" if i <= KNOWN else f"new/{letter}{i}"] = drawing
    for i, drawing in enumerate(other, 1):
        images[f"stream/{i:02d}"] = characters[i % len(LETTERS)][-1] if i in STRANGERS else drawing
    for name, drawing in images.items():
        path = to / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawing).save(path)


def tabulate(to: Path) -> None:
    """Made-up machines: each runs at a heat and a speed of its own, and what it draws depends on both."""
    generator = np.random.default_rng(SEED)

    def measured(rows: int) -> np.ndarray:
        """(rows, 3) of one machine."""
        heat = generator.normal(60, 6) + generator.normal(0, 1, rows)
        speed = generator.normal(1500, 120) + generator.normal(0, 15, rows)
        friction = generator.lognormal(0, 0.15)
        current = friction * speed / 100 + np.exp((heat - 60) / 8) + generator.normal(0, 0.1, rows)
        return np.stack([heat, speed, current], 1)

    lines = ["machine,heat,speed,current"]
    for name in range(1, MACHINES + 1):
        lines += [f"{name:02d},{h:.2f},{s:.1f},{c:.2f}" for h, s, c in measured(ROWS)]
    (to / "machines.csv").write_text("\n".join(lines) + "\n")
    rows, other = measured(MORE_ROWS), measured(MORE_ROWS)
    for i in ODD_ROWS:
        rows[i - 1, 2] = other[i - 1, 2]
    lines = ["heat,speed,current", *(f"{h:.2f},{s:.1f},{c:.2f}" for h, s, c in rows)]
    (to / "machine.csv").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    draw(Path(__file__).parent)
    tabulate(Path(__file__).parent)
