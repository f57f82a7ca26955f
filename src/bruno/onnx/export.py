"""Models as ONNX graphs: one file for each function, and one file with the weights of all of them."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bruno.checks import check_choice
from bruno.extras import imports_of
from bruno.files import atomic_write
from bruno.model import Bruno
from bruno.onnx.formulas import elementary
from bruno.onnx.functions import FUNCTIONS, Argument, Function

WEIGHTS = "weights.bin"
_OPSET = 20
_SMALLEST = 256  # bytes: smaller constants stay in the graph
_ALIGNMENT = 16  # of a tensor in the file of weights


def export_onnx(
    model: Bruno,
    folder: str | Path,
    *,
    functions: Sequence[str] = ("encode", "decode", "score"),
    half: bool = False,
) -> list[Path]:
    """Write functions of a model as graphs FUNCTION.onnx, with one file of weights; return the paths.

    ======================  =============================================================================
    encode                  x -> z, log_det
    decode                  z -> x
    score                   x, count, mean, scatter -> score (batch, sets), in nats
    score_latents           z, count, mean, scatter -> score (batch, sets), log_prior (batch,)
    predict                 count, mean, scatter -> location, scale, dof (sets, dim)
    sample_latents          count, mean, scatter, noise, temperature -> z (samples, sets, dim)
    ======================  =============================================================================

    The batch of elements and the number of sets are dynamic. Images x are float32 with their dequantisation
    noise: add ½ to integers, as `Bruno.encode` does without a generator. Rows x are float64 and complete.
    count, mean and scatter are the fields of `Evidence`, for one or more sets.

    Args:
        model: the model.
        folder: the folder of the files; created if it does not exist.
        functions: names of the functions.
        half: store the weights of the flow in half precision, as `bruno.save` does.
    """
    for name in functions:
        check_choice("functions", name, tuple(FUNCTIONS))
    _check_installed()
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`folder` must be a folder; got the file {folder}.")
    folder.mkdir(parents=True, exist_ok=True)
    weights, paths = _Weights(half), []
    for name in functions:
        graph = _graph(FUNCTIONS[name](model))
        weights.move_from(graph)
        with atomic_write(folder / f"{name}.onnx") as path:
            path.write_bytes(graph.SerializeToString(deterministic=True))
        paths.append(folder / f"{name}.onnx")
    with atomic_write(folder / WEIGHTS) as path:
        path.write_bytes(weights.contents)
    return [*paths, folder / WEIGHTS]


def _check_installed() -> None:
    with imports_of("onnx", "ONNX graphs"):
        import onnx  # noqa: F401


def _graph(function: Function) -> Any:
    """The graph of a function, as an onnx.ModelProto."""
    import onnx

    arguments = function.arguments()
    examples = tuple(part.example.to(function.model.device) for part in arguments.values())
    written = io.BytesIO()
    with _quiet(), torch.no_grad(), elementary():
        torch.onnx.export(
            function,
            examples,
            written,  # type: ignore[arg-type]  # the exporter also writes to files in memory
            input_names=list(arguments),
            output_names=list(function.outputs),
            dynamic_axes={name: part.axes for name, part in arguments.items()},
            opset_version=_OPSET,
            dynamo=False,  # tracing takes a twentieth of the time, and makes smaller graphs
            do_constant_folding=False,
        )
    graph = onnx.load_from_string(written.getvalue())
    _declare_unused(graph, arguments)
    return graph


def _declare_unused(model: Any, arguments: dict[str, Argument]) -> None:
    """Declare arguments that the tracer dropped: a Gaussian process does not depend on the scatter."""
    import onnx

    used = {value.name for value in model.graph.input}
    for name in arguments.keys() - used:
        example, axes = arguments[name].example, arguments[name].axes
        kind = onnx.helper.np_dtype_to_tensor_dtype(example.numpy().dtype)
        shape = [axes.get(i, size) for i, size in enumerate(example.shape)]
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, shape))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's notes on its progress and on packages that the export does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class _Weights:
    """The contents of the file of weights; equal tensors of several graphs are stored once."""

    def __init__(self, half: bool) -> None:
        self.half, self.contents = half, bytearray()
        self._places: dict[bytes, int] = {}

    def move_from(self, model: Any) -> None:
        """Replace the large tensors of a graph by references to the file."""
        import onnx

        for tensor in list(model.graph.initializer):
            if self.half and tensor.data_type == onnx.TensorProto.FLOAT and "flow." in tensor.name:
                _halve(model.graph, tensor)
            if len(tensor.raw_data) >= _SMALLEST:
                offset, length = self._place(tensor.raw_data), len(tensor.raw_data)
                onnx.external_data_helper.set_external_data(tensor, WEIGHTS, offset, length)
                tensor.ClearField("raw_data")

    def _place(self, data: bytes) -> int:
        if data not in self._places:
            self.contents += bytes(-len(self.contents) % _ALIGNMENT)
            self._places[data] = len(self.contents)
            self.contents += data
        return self._places[data]


def _halve(graph: Any, tensor: Any) -> None:
    """Store a tensor in half precision, with a cast back before its uses."""
    import numpy as np
    import onnx

    name = tensor.name
    short = onnx.numpy_helper.to_array(tensor).astype(np.float16)
    tensor.CopyFrom(onnx.numpy_helper.from_array(short, f"{name}.half"))
    cast = onnx.helper.make_node("Cast", [tensor.name], [name], to=onnx.TensorProto.FLOAT)
    graph.node.insert(0, cast)
