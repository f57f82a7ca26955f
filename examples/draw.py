"""Draws the images beside this file, which no model has seen: `python examples/draw.py`.

known/a ... known/e   five drawings of each of five characters
new/                  three more of each, to classify, or to rank by what they have in common
stream/               twelve of a sixth character, one after the other; the 8th and 11th are strangers
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from bruno.data.drawn import draw_characters

SEED = 115  # of which the package itself draws none
LETTERS = "abcde"
KNOWN, NEW, STREAM = 5, 3, 12
STRANGERS = (8, 11)


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


if __name__ == "__main__":
    draw(Path(__file__).parent)
