"""Clients of a Lathe server: `lathe.client.Client` blocks, `lathe.client.AsyncClient` is for asyncio.

`help(lathe.client.Client)` describes the operations. The other classes are their results and errors.
"""

from lathe.server.client import *  # noqa: F403
from lathe.server.client import __all__ as __all__
