"""The jobs of a trained model: evaluation, generation, classification, outlier detection and retrieval."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from bruno.arrays import NumpyResult, to_numpy
from bruno.config import to_dict
from bruno.data import SetSampler
from bruno.data.archives import is_hidden
from bruno.files import atomic_write
from bruno.kinds import Kind
from bruno.model import Samples
from bruno.recipe_data import is_path
from bruno.reporting.results import Result
from bruno.tasks import Progress
from bruno.tasks.analysis import Inspection, inspect_model
from bruno.tasks.classification import Classification, classify, fit_temperature
from bruno.tasks.evaluation import BitsPerDim, default_sets_per_class, measure_bits_per_dim
from bruno.tasks.few_shot import FewShotComparison, FewShotProtocol, compare_few_shot
from bruno.tasks.generation import (
    SetSamples,
    SpreadByRepeats,
    draw_samples,
    prior_samples,
    samples_by_prefix,
    spread_by_repeats,
)
from bruno.tasks.retrieval import RetrievalResult, measure_retrieval, open_index, rank
from bruno.tasks.specks import SpeckResult, measure_specks
from bruno.trained.data import Source
from bruno.trained.detection import DetectionJobs, available_set_size

_log = logging.getLogger(__name__)

_SET_SIZE = 20  # of sets to measure on
_SAMPLED_SET_SIZE = 8  # of sets to condition samples on
_CALIBRATION_EPISODES = 600  # at least, to fit a temperature to
_SAMPLES_FOR_VARIANCE = 100  # at least, over all repeated elements


@dataclass(frozen=True)
class Evaluation:
    """Bits/dim, and the name of the data they were measured on."""

    data: str
    bits: BitsPerDim


@dataclass(frozen=True)
class FewShotEvaluation:
    """Few-shot accuracy, and the name of the data it was measured on."""

    data: str
    comparison: FewShotComparison


@dataclass(frozen=True)
class SpeckEvaluation:
    """The share of samples with a speck, and the name of the data they were conditioned on."""

    data: str
    result: SpeckResult


@dataclass(frozen=True, eq=False)
class Retrieved(NumpyResult):
    """The best elements of a collection for a query, the best first.

    Attributes:
        query: the examples, (n, *shape).
        names: of the elements found.
        scores: log p(x | query) − log p(x) of each, in nats.
        found: the elements, (top, *shape); None for rows.
        collection: number of elements that were ranked.
        kind: of the elements.
    """

    query: Tensor
    names: tuple[str, ...]
    scores: tuple[float, ...]
    found: Tensor | None
    collection: int
    kind: Kind


@dataclass(frozen=True)
class RetrievalEvaluation:
    """How well the rest of a class is found, and the name of the data it was measured on."""

    data: str
    results: tuple[RetrievalResult, ...]


class Trained(DetectionJobs):
    """A trained model with its recipe and data, and the jobs it does.

    `bruno.open` opens one, `bruno.train` and `bruno.finetune` make one. Jobs work on the model's own test
    split by default: `split` names another split, `data` a known data set or the path of user data, and
    `invert` turns dark ink into bright ink in user images. Every job takes the seed of its random numbers.
    """

    # --- evaluation --------------------------------------------------------------------------------------

    def evaluate(
        self,
        *,
        sets: int | None = None,
        set_size: int = _SET_SIZE,
        split: str | None = None,
        data: str | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Bits/dim on sets of one class each, without rotations.

        Args:
            sets: number of random sets; by default every class is measured equally often.
            set_size: elements in a set; fewer if the smallest class has fewer.
            split: see the class.
            data: see the class.
            invert: see the class.
            seed: of the sets and the noise.
            progress: called as progress(done, total).
        """
        selected = self._select(split, data, invert)
        bits = measure_bits_per_dim(
            self.model,
            SetSampler(selected.examples, device=self.device),
            sets=sets,
            sets_per_class=default_sets_per_class(len(selected.examples.names)),
            set_size=available_set_size(selected.examples, set_size),
            generator=self._generator(seed),
            progress=progress,
        )
        return Evaluation(selected.name, bits)

    def few_shot(
        self,
        *,
        ways: Sequence[int] | None = None,
        shots: Sequence[int] = (1, 5),
        trials: int = 20,
        rotations: bool | None = None,
        rotated_decoys: bool = False,
        noise: bool = True,
        threshold: float | None = None,
        split: str | None = None,
        data: str | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> FewShotEvaluation:
        """n-shot k-way accuracy, beside nearest neighbours in pixels or columns on the same episodes.

        Args:
            ways: numbers k of classes; 5 and 20 by default, or all classes if there are fewer.
            shots: numbers n of support elements of each class.
            trials: every class is queried once in each.
            rotations: count rotated classes as classes; as in training by default.
            rotated_decoys: the other classes of an episode may be rotations of the query's class, as
                Prototypical Networks draws them.
            noise: dequantise with fresh noise, as the protocol does; otherwise with ½.
            threshold: use only latent dimensions whose correlation exceeds this.
            split: see the class.
            data: see the class.
            invert: see the class.
            seed: of the episodes and the noise.
            progress: called as progress(done, total).
        """
        selected = self._select(split, data, invert, min_classes=2)
        classes = len(selected.examples.names)
        protocol = FewShotProtocol(
            ways=tuple(sorted({min(5, classes), min(20, classes)})) if ways is None else tuple(ways),
            shots=tuple(shots),
            trials=trials,
            rotations=self.rotations if rotations is None else rotations,
            rotated_decoys=rotated_decoys,
            noise=noise,
            threshold=threshold,
        )
        found = compare_few_shot(
            self.model,
            selected.examples,
            protocol,
            generator=torch.Generator().manual_seed(seed),
            progress=progress,
        )
        return FewShotEvaluation(selected.name, found)

    def inspect(
        self,
        *,
        sets: int = 200,
        split: str | None = None,
        data: str | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Inspection:
        """Correlations, degrees of freedom, and gain from conditioning by position, on random sets."""
        sampler = SetSampler(self._select(split, data, invert).examples, device=self.device)
        return inspect_model(
            self.model,
            sampler,
            sets=sets,
            set_size=min(_SET_SIZE, sampler.min_count),
            generator=self._generator(seed),
            progress=progress,
        )

    # --- generation --------------------------------------------------------------------------------------

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
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
    ) -> SetSamples:
        """More of the same: samples after prefixes of a set, of your own or of the data.

        Args:
            given: the set to condition on: files, folders, arrays; by default sets of the data.
            samples: drawn after each prefix.
            prefixes: numbers of elements to condition on, 0 only as the first; by default 0 to all.
            sets: how many to draw from the data, each of another class.
            set_size: elements of each of these; 8 by default.
            temperature: below 1, samples are closer to the mean of the latents.
            split: see the class.
            data: see the class.
            invert: see the class.
            skip_bad: skip files that cannot be read.
            seed: of the sets and the samples.
        """
        generator = self._generator(seed)
        x = self._sets(given, sets, set_size, split, data, invert, skip_bad, generator)
        _check_prefixes(prefixes or (), x.shape[1])
        found = samples_by_prefix(
            self.model, x, samples, lengths=prefixes, generator=generator, temperature=temperature
        )
        return replace(found, samples=self._with_columns(found.samples))

    def sample_prior(self, samples: int = 8, *, temperature: float = 1.0, seed: int = 0) -> Samples:
        """Samples from the prior, each the first element of a set of its own."""
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
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
    ) -> SpreadByRepeats:
        """Samples after the same element was seen 1 to 20 times, for each of some elements.

        At least as many samples are drawn as a variance needs. The arguments are those of `sample`.
        """
        generator = self._generator(seed)
        (x,) = self._sets(given, 1, set_size, split, data, invert, skip_bad, generator)
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
        examples, generator = self._select(split, None, None).examples, self._generator(seed)
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
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> SpeckEvaluation:
        """Share of samples with an isolated dot of one or two pixels, beside that of the data.

        Args:
            samples: drawn, each of a random set of one class.
            given: images to condition each sample on.
            temperature: below 1, samples are closer to the mean of the latents.
            split: see the class.
            data: see the class.
            invert: see the class.
            seed: of the sets and the samples.
            progress: called as progress(done, total).
        """
        selected = self._select(split, data, invert)
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
        invert: bool | None,
        skip_bad: bool,
        generator: Generator,
    ) -> Tensor:
        """(sets, set_size, *shape): the given set, or sets of different classes of the data."""
        if given is not None:
            return self.read(given, invert=invert, skip_bad=skip_bad).x.to(self.device).unsqueeze(0)
        examples = self._select(split, data, invert).examples
        if not 1 <= sets <= len(examples.names):
            raise ValueError(f"`sets` must be from 1 to the {len(examples.names)} classes; got {sets}.")
        sampler = SetSampler(examples, device=self.device)
        if set_size is None:
            set_size = min(_SAMPLED_SET_SIZE, sampler.min_count)
        sampler.check_set_size(set_size, "set_size")
        drawn: Tensor = sampler.tasks(1, sets, set_size, generator)[0]
        return drawn

    # --- classification ----------------------------------------------------------------------------------

    def classify(
        self,
        queries: Source,
        support: str | Path | Mapping[str, Source],
        *,
        prior: Sequence[float] | None = None,
        temperature: float | None = 1.0,
        data: str | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
    ) -> Classification:
        """Probabilities of your own classes for your own elements, given a few examples of each class.

        Args:
            queries: what to classify: files, folders, arrays.
            support: examples of each class by its name, or a folder of class folders, or a CSV.
            prior: probability of each class, in any unit; uniform by default.
            temperature: divides the log-probabilities; None to fit it on classes that training has not seen.
            data: fit the temperature on this instead of the model's own data.
            invert: turn dark ink into bright ink; as in training by default.
            skip_bad: skip files that cannot be read.
            seed: of the episodes that the temperature is fitted on.
        """
        reading: dict[str, Any] = {"invert": invert, "skip_bad": skip_bad}
        sets = self._support(support, reading)
        if len(sets) < 2:
            raise ValueError(f"`support` must have at least two classes; got {len(sets)}.")
        x, names = self.read(queries, **reading)
        if temperature is None:
            temperature = self._fitted_temperature(sets, data, invert, seed)
        return classify(self.model, sets, x, names=names, prior=prior, temperature=temperature)

    def _support(
        self, support: str | Path | Mapping[str, Source], reading: dict[str, Any]
    ) -> dict[str, Tensor]:
        if isinstance(support, Mapping):
            return {str(name): self.read(some, **reading).x for name, some in support.items()}
        path = Path(support)
        if path.is_file():
            examples = self._select(None, str(path), reading["invert"]).examples
            return {name: examples.elements[examples.labels == i] for i, name in enumerate(examples.names)}
        inside = sorted(path.iterdir()) if path.is_dir() else []
        folders = [folder for folder in inside if folder.is_dir() and not is_hidden(folder.name)]
        if len(folders) < 2:
            found = f"has {len(folders)}" if path.exists() else "does not exist"
            raise ValueError(f"`support` must be a folder of at least two class folders; {path} {found}.")
        return {folder.name: self.read(folder, **reading).x for folder in folders}

    def _fitted_temperature(
        self, sets: dict[str, Tensor], data: str | None, invert: bool | None, seed: int
    ) -> float:
        """The temperature for as many classes and examples of each as the support has."""
        unseen = None if is_path(data) else self.unseen
        examples = self._select(unseen, data, invert if is_path(data) else None, min_classes=2).examples
        rotated = len(examples.names) * (4 if self.rotations else 1)
        protocol = FewShotProtocol(
            ways=(len(sets),),
            shots=(min(map(len, sets.values())),),
            trials=max(2, _CALIBRATION_EPISODES // rotated),
            rotations=self.rotations,
        ).limited_to(examples)
        found = fit_temperature(self.model, examples, protocol, generator=torch.Generator().manual_seed(seed))
        _log.info(
            "temperature %.2f, from %d episodes with %d mistakes",
            found.temperature,
            found.episodes,
            found.mistakes,
        )
        return found.temperature

    # --- retrieval ---------------------------------------------------------------------------------------

    def retrieve(
        self,
        query: Source,
        collection: str | Path,
        *,
        index: str | Path | None = None,
        top: int = 40,
        invert: bool | None = None,
        skip_bad: bool = False,
        progress: Progress | None = None,
    ) -> Retrieved:
        """Rank a collection, encoded once, by log p(x | query) − log p(x).

        Args:
            query: examples of what to look for: files, folders, arrays.
            collection: a folder of images, or a CSV.
            index: file for the encoded collection; by default beside it.
            top: number of elements to return.
            invert: turn dark ink into bright ink; as in training by default.
            skip_bad: skip files that cannot be read.
            progress: called as progress(done, total).
        """
        examples = self.read(query, invert=invert, skip_bad=skip_bad).x
        reader = self.reader(invert=invert, skip_bad=skip_bad)
        encoded, encoded_now = open_index(
            self.model, reader, collection, index, familiarity=self.familiarity, progress=progress
        )
        ranking = rank(encoded, self.model, examples.to(self.device))
        best = ranking.order[:top].tolist()
        names, found = tuple(encoded.names[i] for i in best), None
        if self.model.kind.is_images:
            found = torch.stack([element.x for element in reader.read(names)])
            if not encoded_now:  # otherwise all of the collection was checked
                self.warn_if_unfamiliar(found, what="the images found are")
        scores = tuple(ranking.scores[best].tolist())
        return Retrieved(examples, names, scores, found, len(encoded), self.model.kind)

    def measure_retrieval(
        self,
        *,
        shots: Sequence[int] = (1, 5),
        queries: int = 200,
        split: str | None = None,
        data: str | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> RetrievalEvaluation:
        """Mean average precision of finding the rest of a class, beside distances of pixels and latents."""
        selected = self._select(split, data, invert, min_classes=2)
        found = measure_retrieval(
            self.model,
            selected.examples,
            queries=queries,
            shots=shots,
            rotations=self.rotations,
            generator=torch.Generator().manual_seed(seed),
            progress=progress,
        )
        return RetrievalEvaluation(selected.name, found)

    # --- results -----------------------------------------------------------------------------------------

    def save_result(self, result: Result, seed: int = 0) -> Path:
        """Write a result to the model's folder; returns the path of its JSON."""
        result = replace(result, model=self.model.fingerprint())
        return result.write(self.folder, config=to_dict(self.recipe or self.model.config), seed=seed)

    def save_samples(self, outcome: Samples | SetSamples | SpreadByRepeats, name: str) -> list[Path]:
        """Write samples as npz, and those of rows as CSV too; returns the paths."""
        samples = outcome if isinstance(outcome, Samples) else outcome.samples
        arrays: dict[str, Any] = {"samples": samples.images if samples.levels else samples.x, "seen": (0,)}
        if not isinstance(outcome, Samples):
            seen = outcome.lengths if isinstance(outcome, SetSamples) else outcome.repeats
            arrays |= {"inputs": outcome.inputs, "seen": seen}
        folder = self.folder / "results"
        paths = [folder / f"{name}.npz"]
        np.savez_compressed(
            paths[0], allow_pickle=False, **{key: np.asarray(to_numpy(part)) for key, part in arrays.items()}
        )
        if not samples.levels:
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
    for place, length in enumerate(prefixes):
        if not 0 <= length <= most:
            raise ValueError(f"`prefixes` must be from 0 to the {most} elements of a set; got {length}.")
        if place and not length:
            raise ValueError(f"`prefixes` must have 0 first; got {length} after {prefixes[place - 1]}.")
