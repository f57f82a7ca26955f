"""Sampling from a trained model: given sets, from the prior, and given repeated elements."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from bruno.arrays import NumpyResult
from bruno.checks import check_count, check_omitted, check_whole_numbers
from bruno.data import Examples, SetSampler
from bruno.files import inside
from bruno.model import Samples
from bruno.tasks import Progress
from bruno.tasks.generation import (
    REPEATS,
    SetSamples,
    SpreadByRepeats,
    draw_in_parts,
    draw_samples,
    posterior_by_prefix,
    prior_samples,
    samples_by_prefix,
    spread_by_repeats,
)
from bruno.tasks.specks import SpeckResult, measure_specks
from bruno.trained.base import Source
from bruno.trained.data import Data, TrainedData
from bruno.trained.sample_files import FirstSamples, write_parts

_log = logging.getLogger(__name__)
_SAMPLED_SET_SIZE = 8  # of sets to condition samples on
_SAMPLES_FOR_VARIANCE = 100  # at least, over all repeated elements


@dataclass(frozen=True)
class SpeckEvaluation(NumpyResult):
    """The share of samples with a speck, and the name of the data they were conditioned on."""

    data: str
    result: SpeckResult


@dataclass(frozen=True, eq=False)
class WrittenSamples:
    """Samples in files.

    Attributes:
        outcome: the first samples of each set and prefix, as many as a picture can hold.
        shown: number of these samples.
        count: number of samples in the files.
        paths: the files: an npz, and a CSV for rows.
    """

    outcome: Samples | SetSamples
    shown: int
    count: int
    paths: tuple[Path, ...]


class GenerationJobs(TrainedData):
    """The sampling jobs of a trained model; see `Trained` for `split`, `data` and `invert`."""

    def sample(
        self,
        given: Source | None = None,
        *,
        samples: int = 8,
        prefixes: Sequence[int] | None = None,
        sets: int | None = None,
        set_size: int | None = None,
        temperature: float = 1.0,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
    ) -> SetSamples:
        """Draw samples given prefixes of a set: of your own set, or of random sets of the data.

        Args:
            given: the set to condition on: files, folders, arrays; by default sets of the data.
            samples: number of samples given each prefix.
            prefixes: numbers of elements to condition on; 0, the prior, can only be the first. By default,
                all numbers from 0 to the set size.
            sets: number of sets to draw from the data, each of a different class; 1 by default.
            set_size: number of elements in each of these sets; 8 by default, or the smallest class size.
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
        """Draw samples from the prior, each the first element of its own set."""
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
        repeats: Sequence[int] | None = None,
        samples: int = 8,
        set_size: int | None = None,
        temperature: float = 1.0,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
    ) -> SpreadByRepeats:
        """Draw samples given n copies of one element, for each element of a set and each n in `repeats`.

        By default, n is from 1 to 20. If their variance would be too uncertain, more than `samples`
        are drawn; the result has the first ones. The other arguments are those of `sample`.
        """
        check_count("samples", samples)
        generator = self._generator(seed)
        (x,) = self._sets(given, None, set_size, split, data, classes, invert, skip_bad, generator)
        enough = -(-_SAMPLES_FOR_VARIANCE // len(x))
        found = spread_by_repeats(
            self.model,
            x,
            REPEATS if repeats is None else repeats,
            samples=max(samples, enough, 2),
            generator=generator,
            temperature=temperature,
        )
        kept = replace(found.samples, x=found.samples.x[:, :, :samples])
        return replace(found, samples=self._with_columns(kept))

    def sample_classes(
        self,
        *,
        given: int = 6,
        samples: int = 6,
        temperature: float = 0.8,
        split: str = "test",
        examples: Examples | None = None,
        seed: int = 0,
    ) -> SetSamples:
        """Draw samples of every class of a split or of `examples`, given the first elements of the class."""
        examples = self._select(split).examples if examples is None else examples
        most = int(examples.counts.min())
        if not 1 <= given <= most:
            raise ValueError(
                f"`given` must be from 1 to {most}, the size of the smallest class; got {given}."
            )
        generator = self._generator(seed)
        x = torch.stack([examples.elements[members[:given]] for members in examples.by_class()])
        x = x.to(self.device)
        posterior = self.model.condition(x, generator)
        drawn = draw_samples(posterior, samples, generator=generator, temperature=temperature)
        return SetSamples(x, (given,), self._with_columns(replace(drawn, x=drawn.x.unsqueeze(1))))

    def measure_specks(
        self,
        *,
        samples: int = 1000,
        given: int = 5,
        temperature: float = 1.0,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> SpeckEvaluation:
        """Fractions of samples and of images of the data that have an isolated dot of one or two pixels.

        Args:
            samples: number of samples, each given a random set of one class.
            given: number of images to condition each sample on.
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
        sets: int | None,
        set_size: int | None,
        split: str | None,
        data: Data | None,
        classes: Sequence[str] | None,
        invert: bool | None,
        skip_bad: bool,
        generator: Generator,
    ) -> Tensor:
        """(sets, set_size, *shape): the given set, or sets of different classes of the data."""
        if given is not None:
            of_data = {"sets": sets, "set_size": set_size, "split": split, "data": data, "classes": classes}
            check_omitted("`given` names the set to condition on;", **of_data)
            x = self.read_set(given, invert=invert, skip_bad=skip_bad, name="given")
            return x.to(self.device).unsqueeze(0)
        examples = self._select(split, data, classes, invert).examples
        sets = 1 if sets is None else sets
        if not 1 <= sets <= len(examples.names):
            most = len(examples.names)
            raise ValueError(f"`sets` must be from 1 to {most}, the number of classes; got {sets}.")
        sampler = SetSampler(examples, device=self.device)
        if set_size is None:
            set_size = min(_SAMPLED_SET_SIZE, sampler.min_count)
        sampler.check_set_size(set_size, "set_size")
        drawn: Tensor = sampler.sets_of_different_classes(1, sets, set_size, generator)[0]
        return drawn

    # --- files -------------------------------------------------------------------------------------------

    def write_samples(
        self,
        given: Source | None = None,
        *,
        prior: bool = False,
        samples: int = 8,
        prefixes: Sequence[int] | None = None,
        sets: int | None = None,
        set_size: int | None = None,
        temperature: float = 1.0,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> WrittenSamples:
        """Draw any number of samples and write them to files, in parts, so that the memory is bounded.

        The samples are those of `sample` or, with `prior`, of `sample_prior`, with the same arguments. They
        are also from the prior if no argument describes a set and the dataset of a pretrained model is not on
        this machine. `progress` is called as progress(done, total), in samples.
        """
        generator = self._generator(seed)
        described = {"given": given, "prefixes": prefixes, "sets": sets, "set_size": set_size}
        described |= {"split": split, "data": data, "classes": classes}
        if prior:
            check_omitted("`prior` conditions on nothing;", **described)
        describes_set = any(argument is not None for argument in described.values())
        if not (prior or describes_set) and self.has_no_sets and self.recipe:
            _log.info(
                "%s is not on this machine; sampling from the prior. To sample given its images, name its "
                "folder (`data_dir`), or name %s itself (`data`) to download it.",
                self.recipe.data.name,
                self.recipe.data.name,
            )
            prior = True
        arrays: dict[str, Any] = {"seen": (0,)}
        posterior = self.model.prior()
        if not prior:
            x = self._sets(given, sets, set_size, split, data, classes, invert, skip_bad, generator)
            _check_prefixes(() if prefixes is None else prefixes, x.shape[1])
            lengths, posterior = posterior_by_prefix(self.model, x, prefixes, generator=generator)
            arrays = {"inputs": x, "seen": lengths}
        parts = draw_in_parts(posterior, samples, generator=generator, temperature=temperature)
        shape = (*posterior.evidence.batch_shape, samples, *self.model.shape)
        kept = FirstSamples(shape, len(self.model.shape), parts, progress)
        paths = self._write_parts("samples-prior" if prior else "samples", arrays, shape, kept)
        drawn = self._with_columns(kept.samples())
        outcome = drawn if prior else SetSamples(arrays["inputs"], arrays["seen"], drawn)
        return WrittenSamples(outcome, kept.shown, kept.total, tuple(paths))

    def save_samples(self, outcome: Samples | SetSamples | SpreadByRepeats, name: str) -> list[Path]:
        """Write samples as npz, and rows also as CSV; returns the paths."""
        samples = outcome if isinstance(outcome, Samples) else outcome.samples
        arrays: dict[str, Any] = {"seen": (0,)}
        if not isinstance(outcome, Samples):
            seen = outcome.lengths if isinstance(outcome, SetSamples) else outcome.repeats
            arrays = {"inputs": outcome.inputs, "seen": seen}
        flat = replace(samples, x=samples.x.reshape(-1, *self.model.shape))
        return self._write_parts(name, arrays, tuple(samples.x.shape), [flat])

    def _write_parts(
        self, name: str, arrays: dict[str, Any], shape: tuple[int, ...], parts: Iterable[Samples]
    ) -> list[Path]:
        return write_parts(inside(self.folder, "results"), name, arrays, shape, parts, self.columns)


def _check_prefixes(prefixes: Sequence[int], most: int) -> None:
    """Raise an error unless all prefixes are from 0 to `most`, and 0, if given, comes first."""
    check_whole_numbers("prefixes", prefixes)
    for place, length in enumerate(prefixes):
        if not 0 <= length <= most:
            raise ValueError(f"`prefixes` must be from 0 to {most}, the set size; got {length}.")
        if place and not length:
            raise ValueError(f"`prefixes` must have 0 first; got {length} after {prefixes[place - 1]}.")
