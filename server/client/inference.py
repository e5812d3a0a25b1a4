"""The operation that all others are there for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.client.call import Call, operation, path
from server.client.models import of_version
from server.client.tensors import HEAD_LENGTH, Answer, Chosen, decode, encode
from server.types import Parameter

_SLACK = 1.0  # seconds for the refusal of a server whose time for an answer has passed to get here


class InferenceOperations:
    """What both clients can ask of a model."""

    @operation
    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        version: str | int = "",
        *,
        outputs: Chosen | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        timeout: float | None = None,
        id: str = "",
    ) -> Call[Answer]:
        """Run a model; ``version`` is a number or an alias, the live one without.

        ``inputs`` are arrays, or what NumPy makes arrays of, by the model's names. ``outputs`` are the names wanted,
        all without; as a mapping, each with the parameters of the protocol, such as ``{"classification": 3}``.
        ``parameters`` are the request's. With ``timeout`` (seconds) the server refuses what it cannot answer by then.
        """
        given = dict(parameters or {})
        if timeout is not None:
            given["timeout"] = round(timeout * 1e6)
        head, payload = encode(inputs, outputs, given, id)
        headers = {
            "content-type": "application/octet-stream",
            HEAD_LENGTH: str(len(head)),
            "accept-encoding": "identity",  # numbers hardly shrink, and deflating costs more than most models
        }
        where = path("/v2/models", model, *of_version(version), "infer")
        return Call(
            "POST",
            where,
            decode,
            headers=headers,
            content=head + payload,
            timeout=None if timeout is None else timeout + _SLACK,
        )
