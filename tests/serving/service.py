"""A small service without a socket, and one in a thread."""

import base64
import io
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from starlette.testclient import TestClient
from streams.keyed import machines
from streams.keyed import trained as trained_on_rows

from bruno import Bruno, FlowConfig, ModelConfig, ProcessConfig, Trained
from bruno.serving import create_app

SIZE = 6
_keys = itertools.count()


@cache
def trained_on_images() -> Trained:
    """A small model of grey images with random weights."""
    torch.manual_seed(0)
    flow = FlowConfig("dense", couplings=2, units=8)
    process = ProcessConfig(dof=30.0, correlation=0.8)
    model = Bruno.from_config(ModelConfig((1, SIZE, SIZE), levels=256, flow=flow, process=process))
    return Trained(model.requires_grad_(False), None, Path("nowhere"))


def models() -> dict[str, Trained]:
    return {"rows": trained_on_rows(), "images": trained_on_images()}


@contextmanager
def served(store: object = ":memory:", **settings: object) -> Iterator[TestClient]:
    """A client of a service with both models."""
    app = create_app(models(), store=store, **settings)
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


def rows(count: int, seed: int = 5) -> list[list[float]]:
    return machines(1, count, seed)[0].tolist()


def images(count: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SIZE, SIZE), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def in_base64(pixels: np.ndarray) -> str:
    return base64.b64encode(png(pixels)).decode()


def new_key() -> dict[str, str]:
    return {"Idempotency-Key": f"key {next(_keys)}"}


def put(client: TestClient, id: str, elements: list[object], model: str = "rows", **headers: str) -> object:
    """The answer to a PUT of elements, each time with a new key."""
    path = f"/sets/{id}/elements?model={model}"
    return client.put(path, json={"elements": elements}, headers={**new_key(), **headers})
