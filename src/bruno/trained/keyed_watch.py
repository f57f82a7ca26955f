"""Watched streams with a store: rows of files or of standard input, in a set for each key."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

import torch

from bruno.arrays import is_frame
from bruno.data import Element, ElementReader
from bruno.data.file_readers import Place
from bruno.data.reader import Placed
from bruno.model import Posterior
from bruno.signals import StopSignal
from bruno.streams.judgements import Judgements
from bruno.streams.store import IN_MEMORY, Mark, Store
from bruno.tasks.anomaly import Judgement
from bruno.tasks.detector import Detector
from bruno.trained.arrivals import batches, batches_as_they_arrive
from bruno.trained.base import Source, are_paths, warn_of_unreadable
from bruno.trained.detection import DetectionJobs
from bruno.trained.explanation import OutlierExplainer
from bruno.trained.keyed import COMMIT_ROWS, COMMIT_SECONDS, KeyedDetector
from bruno.trained.stream_elements import is_skipped_without_group
from bruno.trained.watch import Judged, WatchedStream

_log = logging.getLogger(__name__)

ONE_SET = "*"  # the key of a stream without groups
_MAX_SETS, _OTHERS = 1000, "other sets"  # a summary names this many sets, and counts the rest together
_STANDARD_INPUT = "-"


class KeyedWatch(WatchedStream):
    """Judges rows as they arrive, each in the set of its key; an iterator of `Judged`.

    The judgement of a row is final once the next row is requested: report it before that. As a context
    manager, a watch commits at the end; if the body raises, rows that may not have been reported are undone.

    Attributes:
        keyed: the detector of all sets, with the store.
        summary: the judgements so far, in bounded memory.
        kind: kind of the elements.
        advice: the command that calibrates on clean data.
        repeated: number of rows that were skipped because they were judged before.
    """

    def __init__(
        self,
        trained: DetectionJobs,
        stream: Source | Iterable[Element] | TextIO,
        make: Callable[[], KeyedDetector],
        reader: ElementReader,
        *,
        one_set: bool,
        replay: bool,
        explain: bool,
    ) -> None:
        super().__init__(trained)
        self._trained, self._stream, self._reader = trained, stream, reader
        self._one_set = one_set or trained.model.kind.is_images
        self._replay = replay
        self._paths = _checked_paths(stream, reader)
        self.keyed = make()
        self.repeated = 0
        self._explainer = OutlierExplainer(trained.columns, self.detector.reference) if explain else None
        self._names_columns = trained.model.imputer is not None  # of outliers, given their sets

    @property
    def detector(self) -> Detector:
        """The detector."""
        return self.keyed.detector

    def __iter__(self) -> Iterator[Judged]:
        for source, elements in self._sources():
            for batch in elements:
                if batch:
                    yield from self._judged(batch, source)
                    self.keyed.reported()
                else:  # nothing arrives at the moment
                    self.keyed.commit()
        warn_of_unreadable(self._reader)
        if self.repeated:
            _log.info("skipped %d rows that were judged before", self.repeated)
        if not self.summary.count and not self.repeated and self._is_new():
            raise ValueError("`stream` must have at least one element; it is empty.")

    def _judged(self, rows: list[Placed], source: str | None) -> Iterator[Judged]:
        """Judge a batch, which no signal interrupts, and yield its rows except repeated ones."""
        batch, places = zip(*rows, strict=True)
        if not self.summary.count:
            self._trained.warn_if_unfamiliar(batch[0].x)
        given = [place.offset for place in places if place is not None and place.offset is not None]
        marks = None
        if source is not None and (last := places[-1]) is not None:
            marks = {source: Mark(last.line, last.check)}
        names = [f"offset {offset}" for offset in given] or [element.name for element in batch]
        with StopSignal() as stop:
            found = self.keyed.step(
                [ONE_SET if self._one_set else element.group for element in batch],
                torch.stack([element.x for element in batch]),
                ids=names,
                offsets=given or None,
                sources=marks,
                evidence=self._explainer is not None or self._names_columns,
            )
        if stop.number:
            raise KeyboardInterrupt(stop.number)
        for i, element in enumerate(batch):
            if found.skipped[i]:
                self.repeated += 1
                continue
            judgement, before = self._explained(found, i, element)
            judged = Judged(element._replace(name=names[i]), judgement)
            self._add(judged, before)
            yield judged

    def _explained(self, found: Judgements, i: int, element: Element) -> tuple[Judgement, Posterior | None]:
        """The judgement of row i and, for an outlier, the posterior by which it was judged, if known."""
        judgement = found[i]
        if found.evidence is None or not judgement.outlier:
            return judgement, None
        model = self._trained.model
        given = Posterior(model, found.evidence[i : i + 1].to(model.device))
        if self._explainer is not None:
            (parts,) = self._explainer.contributions(given, element.x.unsqueeze(0))
            judgement = replace(judgement, contributions=parts)
        return judgement, given[0]

    def _add(self, judged: Judged, given: Posterior | None) -> None:
        x = judged.element.x if given is None else given.impute(judged.element.x)
        group = "" if self._one_set else judged.element.group
        known = self.summary.groups
        group = group if group in known or len(known) < _MAX_SETS else _OTHERS
        self.summary.add(judged.element.name, x, judged.judgement, group, given)

    # --- sources -----------------------------------------------------------------------------------------

    def _sources(self) -> Iterator[tuple[str | None, Iterator[list[Placed]]]]:
        """Yield each source with batches of its new rows; None names a source that cannot be continued."""
        ended = self.keyed.store.path != IN_MEMORY  # else there is no later run that judges the last line
        if self._paths is not None:
            for path in self._paths:
                name = str(path.resolve())
                place = self._place(name)
                rows = self._keyed(self._reader.read_placed(path, place, ended=ended))
                yield (None if self.kind.is_images else name), batches(rows)
        elif hasattr(self._stream, "readline"):
            place = self._place(_STANDARD_INPUT) if self._replay else None
            lines = cast(TextIO, self._stream)
            rows = self._keyed(self._reader.read_placed(lines, place, ended=ended and self._replay))
            yield (
                _STANDARD_INPUT if self._replay else None,
                batches_as_they_arrive(rows, self.keyed.commit_seconds),
            )
        else:
            if is_frame(self._stream):
                elements = self._reader.read_frame(self._stream)
            else:
                read = self._trained.read(cast(Any, self._stream), impute=False)
                elements = (Element(*one) for one in zip(read.names, read.x, read.groups, strict=True))
            rows = self._keyed(Placed(element, None) for element in elements)
            yield None, batches(rows)

    def _place(self, source: str) -> Place | None:
        """How far a source has been read; None if it is new."""
        mark = self.keyed.source(source)
        if mark is None:
            return None
        _log.info("%s: continuing after line %d", source, mark.offset)
        return Place(mark.offset, mark.check)

    def _is_new(self) -> bool:
        names = [str(path.resolve()) for path in self._paths or ()] + [_STANDARD_INPUT] * self._replay
        return all(self.keyed.source(name) is None for name in names)

    def _keyed(self, rows: Iterator[Placed]) -> Iterator[Placed]:
        """The rows; raises ValueError if one has no key."""
        for row in rows:
            element = row.element
            if not self._one_set and not element.group:
                if not self._reader.group:
                    raise ValueError(
                        f"{element.name}: must have the key of its set; got none, as the model was trained "
                        "without a group column. Watch the stream without a store or, if its rows have keys, "
                        "name their column (`group`)."
                    )
                if is_skipped_without_group(element, self._reader):
                    continue
                raise ValueError(
                    f"{element.name}: must have the key of its set, in the column {self._reader.group!r}; "
                    "got none. Name the column (`group`), or judge all rows as one set (`one_set`)."
                )
            yield row

    # --- the store ---------------------------------------------------------------------------------------

    def accept(self, *names: str) -> None:
        """Add elements that were excluded by mistake to their sets, by name."""
        self.keyed.accept(*names)

    def __enter__(self) -> KeyedWatch:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        undone = self.keyed.undo() if kind is not None else 0
        if undone:
            warnings.warn(
                f"the last {undone} rows may not have been reported, and are undone: the next run judges "
                "them again.",
                stacklevel=2,
            )
        self.keyed.close()


class KeyedJobs(DetectionJobs):
    """The jobs of a trained model on streams with a store."""

    def watch_keys(
        self,
        stream: Source | Iterable[Element] | TextIO,
        store: str | Path = IN_MEMORY,
        detector: Detector | Callable[[], Detector] | None = None,
        *,
        group: str | None = None,
        one_set: bool = False,
        window: int | None = None,
        half_life: float | None = None,
        within: bool = False,
        explain: bool = False,
        offset: str | None = None,
        replay: bool = False,
        commit_rows: int = COMMIT_ROWS,
        commit_seconds: float = COMMIT_SECONDS,
        invert: bool | None = None,
        skip_bad: bool = False,
    ) -> KeyedWatch:
        """Watch a stream with a set for each key, and the states in a store: iterate over its judged rows.

        A table that the store has seen under the same path is continued after the last committed line.

        Args:
            stream: files, an open text file such as sys.stdin, arrays or elements.
            store: the file of the store, created if it does not exist, or ":memory:".
            detector: from `Trained.detector`, or a function that returns one; by default calibrated at 1 %.
            group: the column of the keys, if it has another name than in training.
            one_set: all rows are one set.
            window: only this many of the latest elements of a set count, at least 20; by default, all do.
            half_life: the weight of an element is halved each time that its set gets this many more elements.
            within: judge by the rank of an element within its set; the detector must have `count_all`.
            explain: give the contributions of columns or patches to the scores of outliers.
            offset: a column of whole numbers that increase within each key. A row whose offset is at most the
                last one of its key is skipped: it was judged before.
            replay: the text file starts again at its first line; lines that were judged before are skipped.
            commit_rows: commit after this many rows.
            commit_seconds: commit after this many seconds.
            invert: turn dark ink into bright ink; as in training by default.
            skip_bad: skip rows that cannot be read.
        """
        if offset is not None and (replay or self.model.kind.is_images):
            raise ValueError(f"`offset` is for rows, and replaces `replay`; got {offset!r}. Omit one.")
        if replay and not hasattr(stream, "readline"):
            raise ValueError("`replay` is for standard input; tables are continued without it. Omit it.")

        def make() -> KeyedDetector:
            return KeyedDetector(
                self,
                store,
                detector,
                window=window,
                half_life=half_life,
                within=within,
                commit_rows=commit_rows,
                commit_seconds=commit_seconds,
            )

        reader = self.reader(invert=invert, skip_bad=skip_bad, group=group, offset=offset or "")
        return KeyedWatch(self, stream, make, reader, one_set=one_set, replay=replay, explain=explain)

    def accept_in_store(self, names: str | Sequence[str], store: str | Path) -> int:
        """Add elements that were excluded by mistake to their sets; returns how many are still excluded.

        Args:
            names: the name or names of the elements, as a stream or the table of its outliers reports them,
                see `KeyedDetector.accept`.
            store: the store.
        """
        if not Path(store).is_file():
            raise ValueError(f"`store` must be the store of a stream; {store} does not exist.")
        with Store.opened(store, self.model.fingerprint()) as opened:
            settings = opened.settings
        # Elements that are accepted are not judged: any detector will do.
        with KeyedDetector(self, store, Detector(self.model, count_all=True), **settings) as keyed:
            keyed.accept(*([names] if isinstance(names, str) else names))
            return keyed.store.count_excluded()


def _checked_paths(stream: object, reader: ElementReader) -> list[Path] | None:
    """The files of a stream, with those of its folders; None if it is something else."""
    if not are_paths(stream):
        return None
    given = [stream] if isinstance(stream, str | Path) else cast(list[str], stream)
    found: list[Path] = []
    for path in map(Path, given):
        if not path.exists() and not reader.skip_bad:
            raise FileNotFoundError(f"{path}: no such file or folder.")
        found += reader.files(path) if path.is_dir() else [path]
    return found
