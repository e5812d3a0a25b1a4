"""Child processes isolate failures: limits, crashes and refusals become clear errors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from lathe.server.errors import Internal, OutOfMemory, Overloaded, ServerError, StorageFull, TooLarge, Unprocessable
from lathe.server.fair_slots import CLIENT
from lathe.server.processes.stage_children import Children, Limits
from lathe.server.repository.artifacts import ArtifactCache, BuildOptions
from lathe.server.repository.builder import Builder, BuiltModel
from lathe.server.repository.live_models import LiveModel
from lathe.server.repository.registry import Registry
from tests.server.repository.world import ToyBackend, toy

STAGES = ("tests.server.repository.fake_stages",)
ROOMY = Limits(seconds=60, memory=1 << 30)


def parse(folder: Path, content: bytes, limits: Limits = ROOMY) -> None:
    """Run the parse stage on a model file."""
    (folder / "model.onnx").write_bytes(content)
    asyncio.run(Children(limits, STAGES).run("parse", folder / "model.onnx", folder / "ir"))


def test_a_stage_writes_its_result(tmp_path: Path) -> None:
    parse(tmp_path, toy())
    assert (tmp_path / "ir" / "graph.json").exists()


@pytest.mark.parametrize(
    ("do", "error", "message"),
    [
        ("crash", Unprocessable, "SIGSEGV"),
        ("break", Internal, "server's log"),
        ("fill the disk", StorageFull, "full"),
        ("ask for too much memory", TooLarge, "memory"),
        ("find a device full", OutOfMemory, "model.onnx needs more than cuda:0 has"),
    ],
)
def test_failures_become_errors_without_paths(do: str, error: type[ServerError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message) as raised:
        parse(tmp_path, toy(do=do))
    assert "/" not in raised.value.message
    assert "Traceback" not in raised.value.message


def test_a_refusal_is_passed_on_without_the_servers_paths(tmp_path: Path) -> None:
    with pytest.raises(Unprocessable) as raised:
        parse(tmp_path, b"\x08nonsense")
    assert raised.value.message == "model.onnx: no operator 'Bad' in opset 21"


@pytest.mark.parametrize("do", ["sleep", "start a child", "spin"])
def test_a_child_over_its_time_limit_is_killed_with_its_children(do: str, tmp_path: Path) -> None:
    """A sleeping child is killed by wall time, a computing one by its processor time, however busy the machine is."""
    limits = Limits(seconds=0.7, memory=1 << 30, patience=1.0 if do != "spin" else 1e9)
    with pytest.raises(TooLarge, match=r"longer than 0\.7 s, the limit of LATHE_CHILD_TIMEOUT"):
        parse(tmp_path, toy(do=do), limits)
    assert children_of(tmp_path) == []


def test_time_without_the_processor_does_not_count(tmp_path: Path) -> None:
    """A child that gets little processor time may exceed its limit in wall time."""
    started = time.monotonic()
    with pytest.raises(TooLarge, match=r"longer than 0\.3 s"):
        parse(tmp_path, toy(do="sleep"), Limits(seconds=0.3, memory=1 << 30, patience=5.0))
    assert time.monotonic() - started > 1.5


@pytest.fixture
def one_processor() -> Iterator[None]:
    """All processes that the test starts share one processor."""
    before, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    os.sched_setaffinity(0, {min(before)})
    with contextlib.suppress(PermissionError):  # if the tests run at idle priority, children cannot have a lower one
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    yield
    os.sched_setscheduler(0, policy, os.sched_param(0))
    os.sched_setaffinity(0, before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_processor")
def test_a_starved_idle_child_is_restarted_at_a_higher_priority(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A child that never gets the idle processor time it needs is restarted at a higher priority, and ends."""
    caplog.set_level("INFO")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        parse(tmp_path, toy(do="spin while idle"), Limits(seconds=60, memory=1 << 30, modesty=0.5))
    finally:
        busy.kill()
        busy.wait()
    assert "restarted" in caplog.text
    assert (tmp_path / "ir" / "graph.json").exists()


def test_the_end_of_a_child_is_noticed_without_pidfd_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "not there before Linux 5.3")

    monkeypatch.setattr(os, "pidfd_open", unknown)
    parse(tmp_path, toy())
    assert (tmp_path / "ir" / "graph.json").exists()


