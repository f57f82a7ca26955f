"""Build the files that the page loads: the runtime from npm, the exported model, and examples."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from bruno.data.synthetic import draw_characters
from bruno.model import Bruno
from bruno.onnx import WEIGHTS, export_onnx
from bruno.page.files import BUILT, HERE
from bruno.weights import pretrained

RUNTIME = HERE / "node_modules" / "onnxruntime-web" / "dist"
FUNCTIONS = ("encode", "decode", "score_latents", "predict", "sample_latents")
_SEED, _CHARACTERS, _DRAWINGS = 115, 5, 8  # of the examples that the page starts with
_STRANGERS = 100  # characters to find the threshold of "none of these" with


def build(name: str = "omniglot-small", folder: Path = BUILT, runtime: Path = RUNTIME) -> Path:
    """Write the runtime, a pretrained model and the examples to a folder; returns the folder.

    Files are gzipped, since static hosts may not compress; the page inflates them.
    """
    if not runtime.is_dir():
        raise FileNotFoundError(f"{runtime} must hold onnxruntime-web. Install it with: make page")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = pretrained(name)
    shutil.copy(runtime / "ort.wasm.bundle.min.mjs", folder)
    files = {"runtime.wasm.gz": (runtime / "ort-wasm-simd-threaded.wasm").read_bytes()}
    with tempfile.TemporaryDirectory() as beside:
        for path in export_onnx(model, beside, functions=FUNCTIONS, half=True):
            files[f"{path.name}.gz"] = path.read_bytes()
    for file, contents in files.items():
        (folder / file).write_bytes(gzip.compress(contents, mtime=0))
    sizes = {file: (folder / file).stat().st_size for file in files}
    (folder / "page.json").write_text(json.dumps(contents_of(name, model, sizes)))
    return folder


def contents_of(name: str, model: Bruno, sizes: dict[str, int]) -> dict[str, Any]:
    """What the page needs to know about its model, and the drawings that it starts with."""
    drawn = draw_characters(_CHARACTERS, _DRAWINGS, size=model.shape[-1], seed=_SEED).elements
    return {
        "model": name,
        "fingerprint": model.fingerprint(),
        "size": model.shape[-1],
        "levels": model.levels,
        "functions": FUNCTIONS,
        "weights": WEIGHTS,
        "files": sizes,
        "dimension": int(model.process.correlation.argmax()),
        "none": none_of_these(model),
        "examples": drawn.reshape(_CHARACTERS, _DRAWINGS, -1).tolist(),
    }


def none_of_these(model: Bruno) -> float:
    """The score that 95 % of drawings stay below, given one example each of four other characters."""
    drawn = draw_characters(_STRANGERS, 2, size=model.shape[-1], seed=_SEED + 1).elements
    support, queries = drawn.view(_STRANGERS, 2, *model.shape).unbind(1)
    scores = model.condition(support.unsqueeze(1)).score(queries.unsqueeze(1))
    four = torch.stack([scores.roll(-i, 1).diag() for i in range(1, 5)], 1)
    return four.amax(1).quantile(0.95).item()


if __name__ == "__main__":
    build()
