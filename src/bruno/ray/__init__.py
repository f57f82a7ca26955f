"""Sets that are spread over the machines of a Ray cluster.

It needs the extra `ray`: pip install "bruno[ray]".
"""

from bruno.extras import imports_of

with imports_of("ray", "`bruno.ray`"):
    import ray.data as _ray_data  # noqa: F401

from bruno.ray.jobs import classify, condition, posteriors, score

__all__ = ["classify", "condition", "posteriors", "score"]
