"""Sets that are spread over the machines of a Ray cluster.

It needs the extra `ray`: pip install "bruno[ray]".
"""

try:
    import ray.data as _ray_data  # noqa: F401
except ImportError as error:
    raise ImportError("`bruno.ray` needs Ray; pip install 'bruno[ray]' installs it.") from error

from bruno.ray.jobs import classify, condition, posteriors, score

__all__ = ["classify", "condition", "posteriors", "score"]
