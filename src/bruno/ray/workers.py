"""The workers of a cluster, which encode, reduce and score batches of rows or images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import ray
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from ray.data.aggregate import AggregateFnV2

from bruno.data.columns import MAX_NUMBER
from bruno.model import Bruno
from bruno.ray.evidence import FarElements, KeyedEvidence, far_elements
from bruno.streams.codec import EvidenceArrays
from bruno.streams.densities import RowDensities
from bruno.streams.encoder import Latents, RowEncoder, encoder_of

Batch = dict[str, Any]

# Columns that are added between passes; the user's columns must not have these names.
LATENTS, LOG_DET, FAR, PLACE = "bruno.latents", "bruno.log_det", "bruno.far", "bruno.place"
PART, PACKED = "bruno.part", "bruno.packed"
SCORE, LOG_PROB, OTHERS = "score", "log_prob", "others"

_ROWS_AT_A_TIME = 4096  # encoded or scored together, to bound memory
_NUMBERS_AT_A_TIME = 2**21


@dataclass(frozen=True)
class Plan:
    """The model and the columns that a worker needs to process a batch.

    Attributes:
        model: reference to the model, in the object store of the cluster.
        fingerprint: fingerprint of the model.
        key: the column with the key of the set of each row.
        columns: the columns of a row, or the one column of images or vectors.
        parts: number of partitions of the keys.
    """

    model: Any
    fingerprint: str
    key: str
    columns: tuple[str, ...]
    parts: int

    def keys(self, batch: Mapping[str, Any]) -> Any:
        """The keys of a batch as a pyarrow array; raises ValueError if one is missing."""
        values = np.asarray(batch[self.key])
        keys = pa.array(values.tolist() if values.dtype == object else values, from_pandas=True)
        if keys.null_count or (pa.types.is_string(keys.type) and "" in values):
            raise ValueError(f"`key`: every row must have a key in column {self.key!r}; got one without.")
        if not (pa.types.is_string(keys.type) or pa.types.is_integer(keys.type)):
            raise ValueError(
                f"`key` must be a column of text or whole numbers; got {keys.type} in {self.key!r}."
            )
        return keys if pa.types.is_string(keys.type) else keys.cast(pa.int64())


class _Worker:
    """Base of workers that hold the model, on their GPU if they have one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        device = "cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu"
        self.model: Bruno = ray.get(plan.model).to(device)
        self._encode = encoder_of(self.model)

    def latents(self, batch: Batch) -> Latents:
        """The latents of a batch, encoded in parts."""
        x = elements_of(batch, self.plan.columns, self.model)
        parts = [self._encode(x[i : i + _ROWS_AT_A_TIME]) for i in range(0, len(x), _ROWS_AT_A_TIME)]
        return Latents(*(np.concatenate(some) for some in zip(*parts, strict=True)))


class Encoder(_Worker):
    """Adds the latents to a batch."""

    def __call__(self, batch: Batch) -> Batch:
        """The batch with two more columns: latents and log-dets."""
        self.plan.keys(batch)  # raises before elements are encoded
        z, log_det = self.latents(batch)
        if not RowEncoder.supports(self.model):
            z = z.astype(np.float32)  # as the model returned them
        return batch | {LATENTS: z, LOG_DET: log_det}


class Reducer(_Worker):
    """Reduces a batch to the evidence of each key in it."""

    def __call__(self, batch: Batch) -> Batch:
        """One row for each partition of the keys."""
        found = KeyedEvidence.of(self.plan.keys(batch), self.latents(batch).z)
        return packed(found, self.plan)


def reduce_latents(batch: Batch, plan: Plan) -> Batch:
    """`Reducer` for a batch that has its latents."""
    return packed(KeyedEvidence.of(plan.keys(batch), batch[LATENTS]), plan)


def packed(evidence: KeyedEvidence, plan: Plan) -> Batch:
    """The evidence of many keys as one row for each partition of the keys."""
    parts = list(evidence.partitions(plan.parts))
    return {
        PART: np.array([number for number, _ in parts]),
        PACKED: np.array([part.packed(plan.fingerprint) for _, part in parts], dtype=object),
    }


class MergeEvidence(AggregateFnV2[bytes, bytes]):  # type: ignore[misc]  # mypy skips Ray
    """Merges the evidence of many keys, as bytes, within a block and across blocks."""

    def __init__(self, fingerprint: str, dim: int) -> None:
        self._fingerprint, self._dim = fingerprint, dim
        super().__init__(PACKED, bytes, on=PACKED, ignore_nulls=True)

    def aggregate_block(self, block: Any) -> bytes:
        """The evidence of the rows of a block."""
        return self._merged(pa.table(block).column(PACKED).to_pylist())

    def combine(self, current_accumulator: bytes, new: bytes) -> bytes:
        """The evidence of both."""
        return self._merged([current_accumulator, new])

    def _merged(self, parts: Sequence[bytes]) -> bytes:
        found = [KeyedEvidence.unpacked(part, self._fingerprint, self._dim) for part in parts]
        return KeyedEvidence.merged(found).packed(self._fingerprint)


