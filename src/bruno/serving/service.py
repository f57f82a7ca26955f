"""The service without HTTP: several models by name, each with its sets and its queue."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from bruno.serving.batching import Batcher
from bruno.serving.decoding import read_images, read_rows
from bruno.serving.jobs import ServedModel
from bruno.serving.metrics import Metrics
from bruno.serving.settings import Limits, RequestError
from bruno.serving.steps import Job
from bruno.streams.store import IN_MEMORY
from bruno.trained import Trained
from bruno.trained import open as open_trained
from bruno.trained.folders import STORE

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

Models = Mapping[str, Trained | str | Path] | Sequence[str | Path]


class Service:
    """Several models; each runs its jobs in batches, in a thread of its own.

    Args:
        models: trained models by name, or a list of paths and of names of pretrained models. The name of a
            model in a list is the last part of its path; NAME=PATH sets another name.
        store: the folder for the sets of all models, as NAME.db; ":memory:" for none. By default, the file
            `sets.db` in the folder of each model.
        limits: limits on requests.
        batching: compute requests that are waiting at the same time as one batch.
        checkpoint: which checkpoint of run folders: "last", or "best" on validation.
        device: "auto", "cpu", "cuda" or "cuda:NUMBER".
    """

    def __init__(
        self,
        models: Models,
        *,
        store: str | Path | None = None,
        limits: Limits | None = None,
        batching: bool = True,
        checkpoint: str = "last",
        device: str = "auto",
    ) -> None:
        self.limits, self.metrics = limits or Limits(), Metrics()
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="bruno-decoding")
        self._models: dict[str, ServedModel] = {}
        self._batchers: dict[str, Batcher] = {}
        try:
            opened = {
                name: model
                if isinstance(model, Trained)
                else open_trained(model, checkpoint=checkpoint, device=device)
                for name, model in _named(models).items()
            }
            for name, trained in opened.items():
                self._add(name, trained, _store_of(name, trained, store), batching)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, trained: Trained, store: str | Path, batching: bool) -> None:
        served = self._models[name] = ServedModel(trained, store, self.limits.batch)
        self._batchers[name] = batcher = Batcher(
            served.run,
            batch=self.limits.batch if batching else 1,
            seconds=self.limits.seconds,
            observe=self.metrics.batches(name),
        )
        self.metrics.watch_waiting(name, lambda: batcher.waiting)

    @property
    def models(self) -> dict[str, ServedModel]:
        """The models by name; the first is used if a request names none."""
        return self._models

    def model(self, name: str | None) -> tuple[str, ServedModel]:
        """A model and its name; the first one if no name is given."""
        name = name or next(iter(self._models))
        if name not in self._models:
            known = ", ".join(self._models)
            raise RequestError(404, f"`model` must be one of {known}; got {name[:100]!r}.")
        return name, self._models[name]

    async def run(self, name: str, job: Job, elements: int = 1) -> Any:
        """The answer of a job on a model, computed in a batch with other jobs; see `Batcher`."""
        return await self._batchers[name](job, elements)

    async def read(self, name: str, given: Sequence[Any], field: str = "elements") -> Tensor:
        """The elements of a request. Images are decoded in other threads."""
        served = self._models[name]
        if not served.is_images:
            return read_rows(served.trained, given, self.limits, field)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, read_images, served.trained, given, self.limits, field)

    def close(self) -> None:
        """Finish all jobs, and close the stores."""
        for batcher in self._batchers.values():
            batcher.close()
        for served in self._models.values():
            served.sets.close()
        self._models, self._batchers = {}, {}
        self._pool.shutdown()


def _named(models: Models) -> dict[str, Trained | str | Path]:
    """Models by name; raises ValueError if two have the same name."""
    if isinstance(models, Mapping):
        named: Iterable[tuple[str, Any]] = models.items()
    else:
        named = [_split_name(str(one)) for one in models]
    found: dict[str, Trained | str | Path] = {}
    for name, model in named:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"`models` must have names of letters, digits, '.', '_' and '-'; got {name!r}. Name it: "
                "NAME=PATH."
            )
        if name in found:
            raise ValueError(f"`models` must have different names; got {name!r} twice. Name one: NAME=PATH.")
        found[name] = model
    if not found:
        raise ValueError("`models` must name at least one model; got none.")
    return found


def _split_name(text: str) -> tuple[str, str]:
    """Name and path of a model, as in NAME=PATH; the default name is that of the file or folder."""
    name, separator, path = text.partition("=")
    if separator and _NAME.fullmatch(name):
        return name, path
    last = Path(text).name or Path(text).resolve().name
    return (last.removesuffix(".safetensors"), text)


def _store_of(name: str, trained: Trained, store: str | Path | None) -> str | Path:
    """Where the sets of a model are kept."""
    if store == IN_MEMORY:
        return IN_MEMORY
    folder = trained.folder if store is None else Path(store)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`store` must be a folder; {folder} is a file.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / (STORE if store is None else f"{name}.db")
