"""What is said of a stream or of a batch while it is judged, and what is kept of it to be shown."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, replace
from operator import itemgetter

import torch
from torch import Tensor

from bruno.cli.opening import Opened, say_unlike
from bruno.cli.options import console, short_names
from bruno.data import Element
from bruno.model import Posterior
from bruno.reporting.plots import ACROSS, scores_over_time, to_uint8
from bruno.reporting.results import Result
from bruno.tasks.anomaly import Detector, batch_scores

_LOWEST = 20  # scores of a batch that are told
_KEPT = 10_000  # scores of a stream, the latest


class Judged:
    """What to tell of a stream, however long it goes on: its latest scores, and some of its images.

    Those are the lowest of what is odd, and the highest of all else.
    """

    def __init__(self, levels: int, most: int | None = None) -> None:
        self._levels = levels
        self.count = self._outliers = self._absurd = 0
        self._latest: deque[tuple[str, float, float | None, bool, bool]] = deque(maxlen=most)
        self._odd: list[tuple[float, int, Tensor]] = []
        self._ordinary: list[tuple[float, int, Tensor]] = []

    def add(
        self, element: Element, score: float, threshold: float | None, *, odd: bool, out_of_distribution: bool
    ) -> None:
        """One more."""
        self.count += 1
        self._outliers += odd
        self._absurd += out_of_distribution
        self._latest.append((element.name, score, threshold, odd, out_of_distribution))
        kept = self._odd if odd else self._ordinary
        kept.append((score, self.count, element.x))
        kept.sort(key=itemgetter(0), reverse=not odd)
        del kept[ACROSS:]

    def result(self, name: str, title: str, what: str, given: str) -> Result:
        """Of a stream or batch, whose elements are scored given others."""
        told = f"{self._outliers} of {self.count} are odd"
        if self._absurd:
            told += f", {self._absurd} of them unlike anything in any set, which did not count as seen"
        some = f" The lowest {ACROSS} of them are shown." * (self._outliers > ACROSS and self._levels > 0)
        names, scores, thresholds, flagged, out_of_distribution = map(list, zip(*self._latest, strict=True))
        values = {"elements": self.count, "outliers": self._outliers, "out_of_distribution": self._absurd}
        return Result(
            name,
            title,
            {**values, "names": names, "scores": scores, "thresholds": thresholds},
            note=f"{told}.{some} The score is log p(x | {given}) − log p(x), in nats.",
            picture=scores_over_time(
                scores,
                thresholds,
                flagged,
                out_of_distribution,
                odd=self._images(self._odd),
                ordinary=self._images(self._ordinary),
                first=self.count - len(scores) + 1,
                what=what,
            ),
        )

    def _images(self, kept: list[tuple[float, int, Tensor]]) -> dict[int, Tensor]:
        """By their place in the stream; rows have none."""
        if not self._levels:
            return {}
        return {place: to_uint8(x, self._levels) for _, place, x in sorted(kept, key=itemgetter(1))}


def along(
    opened: Opened, detector: Detector, known: Posterior, elements: Iterable[Element], as_json: bool
) -> tuple[Judged, Posterior, BaseException | None]:
    """Each is judged and said as it comes; a stream may go on for ever, so only the latest are kept.

    Also gives what is known in the end. That comes with the stream's or, as the last thing returned tells,
    by an interrupt or at an element that cannot be read: what was judged before is not lost.
    """
    judged, ended_by = Judged(opened.model.levels, _KEPT), None
    told_brighter = False
    group: str | None = None  # until there is another
    try:
        for i, element in enumerate(elements):
            brighter = opened.brighter(element.x)
            if i == 0:
                opened.warn_if_unlike(element.x)
                group = element.group
            elif brighter and not told_brighter:
                say_unlike(f"{element.name} is", brighter)
            told_brighter = told_brighter or bool(brighter)
            if group is not None and element.group != group:
                console.print(
                    f"{element.name}: {opened.group} is {element.group}, and was {group}; all are judged as "
                    "one set. Give each a stream of its own.",
                    soft_wrap=True,
                )
                group = None
            said, known = detector.step(known, element.x.to(opened.device))
            judged.add(
                element,
                said.score,
                said.threshold,
                odd=said.outlier,
                out_of_distribution=said.out_of_distribution,
            )
            if as_json:
                print(json.dumps({"element": element.name, **asdict(said)}), flush=True)
            else:
                flag = _flag(odd=said.outlier, out_of_distribution=said.out_of_distribution)
                line = f"{said.score:+10.2f}  {element.name}  {flag}".rstrip()
                console.print(line, highlight=False, soft_wrap=True)
    except (KeyboardInterrupt, OSError, ValueError) as error:
        if not judged.count:
            raise
        ended_by = error
    if not judged.count:
        raise ValueError("`stream` must hold at least one element; it is empty.")
    return judged, known, ended_by


def _flag(*, odd: bool, out_of_distribution: bool) -> str:
    return ("odd one out" + ", unlike anything in any set" * out_of_distribution) * odd


def of_a_batch(opened: Opened, elements: list[Element], threshold: float, floor: float) -> Result:
    """Each given all the others."""
    x = torch.stack([element.x for element in elements]).to(opened.device)
    scores, out_of_distribution = (part.tolist() for part in batch_scores(opened.model, x, floor))
    judged, told = Judged(opened.model.levels), []
    for element, score, beyond in zip(elements, scores, out_of_distribution, strict=True):
        odd = beyond or score < threshold
        judged.add(element, score, threshold, odd=odd, out_of_distribution=beyond)
        told.append((not beyond, score, element.name, _flag(odd=odd, out_of_distribution=beyond)))
    lowest = sorted(told)[:_LOWEST]  # what is out_of_distribution first
    names = short_names([name for _, _, name, _ in lowest])
    rows = tuple((f"{row[1]:+.2f}", name, row[3]) for row, name in zip(lowest, names, strict=True))
    found = judged.result("anomaly-batch", "Which is the odd one out of a batch?", "batch", "all others")
    return replace(found, columns=("score", "the lowest", ""), rows=rows)
