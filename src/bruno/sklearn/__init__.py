"""Estimators for scikit-learn: outlier detection in sets, few-shot classification, and latents.

They need the extra `sklearn`: pip install "bruno[sklearn]".
"""

from bruno.sklearn.base import SetEstimator
from bruno.sklearn.classifier import FewShotClassifier
from bruno.sklearn.outliers import SetOutlierDetector
from bruno.sklearn.transformer import LatentTransformer

__all__ = ["FewShotClassifier", "LatentTransformer", "SetEstimator", "SetOutlierDetector"]