@dataclass(frozen=True)
class Scoring:
    """Scores elements given all others of their sets, by removing them from the evidence.

    Attributes:
        plan: what to do.
        evidence: reference to the evidence of all sets.
        far: reference to the far elements, which cannot be removed exactly; none by default.
    """

    plan: Plan
    evidence: Any
    far: Any = None

    def score(self, batch: Batch) -> Batch:
        """The batch with scores in place of latents."""
        evidence, densities, far = self._given()
        z, places = batch[LATENTS], evidence.places(self.plan.keys(batch))
        size = max(1, _NUMBERS_AT_A_TIME // z.shape[1])
        parts = []
        for some in (slice(i, i + size) for i in range(0, len(z), size)):
            own, place = z[some].astype(np.float64, copy=False), places[some]
            others = evidence.without_each(place, own)
            is_far = far_elements(densities, own, others)
            if far is not None and is_far.any():
                others = far.correct(others, np.flatnonzero(is_far), place, own)
            given = densities(own, *others)
            parts.append((given - densities.prior(own), given, is_far))
        score, given, is_far = (np.concatenate(some) for some in zip(*parts, strict=True))
        kept = {name: values for name, values in batch.items() if name not in (LATENTS, LOG_DET)}
        others = (evidence.count[places] - 1).astype(np.int64)
        return kept | {SCORE: score, LOG_PROB: given + batch[LOG_DET], OTHERS: others, FAR: is_far}

    def find_far(self, batch: Batch) -> Batch:
        """The sets and latents of elements that are far from all others of their sets."""
        evidence, densities, _ = self._given()
        z, places = batch[LATENTS].astype(np.float64), evidence.places(self.plan.keys(batch))
        far = far_elements(densities, z, evidence.without_each(places, z))
        return {PLACE: places[far], LATENTS: z[far]}

    def reduce_others(self, batch: Batch) -> Batch:
        """The evidence of the others of each far element: one row for each partition of the far elements."""
        evidence, _, far = self._given()
        assert far is not None
        z, places = batch[LATENTS].astype(np.float64), evidence.places(self.plan.keys(batch))
        return packed(far.reduce(places, z), self.plan)

    def _given(self) -> tuple[KeyedEvidence, RowDensities, FarElements | None]:
        far = None if self.far is None else ray.get(self.far)
        return ray.get(self.evidence), _densities(self.plan.model), far


def count_far(batch: Batch) -> Batch:
    """The number of far elements of a batch, in one row."""
    return {FAR: np.array([batch[FAR].sum()])}


@lru_cache(maxsize=2)
def _densities(model: Any) -> RowDensities:
    """The densities of a model, made once in a process."""
    return RowDensities(ray.get(model).process)


class Classifier(_Worker):
    """Classifies elements by the posterior of each class.

    Args:
        plan: what to do.
        evidence: reference to the evidence of all classes.
        log_prior: log-probability of each class before the element is seen.
        temperature: divides the log-densities.
    """

    def __init__(self, plan: Plan, evidence: Any, log_prior: NDArray[Any], temperature: float) -> None:
        super().__init__(plan)
        self.evidence: KeyedEvidence = ray.get(evidence)
        self.names = np.array(self.evidence.keys.to_pylist())
        self.densities = RowDensities(self.model.process)
        self.log_prior, self.temperature = log_prior, temperature

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the most probable class, and the probabilities of all classes."""
        z, classes = self.latents(batch).z, len(self.names)
        given = EvidenceArrays(self.evidence.count, self.evidence.mean, self.evidence.scatter)
        found = np.empty((len(z), classes))
        for i in range(classes):
            one = EvidenceArrays(*(part[i : i + 1] for part in given))
            found[:, i] = self.densities(z, *one)
        found = found / self.temperature + self.log_prior
        found = np.exp(found - found.max(1, keepdims=True))
        found /= found.sum(1, keepdims=True)
        best = found.argmax(1)
        return batch | {
            "class": self.names[best],
            "probability": found[np.arange(len(z)), best],
            "probabilities": found,
        }


def elements_of(batch: Mapping[str, Any], columns: Sequence[str], model: Bruno) -> Any:
    """The elements (n, *shape) of a batch; raises ValueError unless the model takes them."""
    if model.kind.is_images or len(columns) == 1 != model.dim:
        (column,) = columns
        return _tensors(np.asarray(batch[column]), column, model)
    x = np.stack([_numbers(np.asarray(batch[name]), name) for name in columns], 1)
    return x.reshape(-1, *model.shape)


def _numbers(values: NDArray[Any], column: str) -> Float[np.ndarray, " n"]:
    if values.dtype == object or values.dtype.kind not in "fiub":
        raise ValueError(f"column {column!r} must be complete, and of numbers; got {values.dtype}.")
    found = values.astype(np.float64)
    if not (np.abs(found) <= MAX_NUMBER).all():
        wrong = found[~(np.abs(found) <= MAX_NUMBER)][0]
        raise ValueError(
            f"column {column!r} must be finite and below {MAX_NUMBER:.1e}; got {wrong}. Drop or impute "
            "missing numbers first."
        )
    return found


def _tensors(values: NDArray[Any], column: str, model: Bruno) -> Any:
    """Images or vectors; grey images may lack their channel, and channels may come last."""
    if values.dtype == object:
        shapes = {np.shape(one) for one in values}
        if len(shapes) > 1:
            raise ValueError(f"column {column!r} must have elements of one shape; got {sorted(shapes)[:2]}.")
        values = np.stack(list(values))
    shape = model.shape
    if model.kind.is_images and values.shape[1:] != shape:
        if values.shape[1:] == shape[1:]:
            values = values[:, None]
        elif (*values.shape[-1:], *values.shape[1:-1]) == shape:
            values = np.moveaxis(values, -1, 1)
    if values.shape[1:] != shape:
        raise ValueError(f"column {column!r} must have elements of shape {shape}; got {values.shape[1:]}.")
    if not model.kind.is_images:
        flat = _numbers(values.reshape(-1), column)
        return flat.reshape(values.shape)
    return torch.from_numpy(np.array(values))
