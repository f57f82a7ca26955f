"""A trained model with its recipe and data, and all the jobs it does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bruno.checkpoint import save
from bruno.config import to_dict
from bruno.files import check_replaceable, inside
from bruno.model import Posterior
from bruno.onnx import export_onnx
from bruno.provenance import provenance
from bruno.reporting.page import report
from bruno.reporting.results import Result
from bruno.trained.base import Source
from bruno.trained.calibration import CALIBRATION_FILE
from bruno.trained.classification import ClassificationJobs
from bruno.trained.evaluation import EvaluationJobs
from bruno.trained.explanation import ExplanationJobs
from bruno.trained.folders import results_folder
from bruno.trained.generation import GenerationJobs
from bruno.trained.keyed_watch import KeyedJobs
from bruno.trained.retrieval import RetrievalJobs
from bruno.trained.verdict import VerdictJobs

_log = logging.getLogger(__name__)


class Trained(
    EvaluationJobs,
    GenerationJobs,
    ClassificationJobs,
    KeyedJobs,
    ExplanationJobs,
    RetrievalJobs,
    VerdictJobs,
):
    """A trained model with its recipe and data, and the jobs it does.

    `bruno.open` opens a trained model; `bruno.train` and `bruno.finetune` return a new one. By default, a job
    uses the test split of the model's own data. `split` names another split, `data` a known dataset or the
    path of user data, and `classes` some classes of either; `invert` turns dark ink into bright ink in user
    images. A job that draws random numbers takes a `seed`.
    """

    def condition(self, source: Source, *, invert: bool | None = None, skip_bad: bool = False) -> Posterior:
        """The posterior given a set: files, folders, a frame with the columns of the model, or arrays."""
        x = self.read_set(source, name="source", invert=invert, skip_bad=skip_bad)
        return self.model.condition(x.to(self.device))

    def save_result(self, result: Result, seed: int = 0) -> Path:
        """Write a result to the model's folder; returns the path of its JSON."""
        result = replace(result, model=self.model.fingerprint())
        return result.write(self.folder, config=to_dict(self.recipe or self.model.config), seed=seed)

    def report(self, out: str | Path | None = None) -> Path:
        """Write all results of the model, and its learning curve, as one HTML page; returns its path.

        Args:
            out: the file; report.html in the folder by default.
        """
        return report(self.folder, out)

    def export(self, out: str | Path, *, half: bool = False, int8: bool = False, onnx: bool = False) -> Path:
        """Write the model to one file, with recipe and provenance, or to a folder as ONNX; returns the path.

        The calibration of the model is kept beside the file, in the folder for its results, unless the
        weights are rounded: a calibration is of exact weights.

        Args:
            out: the file to write, or with `onnx` the folder.
            half: store the weights of the flow in half precision.
            int8: store 8-bit weights of the flow instead; not for ONNX graphs.
            onnx: write the functions encode, decode and score as ONNX graphs; see `export_onnx`.
        """
        out = Path(out)
        if onnx and int8:
            raise ValueError("`int8` is for model files, not for ONNX graphs. Omit it, or take `half`.")
        if onnx:
            self.export_onnx(out, half=half)
            return out
        check_replaceable(out, rb".{8}\{", "a model file")
        save(self.model, out, half=half, int8=int8, about=self._about())
        self._export_calibration(out, is_exact=not (half or int8))
        return out

    def _export_calibration(self, model: Path, is_exact: bool) -> None:
        """Keep the calibration, if there is one, beside an exported model with exact weights."""
        calibration = self.ready_calibration()
        if calibration is None:
            return
        if not is_exact:
            _log.info(
                "the calibration is not kept, as it is of exact weights; calibrate the file: bruno calibrate "
                "%s DATA",
                model,
            )
            return
        folder = results_folder(model)
        folder.mkdir(parents=True, exist_ok=True)
        calibration.save(inside(folder, CALIBRATION_FILE))
        _log.info("the calibration is kept in %s", folder / CALIBRATION_FILE)

    def _about(self) -> dict[str, Any]:
        """The metadata of a file of the model."""
        if self.about is not None or self.recipe is None:
            return self.about or {}
        return {"recipe": to_dict(self.recipe), "provenance": provenance(self.recipe.train.seed)}

    def export_onnx(
        self,
        folder: str | Path,
        *,
        functions: Sequence[str] = ("encode", "decode", "score"),
        half: bool = False,
    ) -> list[Path]:
        """Write functions of the model as ONNX graphs to a folder: see `bruno.onnx.export_onnx`."""
        return export_onnx(self.model, folder, functions=functions, half=half)
