"""Sets that are spread over the machines of a Ray cluster: scores, posteriors and classification."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import ray
import ray.data
import torch
from ray.exceptions import RayTaskError

from bruno import known_models
from bruno.model import Bruno, Posterior
from bruno.process import Evidence
from bruno.ray.evidence import FarElements, KeyedEvidence
from bruno.ray.workers import (
    FAR,
    LATENTS,
    PACKED,
    PART,
    PLACE,
    Classifier,
    Encoder,
    MergeEvidence,
    Plan,
    Reducer,
    Scoring,
    count_far,
    reduce_latents,
)
from bruno.trained import Trained
from bruno.trained import open as open_trained

Model = Trained | Bruno | str | Path


def score(
    dataset: Any,
    model: Model,
    key: str,
    *,
    columns: str | Sequence[str] | None = None,
    batch_size: int | None = None,
    num_gpus: float | None = None,
) -> Any:
    """Scores of all elements, each given all others with the same key, on whichever machine they are.

    There are two passes. The first encodes the elements and reduces the evidence of each key. The second
    removes each element from the evidence of its key, exactly, and scores it given the rest. No machine needs
    all elements of a key. For elements beyond 1e4 standard deviations, which cannot be removed exactly, one
    more pass computes the evidence of the rest.

    Args:
        dataset: a Ray Dataset of rows or images, with a key.
        model: a trained model, or what `bruno.open` takes.
        key: the column that names the set of an element: text or whole numbers.
        columns: the columns of a row, or the column of images or vectors. By default, the columns that the
            model was trained on, or "image" for images.
        batch_size: number of elements in a batch; by default, all of a block.
        num_gpus: GPUs of a worker that encodes; by default 1 if the cluster has GPUs.

    Returns:
        A materialised dataset with the columns of the input, `score` = log p(x | others) − log p(x),
        `log_prob` = log p(x | others), and `others`, the number of other elements.
    """
    plan, found = _planned(model, dataset, key, columns)
    with _plain_errors(dataset):
        encoded = _run(dataset, Encoder, (plan,), batch_size, num_gpus).materialize()
        reduced = encoded.map_batches(reduce_latents, fn_args=(plan,), batch_size=None)
        scoring = Scoring(plan, ray.put(_merged(reduced, plan, found.dim)))
        scored = encoded.map_batches(scoring.score, batch_size=None).materialize()
        if sum(row[FAR] for row in scored.map_batches(count_far, batch_size=None).take_all()):
            far = ray.put(_far(encoded, scoring, found.dim))
            scored = encoded.map_batches(replace(scoring, far=far).score, batch_size=None).materialize()
        return scored.drop_columns([FAR])


def _far(encoded: Any, scoring: Scoring, dim: int) -> FarElements:
    """The elements that are far from all others of their sets, and the evidence of these others."""
    rows = encoded.map_batches(scoring.find_far, batch_size=None).to_pandas()
    far = FarElements.of(rows[PLACE].to_numpy(), np.stack(list(rows[LATENTS])))
    reduce = replace(scoring, far=ray.put(far)).reduce_others
    return far.with_others(_merged(encoded.map_batches(reduce, batch_size=None), scoring.plan, dim))


def condition(
    dataset: Any,
    model: Model,
    key: str,
    *,
    columns: str | Sequence[str] | None = None,
    batch_size: int | None = None,
    num_gpus: float | None = None,
) -> Any:
    """The evidence of each key: a dataset with the key, `count`, and `evidence`, as bytes.

    Save it with its method `write_parquet`; `posteriors` turns it into posteriors. `bruno.streams.encode`
    defines the bytes. The arguments are those of `score`.
    """
    plan, found = _planned(model, dataset, key, columns)
    with _plain_errors(dataset):
        evidence = _merged(_run(dataset, Reducer, (plan,), batch_size, num_gpus), plan, found.dim)
    return ray.data.from_arrow(_table(evidence, key, plan.fingerprint))


def posteriors(source: Any, model: Model, key: str | None = None) -> dict[Any, Posterior]:
    """The posterior of each key.

    Args:
        source: the result of `condition`, a pyarrow table of it, or the path of its Parquet files.
        model: the model that `condition` was called with.
        key: the column of the keys; by default the first.
    """
    opened = _model_of(model)[0]
    evidence = _evidence(source, opened, key, "source")
    parts = [torch.from_numpy(part.copy()) for part in (evidence.mean, evidence.scatter)]
    batch = Evidence(torch.from_numpy(evidence.count).long(), *parts).to(opened.device)
    return dict(zip(evidence.keys.to_pylist(), Posterior(opened, batch), strict=True))


def classify(
    dataset: Any,
    model: Model,
    support: Any,
    *,
    columns: str | Sequence[str] | None = None,
    prior: Mapping[Any, float] | None = None,
    temperature: float = 1.0,
    batch_size: int | None = None,
    num_gpus: float | None = None,
) -> Any:
    """Probabilities of classes for all elements, given examples of each class.

    Args:
        dataset: a Ray Dataset of rows or images.
        model: a trained model, or what `bruno.open` takes.
        support: evidence of the examples of each class: the result of `condition` with the class as the key,
            or the path of its Parquet files.
        columns: as for `score`.
        prior: probability of each class, in any unit; uniform by default.
        temperature: divides the log-densities.
        batch_size: number of elements in a batch; by default, all of a block.
        num_gpus: GPUs of a worker; by default 1 if the cluster has GPUs.

    Returns:
        A dataset with the columns of the input, `class`, its `probability`, and `probabilities` of all
        classes, sorted.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be above 0 and finite; got {temperature}.")
    plan, found = _planned(model, dataset, None, columns)
    evidence = _evidence(support, found, None, "support")
    if len(evidence) < 2:
        raise ValueError(f"`support` must have at least two classes; got {len(evidence)}.")
    evidence = evidence[np.argsort(evidence.keys.to_pylist())]
    names = evidence.keys.to_pylist()
    weights = np.array([1.0 if prior is None else prior.get(name, 0.0) for name in names])
    if not (weights > 0).all() or (prior is not None and set(prior) - set(names)):
        raise ValueError(f"`prior` must be above 0 for each of the classes {names[:10]}; got {prior}.")
    arguments = (plan, ray.put(evidence), np.log(weights / weights.sum()), temperature)
    return _run(dataset, Classifier, arguments, batch_size, num_gpus)


