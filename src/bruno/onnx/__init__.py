"""Export of models to ONNX, for other languages and the browser; needs `bruno[onnx]`."""

from bruno.onnx.export import WEIGHTS, export_onnx

__all__ = ["WEIGHTS", "export_onnx"]
