"""Clients of a Lathe server: `lathe.client.Client` blocks, `lathe.client.AsyncClient` is for asyncio."""

from lathe.server.client import *  # noqa: F403
from lathe.server.client import __all__ as __all__