# --- helpers ---------------------------------------------------------------------------------------------


def _model_of(model: Model) -> tuple[Bruno, tuple[str, ...]]:
    """The model, and the names of its columns if they are known."""
    if isinstance(model, str | Path):
        model = open_trained(model, device="cpu")
    if not isinstance(model, Trained | Bruno):
        raise TypeError(
            f"`model` must be a trained model, or the path or name of one; got {type(model).__name__}."
        )
    return (model.model, model.columns) if isinstance(model, Trained) else (model, ())


def _planned(
    model: Model, dataset: Any, key: str | None, columns: str | Sequence[str] | None
) -> tuple[Plan, Bruno]:
    """The plan of the workers, and the model; raises ValueError unless the dataset has the columns."""
    if not isinstance(dataset, ray.data.Dataset):
        raise TypeError(f"`dataset` must be a Ray Dataset; got {type(dataset).__name__}.")
    found, names = _model_of(model)
    if isinstance(columns, str):
        columns = (columns,)
    if columns is None:
        columns = names or (("image",) if found.kind.is_images else ())
    if not columns:
        raise ValueError("`columns` must name the columns of a row, as the model does not; got none.")
    if len(columns) not in (1, *found.shape[:1]) or (found.kind.is_images and len(columns) > 1):
        raise ValueError(f"`columns` must be {found.dim} columns, or one with vectors; got {len(columns)}.")
    present = dataset.columns() or []
    for argument, name in [("key", key), *(("columns", one) for one in columns)]:
        if name is not None and name not in present:
            raise ValueError(
                f"`{argument}` must be in the dataset, which has {', '.join(map(str, present[:20]))}; got "
                f"{name!r}."
            )
    known = ray.put(known_models.on_device(found, "cpu"))
    return Plan(known, found.fingerprint(), key or "", tuple(columns), max(1, _cpus())), found


def _run(
    dataset: Any,
    worker: type,
    arguments: tuple[Any, ...],
    batch_size: int | None = None,
    num_gpus: float | None = None,
) -> Any:
    """`map_batches` by actors, which load the model once."""
    if num_gpus is None:
        num_gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
    most = ray.cluster_resources().get("GPU", 0) / num_gpus if num_gpus else _cpus()
    return dataset.map_batches(
        worker,
        fn_constructor_args=arguments,
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=max(1, int(most))),
        num_cpus=_share_of_a_cpu(),
        num_gpus=num_gpus or None,
    )


def _cpus() -> int:
    return int(ray.cluster_resources().get("CPU", 1))


def _share_of_a_cpu() -> float:
    """CPUs of an actor, a little below 1: one CPU of every machine is left for reading and shuffling."""
    counts = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    least = min((count for count in counts if count), default=1)
    return math.floor(1000 * (least - 1) / least) / 1000


def _merged(parts: Any, plan: Plan, dim: int) -> KeyedEvidence:
    """The evidence of all keys, reduced in the cluster by partitions of the keys."""
    reduced = parts.groupby(PART, num_partitions=plan.parts).aggregate(MergeEvidence(plan.fingerprint, dim))
    rows = reduced.select_columns([PACKED]).take_all()
    if not rows:
        raise ValueError("`dataset` must have at least one row; got none.")
    found = [KeyedEvidence.unpacked(row[PACKED], plan.fingerprint, dim) for row in rows]
    return KeyedEvidence.merged(found)


def _table(evidence: KeyedEvidence, key: str, fingerprint: str) -> Any:
    columns = {key: evidence.keys, "count": pa.array(evidence.count.astype(np.int64))}
    return pa.table(columns | {"evidence": evidence.records(fingerprint)})


def _evidence(source: Any, model: Bruno, key: str | None, argument: str) -> KeyedEvidence:
    """The evidence in what `condition` returned, or in Parquet files of it."""
    if isinstance(source, str | Path):
        from pyarrow.parquet import read_table  # type: ignore[import-untyped]

        source = read_table(source)
    elif isinstance(source, ray.data.Dataset):
        source = pa.concat_tables(ray.get(source.to_arrow_refs()))
    if not isinstance(source, pa.Table) or "evidence" not in source.column_names:
        raise ValueError(f"`{argument}` must be what `condition` returned, or its Parquet files.")
    table = source.combine_chunks()
    keys, records = (
        table.column(name).combine_chunks() for name in (key or table.column_names[0], "evidence")
    )
    return KeyedEvidence.from_records(keys, records, model.fingerprint(), model.dim)


@contextmanager
def _plain_errors(dataset: Any) -> Iterator[None]:
    """Raise the errors of workers as they are, without the trace of the cluster."""
    context = dataset.context
    before = context.raise_original_map_exception
    context.raise_original_map_exception = True
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, ValueError | TypeError):
            raise type(error.cause)(
                str(error.cause).partition("\n")[0]
            ) from None  # the rest of the message is advice from Ray
        raise
    finally:
        context.raise_original_map_exception = before
