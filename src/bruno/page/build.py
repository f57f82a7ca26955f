"""Build the files that the page loads: the runtime from npm, the exported models, and examples."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from bruno.data.synthetic import draw_characters
from bruno.model import Bruno
from bruno.onnx import WEIGHTS, export_onnx
from bruno.page.files import BUILT, CONTENTS, HERE, STATIC
from bruno.page.symbols import as_images, as_lists, draw_symbols
from bruno.weights import pretrained

RUNTIME = HERE / "node_modules" / "onnxruntime-web" / "dist"
FUNCTIONS = ("encode", "decode", "score_latents", "predict", "sample_latents")
# Pretrained models, with their titles on the page, which starts with the first.
MODELS = {"omniglot-small": "Small and quick", "omniglot": "Large and finer"}
_SCRIPT, _WASM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
_CANDIDATES = 12  # latent dimensions
_SEED, _OTHER_CHARACTERS = 116, 100  # number of other characters, which set the threshold of "none of these"


def build() -> None:
    """Write the runtime, pretrained models and examples to `BUILT`, which is replaced if it exists.

    Files are gzipped, since static hosts may not compress; the page inflates them.
    """
    if not RUNTIME.is_dir():
        raise FileNotFoundError(f"{RUNTIME} must hold onnxruntime-web. Install it with: make page")
    shutil.rmtree(BUILT, ignore_errors=True)
    BUILT.mkdir(parents=True)
    shutil.copy(RUNTIME / _SCRIPT, BUILT)
    opened = {name: pretrained(name) for name in MODELS}
    contents = {
        "page": [*sorted(path.name for path in STATIC.iterdir()), _SCRIPT],
        "size": next(iter(opened.values())).shape[-1],
        "weights": WEIGHTS,
        "runtime": _compress(BUILT / "runtime.wasm.gz", (RUNTIME / _WASM).read_bytes()),
        "models": {name: describe(name, model, MODELS[name], BUILT) for name, model in opened.items()},
        "symbols": as_lists(draw_symbols()),
    }
    (BUILT / CONTENTS).write_text(json.dumps(contents))


def describe(name: str, model: Bruno, title: str, folder: Path) -> dict[str, Any]:
    """Export a model to the folder; returns the description of it that the page needs."""
    with tempfile.TemporaryDirectory() as beside:
        paths = export_onnx(model, beside, functions=FUNCTIONS, half=True)
        files = {path.name: _compress(folder / f"{name}.{path.name}.gz", path.read_bytes()) for path in paths}
    return {
        "title": title,
        "files": files,
        "dimensions": discriminative_dimensions(model),
        "none": none_of_these(model),
    }


def discriminative_dimensions(model: Bruno) -> list[int]:
    """The two latent dimensions that separate the symbols best, among the most correlated ones.

    These have the highest ratio of the variance between symbols to the variance within symbols.
    """
    images = as_images(draw_symbols(), model.shape[-1])
    z = model.encode(images.flatten(0, 1)).z.view(*images.shape[:2], -1)
    candidates = model.process.correlation.topk(_CANDIDATES).indices
    ratio = z.mean(1).var(0) / z.var(1).mean(0)
    best: list[int] = candidates[ratio[candidates].topk(2).indices].tolist()
    return best


def none_of_these(model: Bruno) -> float:
    """The score that 95 % of drawings stay below, given one example each of four other characters."""
    drawn = draw_characters(_OTHER_CHARACTERS, 2, size=model.shape[-1], seed=_SEED).elements
    support, queries = drawn.view(_OTHER_CHARACTERS, 2, *model.shape).unbind(1)
    scores = model.condition(support.unsqueeze(1)).score(queries.unsqueeze(1))
    four = torch.stack([scores.roll(-i, 1).diag() for i in range(1, 5)], 1)
    return four.amax(1).quantile(0.95).item()


def _compress(path: Path, contents: bytes) -> dict[str, Any]:
    """Write a gzipped file; return its size, and an address with a hash of its contents, for caches."""
    compressed = gzip.compress(contents, mtime=0)
    path.write_bytes(compressed)
    digest = hashlib.sha256(compressed).hexdigest()[:12]
    return {"address": f"{path.name}?{digest}", "bytes": len(compressed)}


if __name__ == "__main__":
    build()
