"""The `tokenize` step: texts become numbers in a process of its own, whose limits protect other requests."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from lathe.server.batching.admission import Admission
from lathe.server.batching.batcher import Batcher
from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.execution import run_each
from lathe.server.batching.signature import Signature
from lathe.server.errors import BadRequest, ExecutionInterrupted, Internal
from lathe.server.pipelines import step_process
from lathe.server.pipelines.builtins import text
from lathe.server.pipelines.builtins.base import StepRequest
from lathe.server.pipelines.builtins.text import Tokenize
from lathe.server.pipelines.definition import BadPipeline
from lathe.server.processes.stage_children import Limits
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.telemetry.statistics import Statistics
from lathe.server.types import ModelRef, Tensors
from tests.server.pipelines.test_builtins import column
from tests.server.running import wait_for

VOCABULARY = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "<pad>": 4}


def tokenizer_folder(folder: Path, splitter: pre_tokenizers.PreTokenizer) -> Path:
    """A folder with a tokenizer of four words."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = splitter
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder


def tokenize(folder: Path, **options: object) -> Tokenize:
    return text.tokenize(StepRequest(options, {}, folder))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("words"), pre_tokenizers.Whitespace())


@pytest.fixture(scope="module")
def step(words: Path) -> Iterator[Tokenize]:
    with closing(tokenize(words, multiple=4, max_length=8, max_bytes=100)) as made:
        yield made


def process_of(step: Tokenize) -> int:
    child = step._helper._child
    assert child is not None
    return child.pid


def test_texts_become_numbers_padded_to_a_multiple(step: Tokenize) -> None:
    out = step.execute({"text": column(b"one two", b"three four one two one")})
    np.testing.assert_array_equal(out["input_ids"], [[1, 2, 4, 4, 4, 4, 4, 4], [3, 0, 1, 2, 1, 4, 4, 4]])
    np.testing.assert_array_equal(out["attention_mask"], [[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]])
    assert not out["token_type_ids"].any()
    assert {array.dtype for array in out.values()} == {np.dtype(np.int64)}
    assert step.execute({"text": column()})["input_ids"].shape == (0, 4)


