"""Images joined into one picture."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor


def grid(
    images: UInt8[Tensor, "n channels height width"], columns: int, padding: int = 2, background: int = 255
) -> UInt8[np.ndarray, "rows columns channels"]:
    """Images side by side, row after row, with padding around each; what is left of the last row is empty."""
    n, channels, height, width = images.shape
    if n < 1 or channels not in (1, 3):
        raise ValueError(f"`images` must be at least one, with 1 or 3 channels; got {tuple(images.shape)}.")
    if columns < 1 or padding < 0:
        raise ValueError(f"`columns` must be at least 1 and `padding` 0; got {columns} and {padding}.")
    rows = -(-n // columns)
    cells = images.new_full((rows * columns, channels, height + padding, width + padding), background)
    cells[:n, :, :height, :width] = images
    joined = cells.view(rows, columns, *cells.shape[1:]).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    # Each cell has its padding below and to the right; the picture also needs it above and to the left.
    picture = joined.new_full((joined.shape[0] + padding, joined.shape[1] + padding, channels), background)
    picture[padding:, padding:] = joined
    return picture.cpu().numpy()


def prefix_grid(
    inputs: UInt8[Tensor, "n channels height width"],
    samples: UInt8[Tensor, "columns samples channels height width"],
    padding: int = 2,
    background: int = 255,
) -> UInt8[np.ndarray, "picture_rows picture_columns channels"]:
    """The paper's picture: the inputs on top, and below each what was drawn once the model had seen it too.

    With one column more than there are inputs, the first has no input above it: it is drawn from the prior.
    """
    columns, channels = len(samples), samples.shape[2]
    if columns - len(inputs) not in (0, 1) or inputs.shape[1:] != samples.shape[2:]:
        raise ValueError(
            f"`samples` must have a column for each of the {len(inputs)} inputs and one for the prior, of "
            f"images of the same shape; got {tuple(samples.shape)} for inputs {tuple(inputs.shape)}."
        )
    nothing = inputs.new_full((columns - len(inputs), channels, *inputs.shape[2:]), background)
    top = grid(torch.cat([nothing, inputs]), columns, padding, background)
    below = grid(samples.transpose(0, 1).flatten(0, 1), columns, padding, background)
    between = np.full((padding, *top.shape[1:]), background, np.uint8)  # sets the inputs apart
    return np.concatenate([top, between, below])
