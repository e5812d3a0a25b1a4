"""MapSelected in native code: only the rows that a mask selects are computed, in blocks and on several threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import lathe
from lathe.core.compiler.compile import compile_to
from lathe.core.compiler.options import make_options
from lathe.core.kernels.control.selected_spec import BLOCK
from tests.core.expert_models import ExpertModel
from tests.onnx_runtime import plain_session

WIDTH, INNER = 24, 40


def tokens(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(shape).standard_normal((*shape, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("experts", "chosen", "adds"), [(5, 2, True), (9, 4, True), (4, 1, False)])
def test_experts_agree_with_onnx_runtime(experts: int, chosen: int, adds: bool, threads: int) -> None:
    data = ExpertModel(experts, chosen, WIDTH, INNER, adds).model()
    oracle = plain_session(data)
    with lathe.compile(lathe.load(data), threads=threads, tune="off", new_shapes="wait") as session:
        assert session.description.batching.batchable, session.description.batching.reason
        for sizes in ((1, 1), (1, 3), (2, 16), (3, 50), (2, 5 * BLOCK)):
            x = tokens(*sizes)
            np.testing.assert_allclose(session.run({"x": x})["y"], oracle.run(None, {"x": x})[0], 1e-4, 1e-5)
        explained = session.explain()
        assert explained.count("native map of selected rows") == experts
        assert "FALLBACK" not in explained and "0 on the reference" in explained


def test_all_tokens_choose_one_expert() -> None:
    """One expert has more than a block of rows, and the others have none."""
    data = ExpertModel(4, 1, WIDTH, INNER).model()
    x = np.broadcast_to(tokens(1, 1), (1, 3 * BLOCK + 5, WIDTH)).copy()
    with lathe.compile(lathe.load(data), threads=2, tune="off") as session:
        got = session.run({"x": x})["y"]
    np.testing.assert_allclose(got, plain_session(data).run(None, {"x": x})[0], 1e-4, 1e-5)


def test_a_batch_without_rows_gives_no_rows() -> None:
    data = ExpertModel(4, 2, WIDTH, INNER).model()
    with lathe.compile(lathe.load(data), threads=1, tune="off") as session:
        session.run({"x": tokens(1, 4)})
        assert session.run({"x": tokens(0, 4)})["y"].shape == (0, 4, WIDTH)


def test_nan_in_rows_that_no_expert_selects_has_no_effect_on_others() -> None:
    """A token with NaN makes its own row NaN at most; all other rows stay as they are."""
    data = ExpertModel(4, 2, WIDTH, INNER).model()
    x = tokens(1, 40)
    with lathe.compile(lathe.load(data), threads=1, tune="off") as session:
        before = session.run({"x": x})["y"].copy()
        x[0, 7] = np.nan
        after = session.run({"x": x})["y"]
    others = [row for row in range(40) if row != 7]
    np.testing.assert_allclose(after[0, others], before[0, others], 1e-5, 1e-6)


def test_artifacts_hold_the_kernel(tmp_path: Path) -> None:
    data, x = ExpertModel(6, 2, WIDTH, INNER).model(), tokens(2, 9)
    path = tmp_path / "experts.lathe"
    compile_to(path, lathe.load(data), make_options(cache_dir=tmp_path, tune="off"))
    with lathe.load_compiled(path, cache_dir=tmp_path) as session:
        got = session.run({"x": x})["y"]
    np.testing.assert_allclose(got, plain_session(data).run(None, {"x": x})[0], 1e-4, 1e-5)


def test_tokens_of_several_sequences_share_a_run() -> None:
    """In a packed run an expert computes the tokens of several sequences together."""
    data = ExpertModel(4, 2, WIDTH, INNER).model()
    oracle = plain_session(data)
    given = [{"x": tokens(1, length)} for length in (3, 17, 1, 40)]
    with lathe.compile(lathe.load(data), threads=1, tune="off", packing=64) as session:
        assert session.packing is not None and session.packing.packable, session.packing
        for feeds, outputs in zip(given, session.run_packed(given), strict=True):
            np.testing.assert_allclose(outputs["y"], oracle.run(None, feeds)[0], 1e-4, 1e-5)
