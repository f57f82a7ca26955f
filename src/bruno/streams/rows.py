"""The arguments of a step of keyed streams: their checks, and rounds with at most one row of each set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray

from bruno.arrays import ArrayLike, as_tensor, is_frame
from bruno.checks import check_at_least, check_count
from bruno.data.columns import MAX_NUMBER, check_not_all_missing
from bruno.data.frames import frame_rows
from bruno.kinds import Images, Kind
from bruno.streams.codec import NO_OFFSET
from bruno.tasks.stream_evidence import START


def check_forgetting(window: int | None, half_life: float | None, within: bool) -> None:
    """Raise an error unless the window, the half-life and ranks within sets can be used together."""
    if window is not None:
        check_count("window", window)
        check_at_least("window", window, START)
    if half_life is not None and not 0 < half_life < np.inf:
        raise ValueError(f"`half_life` must be above 0 and finite; got {half_life}.")
    if window is not None and half_life is not None:
        raise ValueError(f"`window` and `half_life` cannot be combined; got {window} and {half_life}.")
    if within and (window is not None or half_life is not None):
        raise ValueError("`within` ranks among all elements of a set; omit `window` and `half_life`.")


def checked_keys(keys: Sequence[Any] | NDArray[Any]) -> list[str]:
    """The names of sets; raises ValueError if one is missing."""
    names = [keys] if isinstance(keys, str) else list(keys)
    if not names:
        raise ValueError("`keys` must name the set of at least one row; got none.")
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name:
            if isinstance(name, int | np.integer) and not isinstance(name, bool):
                names[i] = str(name)
            else:
                raise ValueError(f"`keys` must name the set of every row; row {i + 1} has {name!r}.")
    return names


def checked_elements(x: ArrayLike, n: int, kind: Kind, missing: bool) -> tuple[Any, NDArray[np.bool_] | None]:
    """Rows as float64 in numpy, or images as a tensor, (n, *shape); and which are complete, None if all are.

    With `missing`, numbers of rows may be NaN.
    """
    shape = kind.shape
    if isinstance(kind, Images):
        images = as_tensor(x, kind=kind)
        if images.shape != (n, *shape):
            raise ValueError(f"`x` must have shape {(n, *shape)}; got {tuple(images.shape)}.")
        return images, None
    if is_frame(x):
        x, _ = frame_rows(x, "", kind.columns)
    rows = x if isinstance(x, np.ndarray) else as_tensor(x).detach().cpu().numpy()
    if rows.shape != (n, *shape) or rows.dtype.kind not in "fiu":
        raise ValueError(
            f"`x` must be numbers of shape {(n, *shape)}, one row for each key; got {rows.dtype} of shape "
            f"{rows.shape}."
        )
    rows = rows.astype(np.float64, copy=False)
    return rows, complete_rows(rows, missing)


def complete_rows(
    rows: Float[np.ndarray, "n dim"], missing: bool, name: str = "x"
) -> Bool[np.ndarray, " n"] | None:
    """Which rows have all their numbers; None if all have. Raises unless all numbers can be used."""
    if np.maximum.reduce(np.abs(rows), None, initial=0.0) <= MAX_NUMBER:  # never true of NaN
        return None
    with np.errstate(invalid="ignore"):
        fine, holes = np.abs(rows) <= MAX_NUMBER, np.isnan(rows)
    if missing:
        fine |= holes
    if not fine.all():
        row, column = (int(place[0]) for place in np.nonzero(~fine))
        raise ValueError(
            f"`{name}` must be finite and below {MAX_NUMBER:.1e}; row {row + 1} has {rows[row, column]} in "
            f"column {column + 1}."
        )
    check_not_all_missing(holes, name)
    return np.asarray(~holes.any(1))


def checked_offsets(offsets: Any, n: int) -> NDArray[np.int64] | None:
    """Positions in the input as integers; None if there are none."""
    if offsets is None:
        return None
    found = np.asarray(offsets)
    if found.shape != (n,) or found.dtype.kind not in "iu" or (n and int(found.min()) <= NO_OFFSET):
        raise ValueError(f"`offsets` must be {n} whole numbers; got {found.dtype} of shape {found.shape}.")
    return found.astype(np.int64)


def rounds_of(slots: NDArray[np.intp]) -> Iterable[NDArray[np.intp]]:
    """The rows of a batch in rounds with at most one row of each set, in the order of the rows of a set."""
    n = len(slots)
    if n == 1:
        return [np.zeros(1, np.intp)]
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    new = np.flatnonzero(np.diff(ordered, prepend=-1))
    rank = np.arange(n) - np.repeat(new, np.diff(new, append=n))
    rounds = np.empty(n, np.intp)
    rounds[order] = rank
    by_round = np.argsort(rounds, kind="stable")
    ends = np.cumsum(np.bincount(rounds))
    return np.split(by_round, ends[:-1])
