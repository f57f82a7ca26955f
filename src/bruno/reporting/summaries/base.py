"""`summarise`: the result of a job, with a table, a note and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

from bruno.reporting.results import Result
from bruno.tasks.contamination import Contamination


@singledispatch
def summarise(outcome: Any) -> Result:
    """The result of a job, ready to be written and shown."""
    raise TypeError(f"`outcome` must be the result of a job; got {type(outcome).__name__}.")


def short_names(names: Sequence[str]) -> list[str]:
    """File names without their folders, if they stay different."""
    short = [name.rsplit("/", 1)[-1] for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


def joined(*sentences: str) -> str:
    """Sentences as a note, without the empty ones."""
    return " ".join(filter(None, sentences))


def on_shown(shown: int, outliers: int) -> str:
    """A sentence if not all outliers are shown; otherwise empty."""
    return f"The {shown} most unusual of {outliers:,} outliers." if shown < outliers else ""


def on_contamination(found: Contamination, advice: str) -> str:
    """Sentences on sets that seem to contain faults, with the command that calibrates on clean data."""
    return (
        f"The held-out sets seem to contain faults: about {100 * found.fraction:.0f} % of the rows. "
        f"Thresholds then miss such faults. Calibrate on clean sets: {advice}."
    )
