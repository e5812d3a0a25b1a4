"""The report of a compression: one HTML page with the figures before and after, and what became of each layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from lathe.core.byte_sizes import format_bytes
from lathe.core.drawing import charts
from lathe.core.drawing.charts import figure, table

_ROWS = 500  # most layers in the table


def compression_page(record: Mapping[str, Any]) -> str:
    """The HTML document for the content of a compression's metrics.json."""
    rows = record["rows"]
    facts = [
        ("calibration rows", f"{rows['calibration']}"),
        ("test rows", f"{rows['test']}"),
        ("rows per timed run", f"{rows['timed']}"),
        ("data", f"{record['data']}"),
        ("seconds", f"{record['seconds']}"),
        ("Lathe", f"{record['version']}"),
    ]
    parts = [
        figure("Before and after", table(("", "source", "result"), _figures(record["figures"]))),
        figure("Metrics of the result", table(("", ""), _numbers(record["metrics"]))),
        figure("Layers", _layers(record["layers"])),
        figure("The compression", table(("", ""), facts)),
        figure("The recipe", f"<pre>{escape(json.dumps(record['recipe'], indent=2))}</pre>"),
    ]
    return charts.document("Compression report", "\n".join(parts))


def _figures(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    before, after = figures["source"], figures["result"]
    scores = [
        (name, charts.format_number(value), charts.format_number(after["metrics"][name]))
        for name, value in before["metrics"].items()
        if name in after["metrics"]
    ]
    times = (f"{each['microseconds']:.1f} µs" for each in (before, after))
    return [
        *scores,
        ("size", format_bytes(before["bytes"]), format_bytes(after["bytes"])),
        ("time of a run, one thread", *times),
    ]


def _numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(name, charts.format_number(value)) for name, value in metrics.items()]


def _layers(layers: list[Mapping[str, Any]]) -> str:
    """A table of the layers; the last four columns are empty unless the method measured each layer."""
    head = ("layer", "operator", "weights", "inputs", "weights as", "error", "error alone", "float32, µs", "int8, µs")
    rows = [
        (
            layer["name"],
            layer["op"],
            str(layer["weights"]),
            layer["inputs_type"],
            layer["weights_type"],
            f"{layer['error']:.3%}",
            f"{layer['error_alone']:.3%}" if "error_alone" in layer else "",
            f"{layer['float32_microseconds']:.1f}" if "float32_microseconds" in layer else "",
            f"{layer['int8_microseconds']:.1f}" if "int8_microseconds" in layer else "",
            layer.get("reason", ""),
        )
        for layer in layers[:_ROWS]
    ]
    left_out = f"<p>{len(layers) - _ROWS} more layers are in metrics.json.</p>" if len(layers) > _ROWS else ""
    return table((*head, "reason"), rows) + left_out
