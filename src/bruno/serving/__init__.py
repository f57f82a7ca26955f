"""A service over HTTP: several models score, sample, classify and rank, and sets are kept in a store.

It needs the extra `serve`: pip install "bruno[serve]".
"""

from bruno.extras import imports_of

with imports_of("serve", "`bruno.serving`"):
    import fastapi as _fastapi  # noqa: F401
    import httptools as _httptools  # noqa: F401
    import prometheus_client as _prometheus_client  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401

from bruno.serving.app import create_app
from bruno.serving.server import read_token, running, serve
from bruno.serving.settings import Limits

__all__ = ["Limits", "create_app", "read_token", "running", "serve"]