def test_a_long_text_is_truncated_and_so_is_its_padding(words: Path) -> None:
    with closing(tokenize(words, multiple=4, max_length=6)) as step:
        out = step.execute({"text": column(b"one " * 9, b"")})
    np.testing.assert_array_equal(out["attention_mask"], [[1] * 6, [0] * 6])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"\xff\xfe", "text 0: not UTF-8: invalid start byte at byte 0"),
        (b"x" * 101, "expected at most 100 bytes, got 101"),
    ],
)
def test_an_input_that_is_no_text_is_the_clients_error(step: Tokenize, given: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        step.execute({"text": column(given)})


@pytest.mark.parametrize("content", ["{", '{"version": "1.0", "model": {"type": "Magic"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BadPipeline, match=r"file 'tokenizer.json': not a valid tokenizer"):
        tokenize(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_file_that_takes_too_long_is_refused(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PARSING", Limits(seconds=-1, memory=1 << 30))
    monkeypatch.setattr(step_process, "_POLL", 0)  # otherwise the file is read before the first check
    with pytest.raises(BadPipeline, match=r"file 'tokenizer.json': cannot be read: it takes longer than"):
        tokenize(words)


def test_concurrent_callers_get_their_own_results(step: Tokenize) -> None:
    rows = [column(*[word.encode()] * count) for count, word in enumerate(VOCABULARY, 1)] * 10
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda row: step.execute({"text": row})["input_ids"][:, 0].tolist(), rows)]
    expected = [[0, 1, 2, 3, 0][index % 5] for index in range(50)]
    assert answers == [[expected[index]] * (index % 5 + 1) for index in range(50)]


def ids(outcomes: Sequence[Tensors | Exception]) -> list[Any]:
    return [one if isinstance(one, Exception) else one["input_ids"][:, 0].tolist() for one in outcomes]


def test_each_request_has_its_own_most_tokens(step: Tokenize) -> None:
    assert step.truncations == range(1, 9)
    words = {"text": column(b"one two three one two three")}
    outcomes = step.execute_each([words, step.limited(words, 2, True), step.limited(words, 5, False), words])
    assert [one["input_ids"].tolist() for one in outcomes if not isinstance(one, Exception)] == [
        [[1, 2, 3, 1, 2, 3, 4, 4]], [[1, 2]], [[1, 2, 3, 1, 2]], [[1, 2, 3, 1, 2, 3, 4, 4]],
    ]  # fmt: skip
    assert [step.token_count(one) for one in outcomes if not isinstance(one, Exception)] == [6, 2, 5, 6]


@pytest.mark.parametrize(("options", "lengths"), [({}, (2, 16)), ({"multiple": 4}, (4, 4))])
def test_nothing_is_padded_for_steps_that_pack(words: Path, options: dict[str, int], lengths: tuple[int, int]) -> None:
    """Unless the pipeline asks for it."""
    with closing(tokenize(words, **options)) as step:
        given = {"text": column(b"one two")}
        outcomes = step.execute_each([step.limited(given, 0, packed) for packed in (True, False)])
    assert tuple(one["input_ids"].shape[1] for one in outcomes if not isinstance(one, Exception)) == lengths


def test_waiting_requests_are_sent_to_the_process_together(step: Tokenize, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has its own length, and its own error."""
    lengths: list[int] = []
    write = step_process._Child._write
    monkeypatch.setattr(
        step_process._Child, "_write", lambda child, data: (lengths.append(len(data)), write(child, data))
    )
    texts = [[b"one"], [b"two", b"three one two one two"], [b"\xff"], [], [b"three"]]
    outcomes = step.execute_each([{"text": column(*each)} for each in texts])
    assert [one["input_ids"].shape for one in outcomes if not isinstance(one, Exception)] == [
        (1, 4), (2, 8), (0, 4), (1, 4),
    ]  # fmt: skip
    assert isinstance(outcomes[2], BadRequest)
    assert ids(outcomes[:2]) == [[1], [2, 3]]
    assert len(lengths) == 1
    monkeypatch.setattr(step_process, "_MAX_FRAME_BYTES", 36)  # bytes: two of these requests
    assert ids(step.execute_each([{"text": column(word)} for word in (b"one", b"two", b"three")])) == [[1], [2], [3]]
    assert len(lengths) == 3


def test_a_request_that_takes_too_long_harms_no_waiting_request(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_ENCODING", Limits(seconds=0.01, memory=1 << 30, patience=1e9))
    with closing(tokenize(words, max_bytes=1 << 24)) as step:
        first, slow, last = step.execute_each(
            [{"text": column(each)} for each in (b"one", b"one " * 1_000_000, b"two")]
        )
    assert isinstance(slow, BadRequest)
    assert ids([first, last]) == [[1], [2]]


def test_requests_that_wait_while_a_process_dies_are_answered(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cause and however often: only the request that causes it fails."""
    with closing(tokenize(words)) as step:
        answer = step_process._Child._answer

        def dying(child: Any, watch: Any) -> Any:
            found = answer(child, watch)
            if bytes(found[1]).count((3).to_bytes(8, "little")):  # the number of "three"
                raise step_process._ChildExited
            return found

        monkeypatch.setattr(step_process._Child, "_answer", dying)
        outcomes = step.execute_each([{"text": column(word)} for word in (b"one", b"three", b"two")])
    assert isinstance(outcomes[1], Internal)
    assert ids([outcomes[0], outcomes[2]]) == [[1], [2]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("requests", [1, 200], ids=["one that takes long", "many"])
def test_a_run_without_waiting_callers_is_interrupted(words: Path, requests: int) -> None:
    with closing(tokenize(words, max_bytes=1 << 26)) as step, ThreadPoolExecutor(1) as pool:
        step._helper._start_seconds = 0.1
        before = process_of(step)
        texts = [{"text": column(b"one " * (2_000_000 // requests))} for _ in range(requests)]
        running = pool.submit(step.execute_each, texts)
        while not step.runs():
            time.sleep(0.001)
        (run,) = step.runs().values()
        began = time.monotonic()
        step.interrupt(run)
        with pytest.raises(ExecutionInterrupted):
            running.result(60)
        assert time.monotonic() - began >= 0.09  # a new process costs as much
        assert not step.runs() and not Path(f"/proc/{before}").exists()
        assert ids([step.execute({"text": column(b"two")})]) == [[2]]
        again = pool.submit(step.execute_each, texts[:2])
        step.interrupt(run)
        assert len(again.result(60)) == min(requests, 2)


def test_a_run_that_has_all_its_results_is_not_interrupted(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption would cost a process for nothing."""
    with closing(tokenize(words)) as step:
        step._helper._start_seconds = 0.0
        before, answer = process_of(step), step_process._Child._answer

        def late(child: Any, watch: Any) -> Any:
            found = answer(child, watch)
            step.interrupt()
            return found

        monkeypatch.setattr(step_process._Child, "_answer", late)
        assert ids(step.execute_each([{"text": column(b"two")}])) == [[2]]
        assert process_of(step) == before


def test_a_cancelled_request_frees_the_step(words: Path) -> None:
    """As does one whose deadline has passed: the queue behind it continues."""
    with closing(tokenize(words, max_bytes=1 << 26)) as step:
        step._helper._start_seconds = 0.0

        async def scenario() -> None:
            pool = WorkerPool(1)
            batcher = Batcher(step, Admission(100, 1 << 30), pool, Statistics(ModelRef("t", 1)), 0.0, run_each)
            signature = Signature(step.inputs, step.outputs, True)

            def ask(given: bytes, timeout: float | None = None) -> tuple[Entry, asyncio.Future[Outcome]]:
                inputs = {"text": column(given)}
                future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
                deadline = None if timeout is None else time.monotonic() + timeout
                entry = Entry(inputs, signature.group_of(inputs), future.set_result, deadline)
                batcher.submit(entry)
                return entry, future

            try:
                late = ask(b"one " * 2_000_000, timeout=0.1)[1]
                assert isinstance(await asyncio.wait_for(late, 60), ExecutionInterrupted)
                leaving, _ = ask(b"one " * 2_000_000)
                await asyncio.to_thread(wait_for, lambda: step.runs())
                batcher.cancel(leaving)
                answered = await asyncio.wait_for(ask(b"two")[1], 60)
                assert isinstance(answered, dict) and ids([answered]) == [[2]]
            finally:
                pool.close()

        asyncio.run(scenario())


def test_a_dead_process_is_restarted_even_if_its_folder_is_gone(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, pre_tokenizers.Whitespace())
    with closing(tokenize(folder)) as step:
        (folder / "tokenizer.json").unlink()
        before = process_of(step)
        os.kill(before, 9)
        assert step.execute({"text": column(b"two")})["input_ids"][0, 0] == 2
        assert process_of(step) != before
        assert step.memory_bytes > 1 << 20


def test_a_process_whose_thread_has_ended_answers(words: Path) -> None:
    """Linux kills it together with the thread that started it; the next request restarts it."""
    made: list[Tokenize] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: made.append(tokenize(words)))
        thread.start()
        thread.join()
    for step in made:
        with closing(step):
            assert step.execute({"text": column(b"two")})["input_ids"][0, 0] == 2
            restart = threading.Thread(target=step.execute, args=({"text": column(b"two")},))
            restart.start()
            restart.join()
            assert step.execute({"text": column(b"three")})["input_ids"][0, 0] == 3


def test_a_process_that_cannot_be_restarted_is_not_the_clients_error(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, pre_tokenizers.Whitespace())
    with closing(tokenize(folder)) as step:
        (folder / "tokenizer.json").write_text("{")
        os.kill(process_of(step), 9)
        with pytest.raises(Internal, match="could not be restarted: "):
            step.execute({"text": column(b"two")})


def test_a_text_that_takes_too_long_is_refused_and_the_next_one_answered(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_ENCODING", Limits(seconds=0.01, memory=1 << 30, patience=1e9))
    with closing(tokenize(words, max_bytes=1 << 24)) as step:
        with pytest.raises(BadRequest, match=r"text: it takes longer than 0.01 s to tokenize"):
            step.execute({"text": column(b"one " * 1_000_000)})
        assert step.execute({"text": column(b"one")})["input_ids"][0, 0] == 1


def test_a_text_that_makes_the_library_panic_harms_no_other(tmp_path: Path) -> None:
    """A pattern with endless backtracking is abandoned."""
    splitter = pre_tokenizers.Split(Regex(r"(x+x+)+y"), behavior="isolated")
    with closing(tokenize(tokenizer_folder(tmp_path, splitter))) as step:
        with pytest.raises(Internal, match=r"the step failed \(PanicException\)"):
            step.execute({"text": column(b"x" * 60)})
        assert step.execute({"text": column(b"one")})["input_ids"][0, 0] == 1


def test_closing_leaves_no_process_and_starts_none(words: Path) -> None:
    open_before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    step = tokenize(words)
    pid = process_of(step)
    step.close()
    step.close()
    assert not Path(f"/proc/{pid}").exists()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (open_before, threads)
    assert step.memory_bytes == 0
    with pytest.raises(Internal):
        step.execute({"text": column(b"one")})
