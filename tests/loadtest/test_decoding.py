"""Decoding token by token beside ONNX Runtime: a decoder's inputs, and the reported figures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model

from loadtest.__main__ import main
from loadtest.tokens import SETTLING, Decoded, Decoder, decode
from tests.loadtest.decoder import write_decoder

NO_DECODER = """
<ir_version: 8, opset_import: ["" : 17]>
plain (float[n] x) => (float[n] y) { y = Add(x, x) }
"""


def test_one_command_decodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_decoder(tmp_path / "model.onnx")
    assert main(["tokens", str(path), "--tokens", "40", "--batch", "2", "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["ours_ms"]) == len(found["theirs_ms"]) == 40
    assert found["differ"] == []
    assert found["code"], "the first run compiles"
    assert max(found["code"]) <= SETTLING
    assert "0 times after the first 8 tokens" in capsys.readouterr().out


def test_a_decoder_gets_the_whole_past() -> None:
    past = SimpleNamespace(name="past_key_values.0.key", shape=["batch", 2, "past", 16])
    names = ("input_ids", "attention_mask", "position_ids")
    inputs = [*(SimpleNamespace(name=name, shape=["batch", "n"]) for name in names), past]
    decoder = Decoder.of(inputs)
    nothing = decoder.start(3)
    assert nothing[past.name].shape == (3, 2, 0, 16)
    given = decoder.feeds(np.full((3, 2), 9), nothing, 5)
    assert given["attention_mask"].shape == (3, 7)
    assert given["position_ids"].tolist() == [[5, 6]] * 3
    assert set(given) == {*names, past.name}
    with pytest.raises(ValueError, match="inputs pixels are not known"):
        Decoder.of([SimpleNamespace(name="pixels", shape=[3]), *inputs])
    with pytest.raises(ValueError, match="expected two free dimensions"):
        Decoder.of([*inputs[:3], SimpleNamespace(name="past_1", shape=["batch", 2, "past", "width"])])


def test_a_model_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(parse_model(NO_DECODER), str(path))
    with pytest.raises(ValueError, match="inputs x are not known"):
        decode(path, 20)
    with pytest.raises(ValueError, match="9 tokens are too few"):
        decode(path, 9)


def test_late_compilation_and_other_tokens_break_the_promise() -> None:
    times = [1.0] * 20
    assert Decoded(times, times, [], [0, 2]).has_passed
    assert not Decoded(times, times, [], [0, 12]).has_passed
    assert not Decoded(times, times, [3], [0]).has_passed
    assert "1 times after the first 8 tokens" in Decoded(times, times, [], [0, 12]).lines()[1]
