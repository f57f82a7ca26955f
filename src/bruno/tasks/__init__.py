"""Tasks of a trained model: generation, classification, outlier detection, retrieval, and analyses."""

from bruno.tasks.analysis import (
    CorrelationAndDof,
    DimensionsByCorrelation,
    Inspection,
    LogProbByPosition,
    ToyComparison,
    inspect_model,
    log_prob_by_position,
)
from bruno.tasks.anomaly import (
    Judgement,
    density_floor,
    judge_batch,
    leave_one_out_scores,
    online_scores,
    reference_density,
)
from bruno.tasks.anomaly_benchmark import DetectionComparison, DetectionQuality, measure_anomaly
from bruno.tasks.attribution import UnusualColumn, unusual_column
from bruno.tasks.calibration import GroupCalibration, fixed_cutoffs
from bruno.tasks.classification import Classification, classify
from bruno.tasks.conformal import GroupScores, PValue, benjamini_hochberg
from bruno.tasks.detector import Detector
from bruno.tasks.drift import DriftTest, WithinSet
from bruno.tasks.episodes import FewShotProtocol
from bruno.tasks.evaluation import BitsPerDim, measure_bits_per_dim
from bruno.tasks.explanation import Explanation, PatchExplanation, explain
from bruno.tasks.familiarity import Familiarity
from bruno.tasks.few_shot import (
    FewShotComparison,
    FewShotResult,
    compare_few_shot,
    measure_few_shot,
    measure_pixels,
)
from bruno.tasks.generation import (
    SetSamples,
    SpreadByRepeats,
    draw_samples,
    prior_samples,
    samples_by_prefix,
    spread_by_repeats,
)
from bruno.tasks.groups import Groups
from bruno.tasks.index import Index, open_index
from bruno.tasks.progress import Progress
from bruno.tasks.retrieval import Ranking, RetrievalQuality, RetrievalResult, measure_retrieval, rank
from bruno.tasks.robust_evidence import Cutoffs, typical_elements
from bruno.tasks.specks import SpeckResult, has_speck, measure_specks
from bruno.tasks.stability import Curve, StabilityStudy, Variant, stability_studies, stability_study
from bruno.tasks.stream_evidence import StreamEvidence
from bruno.tasks.stream_summary import JudgedElement, StreamSummary
from bruno.tasks.temperature import FittedTemperature, fit_temperature

# Grouped by task.
__all__ = [  # noqa: RUF022
    "Progress",
    # evaluation
    "BitsPerDim",
    "measure_bits_per_dim",
    # generation
    "SetSamples",
    "SpeckResult",
    "SpreadByRepeats",
    "draw_samples",
    "has_speck",
    "measure_specks",
    "prior_samples",
    "samples_by_prefix",
    "spread_by_repeats",
    # few-shot classification
    "FewShotComparison",
    "FewShotProtocol",
    "FewShotResult",
    "compare_few_shot",
    "measure_few_shot",
    "measure_pixels",
    # classification
    "Classification",
    "FittedTemperature",
    "classify",
    "fit_temperature",
    # outlier detection
    "Cutoffs",
    "DetectionComparison",
    "DetectionQuality",
    "Detector",
    "DriftTest",
    "GroupCalibration",
    "GroupScores",
    "Groups",
    "JudgedElement",
    "Judgement",
    "PValue",
    "StreamEvidence",
    "StreamSummary",
    "UnusualColumn",
    "WithinSet",
    "benjamini_hochberg",
    "density_floor",
    "fixed_cutoffs",
    "judge_batch",
    "leave_one_out_scores",
    "measure_anomaly",
    "online_scores",
    "reference_density",
    "typical_elements",
    "unusual_column",
    # explanations
    "Explanation",
    "PatchExplanation",
    "explain",
    # retrieval
    "Index",
    "Ranking",
    "RetrievalQuality",
    "RetrievalResult",
    "measure_retrieval",
    "open_index",
    "rank",
    # familiarity
    "Familiarity",
    # analyses
    "CorrelationAndDof",
    "Curve",
    "DimensionsByCorrelation",
    "Inspection",
    "LogProbByPosition",
    "StabilityStudy",
    "ToyComparison",
    "Variant",
    "inspect_model",
    "log_prob_by_position",
    "stability_studies",
    "stability_study",
]
