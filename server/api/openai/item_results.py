"""`item_results`: a model's outputs for many items of one HTTP request, each a request of its own in its queue."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from lathe.server.errors import BadRequest
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable
from lathe.server.types import Array, Tensors, TensorSpec

# Items of one request in the model's queue: enough for full batches; other requests get their turn.
_MOST_IN_FLIGHT = 64
_TOKENS = "tokens"  # the output with the numbers of tokens, for `usage`


async def item_results(
    plane: DataPlane, servable: Servable, client: str, items: Sequence[Tensors], field: str, traceparent: str
) -> list[Tensors]:
    """The model's outputs for each item. So items of similar lengths from all clients share batches.

    `items`: for each item its inputs BYTES [1, 1]. `field` names the item in errors. `traceparent`: that header of the
    HTTP request, may be empty; each item has a span of its own. Raises what `DataPlane.execute`
    raises for the first item that fails; the other items leave the queue.
    """
    places = asyncio.Semaphore(_MOST_IN_FLIGHT)

    async def result(index: int, inputs: Tensors) -> Tensors:
        group, size = servable.signature.group_of(inputs), sum(len(each[0, 0]) for each in inputs.values())
        async with places:
            try:
                return await plane.execute(
                    servable, inputs, group, None, traceparent=traceparent, client=client, text=size
                )
            except BadRequest as error:
                raise BadRequest(f"{field} {index}: {error}") from error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(result(*each)) for each in enumerate(items)]
    except ExceptionGroup as failures:  # the first error has cancelled the other items
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def text_column(text: str) -> Array:
    """A text as an input BYTES [1, 1]."""
    return np.array([[text.encode()]], np.object_)


def token_total(results: Sequence[Tensors]) -> int:
    """The tokens of all items; 0 if the model has no output `tokens` INT64 [n, 1]."""
    return sum(int(outputs[_TOKENS].sum()) for outputs in results if _TOKENS in outputs)


def specs_text(specs: Mapping[str, TensorSpec]) -> str:
    """The first inputs or outputs of a model, for an error."""
    return ", ".join(f"{spec.name} {spec.text}" for spec in list(specs.values())[:5])
