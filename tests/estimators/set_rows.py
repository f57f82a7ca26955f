"""Rows of sets whose means differ."""

import numpy as np


def sets_of_rows(sets: int, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of three columns and the number of their set: means N(0, 9), deviations within a set 1."""
    random = np.random.default_rng(seed)
    means = 3 * random.normal(size=(sets, 1, 3))
    rows = means + random.normal(size=(sets, size, 3))
    return rows.reshape(-1, 3), np.repeat(np.arange(sets), size)
