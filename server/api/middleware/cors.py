"""CORS: lets web pages of configured origins call the server from a browser."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from lathe.server.access.crossorigin import ANY

_EXPOSED_HEADERS = (
    "inference-header-content-length",
    "retry-after",
    "content-encoding",
    "location",
    "allow",
)  # response headers that pages may read
_PREFLIGHT_AGE = 600  # seconds for which a browser may cache the answer to a preflight request


def add_cors(app: FastAPI, origins: frozenset[str]) -> None:
    """Add CORS headers for pages of these origins; without origins, add nothing.

    Call it after all other middleware is added: as the outermost it also adds its headers to errors. Credentials
    (cookies) are not allowed: keys are sent in `Authorization`, which the page has to know.
    """
    if not origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=[ANY] if ANY in origins else sorted(origins),
        allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED_HEADERS,
        max_age=_PREFLIGHT_AGE,
    )
