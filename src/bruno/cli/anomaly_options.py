"""Options of the commands of `bruno anomaly`, as dataclasses whose fields become options of a command."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from bruno.checks import check_omitted
from bruno.cli.options import Group, check_number

_RATE = 0.01


@dataclass(frozen=True)
class DecisionOptions:
    """What is flagged, and what is in the evidence."""

    rate: Annotated[
        float | None,
        typer.Option(help=f"False-alarm rate: elements with p ≤ rate are flagged; {_RATE} by default."),
    ] = None
    threshold: Annotated[
        float | None, typer.Option(help="Flag scores below this, instead of calibrating.")
    ] = None
    count_all: Annotated[
        bool,
        typer.Option("--count-all", help="Keep outliers in the evidence; by default, they are excluded."),
    ] = False
    data: Annotated[
        str | None,
        typer.Option(help="Calibrate on this, not on the model's data: a dataset, class folders, or a CSV."),
    ] = None

    def __post_init__(self) -> None:
        if self.threshold is not None:
            check_number("--threshold", self.threshold)

    @property
    def decision(self) -> dict[str, Any]:
        """The arguments of a detector."""
        return {
            "rate": self.rate,
            "threshold": self.threshold,
            "count_all": self.count_all,
            "data": self.data,
        }


@dataclass(frozen=True)
class StreamDecisionOptions(DecisionOptions):
    """What is flagged in a stream, also by ranks within the set."""

    within: Annotated[
        bool, typer.Option("--within", help="Judge by ranks within the set; needs --count-all.")
    ] = False

    @property
    def stream_decision(self) -> dict[str, Any]:
        """The arguments of the detector of a stream."""
        return {**self.decision, "within": self.within}


@dataclass(frozen=True)
class SetOptions:
    """Which elements form a set."""

    one_set: Annotated[
        bool,
        typer.Option("--one-set", help="Take all rows as one set, even if the model was trained on several."),
    ] = False
    group: Group = None

    @property
    def sets(self) -> dict[str, Any]:
        """The arguments of the library."""
        return {"one_set": self.one_set, "group": self.group}


@dataclass(frozen=True)
class SyntheticOptions:
    """The classes of synthetic elements, which are judged if no files are given."""

    classes: Annotated[
        str | None, typer.Option(help="For synthetic data: only these classes, such as 1,7.")
    ] = None
    set_class: Annotated[
        str | None, typer.Option(help="For synthetic data: the class of the set; others are outliers.")
    ] = None

    @property
    def synthetic(self) -> dict[str, Any]:
        """The arguments of synthetic elements."""
        return {
            "classes": None if self.classes is None else self.classes.split(","),
            "set_class": self.set_class,
        }

    def reject(self) -> None:
        """Raise if classes are given, as there are files."""
        reason = "`classes` and `set_class` are for synthetic data, not for files;"
        check_omitted(reason, classes=self.classes, set_class=self.set_class)


@dataclass(frozen=True)
class StoreOptions:
    """A store with a set for each key, and how a stream continues with it."""

    store: Annotated[
        Path, typer.Option(help="A database with the states of all sets; created if it does not exist.")
    ]
    window: Annotated[
        int | None,
        typer.Option(help="Limit the evidence of a set to this many of its latest elements; at least 20."),
    ] = None
    half_life: Annotated[
        float | None,
        typer.Option(help="The weight of an element halves after this many further elements."),
    ] = None
    offset: Annotated[
        str | None, typer.Option(help="A column of increasing offsets, to skip rows that were judged before.")
    ] = None
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Standard input restarts at its first line: skip lines judged before."),
    ] = False
    commit_rows: Annotated[
        int | None, typer.Option(help="Commit after this many rows; 10,000 by default.")
    ] = None
    commit_seconds: Annotated[
        float | None, typer.Option(help="Commit after this many seconds; 1 by default.")
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the library that are given, besides the store."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "store"}
        return {name: value for name, value in values.items() if value is not None and value is not False}


@dataclass(frozen=True)
class ReportOptions:
    """What is reported of each element, and how."""

    explain: Annotated[
        bool, typer.Option("--explain", help="Explain which columns, or patches, make an element an outlier.")
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line; everything else on standard error.")
    ] = False