@pytest.mark.sample(2)
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_child_leaves_no_descriptor_open(run: Callable[[Coroutine[Any, Any, None]], None], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(toy())

    async def scenario() -> None:
        children, counts = Children(ROOMY, STAGES), []
        for number in range(3):
            await children.run("parse", tmp_path / "model.onnx", tmp_path / str(number))
            await asyncio.sleep(0.01)
            counts.append(len(os.listdir("/proc/self/fd")))
        assert len(set(counts)) == 1

    run(scenario())


def test_a_child_over_its_memory_limit_is_killed(tmp_path: Path) -> None:
    with pytest.raises(TooLarge, match="more than 200 MiB of memory, the limit of LATHE_CHILD_MEMORY"):
        parse(tmp_path, toy(do="eat memory"), Limits(seconds=30, memory=200 << 20))


def test_callers_cancelled_at_any_moment_leave_no_process(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(toy(do="start a child"))

    async def one(delay: float) -> None:
        task = asyncio.create_task(Children(ROOMY, STAGES).run("parse", tmp_path / "model.onnx", tmp_path / "ir"))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def scenario() -> None:
        await asyncio.gather(*(one(n * 0.01) for n in range(20)))

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert children_of(tmp_path) == []


def test_the_numbers_of_running_and_waiting_children_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(toy(do="sleep"))

    async def scenario() -> None:
        children = Children(Limits(seconds=30, memory=1 << 30, processes=1, waiting=2), STAGES)
        CLIENT.set("ann")
        tasks = [
            asyncio.create_task(children.run("parse", tmp_path / "model.onnx", tmp_path / str(n))) for n in range(2)
        ]
        await until(lambda: len(children_of(tmp_path)) == 1)
        with pytest.raises(Overloaded, match="models: 1 of yours are waiting for a process already"):
            await children.run("parse", tmp_path / "model.onnx", tmp_path / "third")
        assert len(children_of(tmp_path)) == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


def urgently(folder: Path, *contents: bytes, limits: Limits = ROOMY) -> list[object]:
    """Run the parse stage on several model files at once, as at the start; return the outcome of each."""

    async def scenario() -> list[object]:
        children, calls = Children(limits, STAGES), []
        async with children.at_normal_priority():
            for number, content in enumerate(contents):
                (folder / f"{number}.onnx").write_bytes(content)
                calls.append(children.run("parse", folder / f"{number}.onnx", folder / str(number)))
            found = await asyncio.gather(*calls, return_exceptions=True)
        assert children._forks is None
        return list(found)

    return asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.slow
def test_at_the_start_each_model_has_its_own_forked_process(tmp_path: Path) -> None:
    """A model cannot affect the processes of other models, and limits hold for each; the forks import nothing."""
    limits = Limits(seconds=1.5, memory=200 << 20, patience=2.0, processes=3)
    bad = {
        "crash": (Unprocessable, "SIGSEGV"),
        "break": (Internal, "server's log"),
        "fill the disk": (StorageFull, "full"),
        "ask for too much memory": (TooLarge, "memory"),
        "find a device full": (OutOfMemory, "needs more than cuda:0 has"),
        "eat memory": (TooLarge, "more than 200 MiB of memory, the limit of LATHE_CHILD_MEMORY"),
        "spin": (TooLarge, "longer than 1.5 s"),
        "start a child": (TooLarge, "longer than 1.5 s"),
    }
    contents = [content for do in bad for content in (toy(do=do), toy())]
    found = urgently(tmp_path, b"\x08nonsense", *contents, limits=limits)
    assert isinstance(found[0], Unprocessable) and found[0].message == "0.onnx: no operator 'Bad' in opset 21"
    for number, (do, (error, message)) in enumerate(bad.items()):
        outcome = found[1 + 2 * number]
        assert isinstance(outcome, error) and message in outcome.message, (do, outcome)
        assert (tmp_path / f"{2 + 2 * number}" / "graph.json").exists(), do
    assert children_of(tmp_path) == []


@pytest.mark.slow
def test_children_have_idle_priority_except_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(toy(do="sleep"))

    async def policies(children: Children) -> list[tuple[int, int]]:
        before = set(descendants(os.getpid()))
        task = asyncio.create_task(children.run("parse", tmp_path / "model.onnx", tmp_path / "ir"))
        await asyncio.sleep(2.0)
        found = [(os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid))
                 for pid in set(descendants(os.getpid())) - before]  # fmt: skip
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    async def scenario() -> None:
        children = Children(ROOMY, STAGES)
        own = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
        async with children.at_normal_priority():
            assert await policies(children) == [own, own]  # the fork server and its fork
        assert {nice for _, nice in await policies(children)} == {19}

    asyncio.run(scenario())


def test_tasks_are_restarted_when_the_fork_server_dies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.onnx").write_bytes(toy(do="wait for a file"))

    async def scenario() -> None:
        children = Children(ROOMY, STAGES)
        async with children.at_normal_priority():
            task = asyncio.create_task(children.run("parse", tmp_path / "model.onnx", tmp_path / "ir"))
            await until(lambda: len(descendants(os.getpid())) >= 2)
            assert children._forks is not None
            children._forks._popen.kill()
            (tmp_path / "model.onnx.go").touch()
            await task

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert (tmp_path / "ir" / "graph.json").exists()
    assert "restarted in a process of its own" in caplog.text


def test_callers_cancelled_at_the_start_leave_no_process(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(toy(do="start a child"))

    async def scenario() -> None:
        children = Children(Limits(seconds=60, memory=1 << 30, processes=20), STAGES)
        async with children.at_normal_priority():
            for delay in range(20):
                task = asyncio.create_task(children.run("parse", tmp_path / "model.onnx", tmp_path / "ir"))
                await asyncio.sleep(delay * 0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

    before = set(descendants(os.getpid()))
    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert set(descendants(os.getpid())) <= before


def test_a_child_gets_no_secrets_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_SECRET", "hidden")
    (tmp_path / "model.onnx").write_bytes(toy(do="sleep"))

    async def scenario() -> bytes:
        children = Children(ROOMY, STAGES)
        task = asyncio.create_task(children.run("parse", tmp_path / "model.onnx", tmp_path / "ir"))
        await until(lambda: [os.getpriority(os.PRIO_PROCESS, pid) for pid in children_of(tmp_path)] == [19])
        environment = environment_of(*children_of(tmp_path))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return environment

    assert b"hidden" not in asyncio.run(scenario())


def test_concurrent_requests_for_a_model_compile_it_once(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(toy(3.0))

    async def scenario() -> list[BuiltModel]:
        cache = ArtifactCache(tmp_path / "cache", 1 << 30)
        cache.open()
        builder = Builder(Children(ROOMY, STAGES), cache, ToyBackend(), BuildOptions(8, "float32", 1))
        return await asyncio.gather(
            *(builder.build(tmp_path / "model.onnx", "0" * 64, LiveModel("m", Registry())) for _ in range(5))
        )

    ((artifact,),) = {built.artifacts for built in asyncio.run(scenario())}

    assert {path.name for path in artifact.iterdir()} == {"toy.json", "weights.bin", "digests.json"}
    assert list((tmp_path / "cache" / "work").iterdir()) == []


def test_other_options_make_another_artifact(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(toy(3.0))

    async def scenario(options: BuildOptions) -> Path:
        cache = ArtifactCache(tmp_path / "cache", 1 << 30)
        cache.open()
        builder = Builder(Children(ROOMY, STAGES), cache, ToyBackend(), options)
        return (await builder.build(tmp_path / "model.onnx", "0" * 64, LiveModel("m", Registry()))).artifacts[0]

    assert asyncio.run(scenario(BuildOptions(8, "float32", 1))) != asyncio.run(scenario(BuildOptions(8, "float32", 2)))


def processes() -> dict[int, str]:
    """The command lines of all processes."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue  # the process has ended
    return found


def children_of(folder: Path) -> list[int]:
    """The processes that work on files of a test's folder."""
    return [pid for pid, command in processes().items() if str(folder) in command]


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def until(condition: Callable[[], bool]) -> None:
    """Wait at most a minute for the condition."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """The running descendants of this process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                if not Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].startswith(" Z"):
                    found += [child, *descendants(child)]
    return found
