"""Draw the example images, unseen by every model, and write two tables: `python examples/draw.py`.

known/a ... known/e   five drawings of each of five characters
new/                  three more drawings of each, to classify or to retrieve
stream/               twelve drawings of a sixth character; the 8th and 11th are outliers
machines.csv          heat, speed and current of sixty machines, twenty rows each, for training
machine.csv           thirty rows of another machine; the 14th and 23rd are outliers in current
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from bruno.data.synthetic import draw_characters

SEED = 115  # not used elsewhere
LETTERS = "abcde"
KNOWN, NEW, STREAM = 5, 3, 12
OUTLIERS = (8, 11)
MACHINES, ROWS, MORE_ROWS = 60, 20, 30
OUTLIER_ROWS = (14, 23)


def draw(to: Path) -> None:
    """Write all images: bright ink on black, at the size of Omniglot's drawings."""
    drawn = draw_characters(len(LETTERS) + 1, STREAM, size=105, seed=SEED)
    *characters, other = drawn.elements.numpy()[:, 0].reshape(-1, STREAM, 105, 105)
    images = {}
    for letter, drawings in zip(LETTERS, characters, strict=True):
        for i, drawing in enumerate(drawings[: KNOWN + NEW], 1):
            images[f"known/{letter}/{i}" if i <= KNOWN else f"new/{letter}{i}"] = drawing
    for i, drawing in enumerate(other, 1):
        images[f"stream/{i:02d}"] = characters[i % len(LETTERS)][-1] if i in OUTLIERS else drawing
    for name, drawing in images.items():
        path = to / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawing).save(path)


def tabulate(to: Path) -> None:
    """Write both tables: each machine has its own heat and speed, and its current depends on both."""
    generator = np.random.default_rng(SEED)

    def measure(rows: int) -> np.ndarray:
        """Return (rows, 3) for a new machine."""
        heat = generator.normal(60, 6) + generator.normal(0, 1, rows)
        speed = generator.normal(1500, 120) + generator.normal(0, 15, rows)
        friction = generator.lognormal(0, 0.15)
        current = friction * speed / 100 + np.exp((heat - 60) / 8) + generator.normal(0, 0.1, rows)
        return np.stack([heat, speed, current], 1)

    lines = ["machine,heat,speed,current"]
    for name in range(1, MACHINES + 1):
        lines += [f"{name:02d},{h:.2f},{s:.1f},{c:.2f}" for h, s, c in measure(ROWS)]
    (to / "machines.csv").write_text("\n".join(lines) + "\n")
    rows, other = measure(MORE_ROWS), measure(MORE_ROWS)
    for i in OUTLIER_ROWS:
        rows[i - 1, 2] = other[i - 1, 2]
    lines = ["heat,speed,current", *(f"{h:.2f},{s:.1f},{c:.2f}" for h, s, c in rows)]
    (to / "machine.csv").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    draw(Path(__file__).parent)
    tabulate(Path(__file__).parent)
