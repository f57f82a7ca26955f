"""Samples of a trained model: given sets, from the prior, and given repeated elements."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from bruno.arrays import to_numpy
from bruno.data import SetSampler
from bruno.files import atomic_write, inside
from bruno.model import Samples
from bruno.tasks import Progress
from bruno.tasks.generation import (
    SetSamples,
    SpreadByRepeats,
    draw_samples,
    prior_samples,
    samples_by_prefix,
    spread_by_repeats,
)
from bruno.tasks.specks import SpeckResult, measure_specks
from bruno.trained.data import Source, TrainedData

_SAMPLED_SET_SIZE = 8  # of sets to condition samples on
_SAMPLES_FOR_VARIANCE = 100  # at least, over all repeated elements


@dataclass(frozen=True)
class SpeckEvaluation:
    """The share of samples with a speck, and the name of the data they were conditioned on."""

    data: str
    result: SpeckResult


class GenerationJobs(TrainedData):
    """The sampling jobs of a trained model; see `Trained` for `split`, `data` and `invert`."""

    def sample(
        self,
        given: Source | None = None,
        *,
        samples: int = 8,
        prefixes: Sequence[int] | None = None,
        sets: int = 1,
        set_size: int | None = None,
        temperature: float = 1.0,
        split: str | None = None,
        data: str | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
    ) -> SetSamples:
        """More of the same: samples after prefixes of a set, your own or from the data.

        Args:
            given: the set to condition on: files, folders, arrays; by default sets of the data.
            samples: drawn after each prefix.
            prefixes: numbers of elements to condition on, 0 only as the first; by default 0 to all.
            sets: how many to draw from the data, each of another class.
            set_size: elements of each of these; 8 by default.
            temperature: below 1, samples are closer to the mean of the latents.
            split: split of the data; test by default.
            data: a dataset or the path of user data, instead of the model's own data.
            classes: use only these classes.
            invert: turn dark ink into bright ink in user images; as in training by default.
            skip_bad: skip files that cannot be read.
            seed: seed of the sets and the samples.
        """
        generator = self._generator(seed)
        x = self._sets(given, sets, set_size, split, data, classes, invert, skip_bad, generator)
        _check_prefixes(() if prefixes is None else prefixes, x.shape[1])
        found = samples_by_prefix(
            self.model, x, samples, lengths=prefixes, generator=generator, temperature=temperature
        )
        return replace(found, samples=self._with_columns(found.samples))

    def sample_prior(self, samples: int = 8, *, temperature: float = 1.0, seed: int = 0) -> Samples:
        """Samples from the prior, each the first element of its own set."""
        generator = self._generator(seed)
        return self._with_columns(
            prior_samples(self.model, samples, generator=generator, temperature=temperature)
        )

    def _with_columns(self, samples: Samples) -> Samples:
        return replace(samples, columns=self.columns)

    def sample_repeats(
        self,
        given: Source | None = None,
        *,
        samples: int = 8,
        set_size: int | None = None,
        temperature: float = 1.0,
        split: str | None = None,
        data: str | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
    ) -> SpreadByRepeats:
        """Samples after the same element was seen 1 to 20 times, for each of some elements.

        At least as many samples are drawn as a variance needs. The arguments are those of `sample`.
        """
        generator = self._generator(seed)
        (x,) = self._sets(given, 1, set_size, split, data, classes, invert, skip_bad, generator)
        enough = -(-_SAMPLES_FOR_VARIANCE // len(x))
        return spread_by_repeats(
            self.model, x, samples=max(samples, enough, 2), generator=generator, temperature=temperature
        )

    def sample_classes(
        self,
        *,
        given: int = 6,
        samples: int = 6,
        temperature: float = 0.8,
        split: str = "test",
        seed: int = 0,
    ) -> SetSamples:
        """Samples of every class of a split, given its first elements."""
        examples, generator = self._select(split).examples, self._generator(seed)
        sets = [examples.elements[examples.labels == label][:given] for label in range(len(examples.names))]
        x = torch.stack(sets).to(self.device)
        posterior = self.model.condition(x)
        drawn = draw_samples(posterior, samples, generator=generator, temperature=temperature)
        return SetSamples(x, (given,), replace(drawn, x=drawn.x.unsqueeze(1)))

    def measure_specks(
        self,
        *,
        samples: int = 1000,
        given: int = 5,
        temperature: float = 1.0,
        split: str | None = None,
        data: str | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> SpeckEvaluation:
        """Share of samples with an isolated dot of one or two pixels, beside that of the data.

        Args:
            samples: drawn, each of a random set of one class.
            given: images to condition each sample on.
            temperature: below 1, samples are closer to the mean of the latents.
            split: split of the data; test by default.
            data: a dataset or the path of user data, instead of the model's own data.
            classes: use only these classes.
            invert: turn dark ink into bright ink in user images; as in training by default.
            seed: seed of the sets and the samples.
            progress: called as progress(done, total).
        """
        selected = self._select(split, data, classes, invert)
        found = measure_specks(
            self.model,
            selected.examples,
            samples=samples,
            given=given,
            temperature=temperature,
            generator=self._generator(seed),
            progress=progress,
        )
        return SpeckEvaluation(selected.name, found)

    def _sets(
        self,
        given: Source | None,
        sets: int,
        set_size: int | None,
        split: str | None,
        data: str | None,
        classes: Sequence[str] | None,
        invert: bool | None,
        skip_bad: bool,
        generator: Generator,
    ) -> Tensor:
        """(sets, set_size, *shape): the given set, or sets of different classes of the data."""
        if given is not None:
            return self.read(given, invert=invert, skip_bad=skip_bad).x.to(self.device).unsqueeze(0)
        examples = self._select(split, data, classes, invert).examples
        if not 1 <= sets <= len(examples.names):
            raise ValueError(f"`sets` must be from 1 to the {len(examples.names)} classes; got {sets}.")
        sampler = SetSampler(examples, device=self.device)
        if set_size is None:
            set_size = min(_SAMPLED_SET_SIZE, sampler.min_count)
        sampler.check_set_size(set_size, "set_size")
        drawn: Tensor = sampler.tasks(1, sets, set_size, generator)[0]
        return drawn

    def save_samples(self, outcome: Samples | SetSamples | SpreadByRepeats, name: str) -> list[Path]:
        """Write samples as npz, and those of rows as CSV too; returns the paths."""
        samples = outcome if isinstance(outcome, Samples) else outcome.samples
        arrays: dict[str, Any] = {"samples": samples.images if samples.is_images else samples.x, "seen": (0,)}
        if not isinstance(outcome, Samples):
            seen = outcome.lengths if isinstance(outcome, SetSamples) else outcome.repeats
            arrays |= {"inputs": outcome.inputs, "seen": seen}
        folder = inside(self.folder, "results")
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.npz"]
        with atomic_write(paths[0]) as beside, beside.open("wb") as file:
            np.savez_compressed(
                file, allow_pickle=False, **{key: np.asarray(to_numpy(part)) for key, part in arrays.items()}
            )
        if not samples.is_images:
            paths.append(folder / f"{name}.csv")
            self._write_rows(paths[-1], samples.x, arrays["seen"])
        return paths

    def _write_rows(self, path: Path, x: Tensor, seen: Sequence[int]) -> None:
        columns = self.columns or tuple(map(str, range(1, x.shape[-1] + 1)))
        sets = x.reshape(-1, len(seen), *x.shape[-2:])
        with atomic_write(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("set", "seen", *columns))
            for number, prefixes in enumerate(sets.tolist(), start=1):
                for n, rows in zip(seen, prefixes, strict=True):
                    writer.writerows((number, n, *(f"{value:.10g}" for value in row)) for row in rows)


def _check_prefixes(prefixes: Sequence[int], most: int) -> None:
    """Raise unless prefixes are of a set of `most` elements, and the prior, if any, comes first."""
    if isinstance(prefixes, int):
        raise TypeError(f"`prefixes` must be a list of numbers; got {prefixes}.")
    for place, length in enumerate(prefixes):
        if not 0 <= length <= most:
            raise ValueError(f"`prefixes` must be from 0 to the {most} elements of a set; got {length}.")
        if place and not length:
            raise ValueError(f"`prefixes` must have 0 first; got {length} after {prefixes[place - 1]}.")
