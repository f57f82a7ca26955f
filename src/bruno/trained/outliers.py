"""The most unusual elements of a stream or batch, with the columns that explain them."""

from __future__ import annotations

from dataclasses import dataclass

from bruno.kinds import Kind
from bruno.tasks.attribution import UnusualColumn, unusual_column
from bruno.tasks.stream_summary import JudgedElement, StreamSummary


@dataclass(frozen=True, eq=False)
class Outliers:
    """The outliers of a stream or batch, the most unusual first.

    Attributes:
        job: the job that found them: "anomaly" or "anomaly-batch".
        elements: the most unusual outliers, at most as many as the summary keeps.
        columns: the most unusual column of each row; None for images, or if the model does not impute.
        summary: all judgements.
        kind: kind of the elements.
    """

    job: str
    elements: tuple[JudgedElement, ...]
    columns: tuple[UnusualColumn | None, ...]
    summary: StreamSummary
    kind: Kind

    @classmethod
    def of(cls, job: str, summary: StreamSummary, kind: Kind) -> Outliers:
        """The outliers of a summary, with their unusual columns."""
        elements = summary.most_unusual
        columns = [
            None if kind.is_images or one.given is None else unusual_column(one.given, one.x)
            for one in elements
        ]
        return cls(job, elements, tuple(columns), summary, kind)
