"""Random files of all opsets from 7 on, through the importer, the compiler and the exporter, against ONNX Runtime."""

from __future__ import annotations

import random
from collections import Counter

import onnx
import pytest

import lathe
from lathe.core.ir.equality import difference
from lathe.core.passes.pipeline import optimize
from tests.core.conformance.round_trip import REFUSALS, answers, assert_similar
from tests.core.random_models import OPSETS, grow

_TOLERANCES = (1e-3, 2e-4)  # relative, absolute: values are of size 1

QUICK = range(60)
MANY = range(1000, 1400)


class Refused(Exception):
    """ONNX Runtime refuses the model."""


def check(seed: int, compiled: bool) -> tuple[int, set[str]]:
    """Check the model of this seed, and its export, against ONNX Runtime; returns the model's opset and operators."""
    model, feeds = grow(random.Random(seed).randrange, steps=2 + seed % 14)
    onnx.checker.check_model(model)
    data = model.SerializeToString()
    try:
        want = answers(data, feeds)
    except REFUSALS as refusal:
        raise Refused(str(refusal)) from None
    graph = lathe.load(data)
    assert_similar(list(lathe.interpret(graph, feeds).values()), want, _TOLERANCES)
    exported = lathe.export(graph)
    assert difference(graph, lathe.load(exported)) == ""
    assert_similar(answers(lathe.export(optimize(graph)[0]), feeds), want, _TOLERANCES)
    if compiled:
        with lathe.compile(graph, threads=1 + seed % 2, tune="off") as session:
            assert_similar(list(session.run(feeds).values()), want, _TOLERANCES)
    return model.opset_import[0].version, {node.op_type for node in model.graph.node}


def check_all(seeds: range, compiled_each: int) -> tuple[Counter[int], set[str]]:
    """Check all seeds, of which ONNX Runtime may refuse one in fifty; returns counts of opsets, and all operators."""
    opsets: Counter[int] = Counter()
    operators: set[str] = set()
    refused = []
    for seed in seeds:
        try:
            opset, found = check(seed, seed % compiled_each == 0)
        except Refused as refusal:
            refused.append(str(refusal))
            continue
        except Exception as error:
            raise AssertionError(f"the model of seed {seed}") from error
        opsets[opset] += 1
        operators |= found
    assert len(refused) <= len(seeds) // 50, refused
    return opsets, operators


def test_files_agree() -> None:
    opsets, operators = check_all(QUICK, compiled_each=16)
    assert len(opsets) > 10 and len(operators) > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_files_agree() -> None:
    opsets, operators = check_all(MANY, compiled_each=1)
    assert set(opsets) == set(OPSETS)
    assert {"If", "Loop", "Scan", "SequenceConstruct", "QuantizeLinear", "LSTM", "Upsample"} <= operators
