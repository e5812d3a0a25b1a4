"""The inference operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lathe.server.client.call import Call, operation, path
from lathe.server.client.models import version_segments
from lathe.server.client.tensors import HEAD_LENGTH, Answer, RequestedOutputs, decode, encode
from lathe.server.types import Parameter

_SLACK = 1.0  # seconds beyond the request's timeout in which the server's refusal may arrive


class InferenceOperations:
    """The inference operation of both clients."""

    @operation
    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        version: str | int = "",
        *,
        outputs: RequestedOutputs | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        timeout: float | None = None,
        id: str = "",
    ) -> Call[Answer]:
        """Run a model; `version` is a number or an alias, default the live version.

        `inputs` maps the model's input names to arrays, or to values that NumPy converts. `outputs` are the names of
        the wanted outputs, default all; as a mapping, each with its parameters of the protocol, such as
        `{"classification": 3}`. `parameters` are those of the request. With `timeout` (seconds) the server refuses a
        request that it cannot answer in time, and the client waits one second longer. Raises ClientError for inputs
        that the protocol cannot carry.
        """
        sent = dict(parameters or {})
        if timeout is not None:
            sent["timeout"] = round(timeout * 1e6)  # microseconds
        head, payload = encode(inputs, outputs, sent, id)
        headers = {
            "content-type": "application/octet-stream",
            HEAD_LENGTH: str(len(head)),
            "accept-encoding": "identity",  # numbers hardly compress, and compression takes longer than most models
        }
        where = path("/v2/models", model, *version_segments(version), "infer")
        return Call(
            "POST",
            where,
            decode,
            headers=headers,
            content=head + payload,
            timeout=None if timeout is None else timeout + _SLACK,
        )
