"""CORS: a browser lets a page of another origin call the server only if the server's answers say so."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from server.access.crossorigin import ANY

_READABLE = ("inference-header-content-length", "retry-after", "content-encoding", "location", "allow")  # by the page
_PREFLIGHT_AGE = 600  # seconds for which a browser need not ask again whether it may call


def allow_pages(app: FastAPI, origins: frozenset[str]) -> None:
    """Let pages of these origins call the application; without any, nothing is added. Call it after the other
    middleware, so that it is the outermost and its headers are on errors, too.

    Keys travel in `Authorization`, which the page itself has to know; no cookies are in use, so none are allowed.
    """
    if not origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=[ANY] if ANY in origins else sorted(origins),
        allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
        allow_headers=["*"],
        expose_headers=_READABLE,
        max_age=_PREFLIGHT_AGE,
    )
