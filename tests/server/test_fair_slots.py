"""Places are shared fairly between parties, however many each asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from lathe.server.errors import Overloaded
from lathe.server.fair_slots import SERVER_ITSELF, FairSlots


class World:
    """Places, and tasks that hold them until their `stop` event is set."""

    def __init__(self, places: int, waiting: int = 64) -> None:
        self.places = FairSlots(places, waiting, "models")
        self.began: list[str] = []
        self.stop: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, *names: str) -> None:
        """Start tasks: `ann1` is the first task of ann, `1` is a task of the server itself."""
        for name in names:
            self.stop[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._work(name))
            await asyncio.sleep(0)

    async def _work(self, name: str) -> None:
        async with self.places.place(name.rstrip("0123456789")):
            self.began.append(name)
            await self.stop[name].wait()

    async def end(self, *names: str) -> None:
        for name in names:
            self.stop[name].set()
            await self.tasks[name]
        await asyncio.sleep(0.01)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 10))


def test_parties_take_turns() -> None:
    async def scenario() -> None:
        world = World(1)
        await world.start("ann1", "ann2", "ann3", "ann4", "bob1", "eve1", "bob2", "1")
        for turn in range(8):
            await world.end(world.began[turn])
        assert world.began == ["ann1", "ann2", "bob1", "eve1", "1", "ann3", "bob2", "ann4"]

    run(scenario())


def test_one_party_never_has_all_places_but_the_server_may() -> None:
    async def scenario() -> None:
        world = World(2)
        await world.start("ann1", "ann2", "bob1")
        assert world.began == ["ann1", "bob1"]
        await world.end("bob1")
        assert world.began == ["ann1", "bob1"]
        await world.end("ann1", "ann2")
        await world.start("1", "2")
        assert world.began[-2:] == ["1", "2"]
        await world.end("1", "2")

    run(scenario())


def test_the_number_of_waiting_works_is_bounded_but_for_the_server() -> None:
    async def scenario() -> None:
        world = World(1, waiting=4)
        await world.start(*(str(number) for number in range(100)))
        await world.start("ann1", "ann2")
        with pytest.raises(Overloaded, match="models: 2 of yours are waiting"):
            async with world.places.place("ann"):
                pass
        await world.start("bob1", "bob2")
        with pytest.raises(Overloaded, match="models: 4 are waiting"):
            async with world.places.place("eve"):
                pass
        for event in world.stop.values():
            event.set()
        await asyncio.gather(*world.tasks.values())
        assert len(world.began) == 104

    run(scenario())


@pytest.mark.parametrize("turns", range(6))
def test_cancelled_work_frees_its_place(turns: int) -> None:
    """Cancelled while it waits, when its turn comes, or while it works."""

    async def scenario() -> None:
        world = World(1)
        await world.start("ann1", "bob1", "eve1")
        world.stop["ann1"].set()
        for _ in range(turns):
            await asyncio.sleep(0)
        world.tasks["bob1"].cancel()
        await asyncio.gather(world.tasks["bob1"], return_exceptions=True)
        await world.end("eve1")
        assert world.began[-1] == "eve1"
        async with world.places.place(SERVER_ITSELF):
            pass

    run(scenario())
