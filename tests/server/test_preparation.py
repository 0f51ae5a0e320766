"""Where observations are prepared, and in whose turn."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pytest
from fake_policy import FakeEngine, Prepared

from relay import side_by_side
from relay.protocol.errors import ObservationError
from relay.protocol.images import Codec, encode_frame
from relay.protocol.messages import Observation, Options
from relay.server import preparation as preparation_module
from relay.server.preparation import TURN_S, Expired, Preparation, Ready

MAIN = threading.current_thread().name
FRAME = np.zeros((224, 224, 3), np.uint8)


class CountedEngine(FakeEngine):
    """Notes in which thread it prepares what; `busy` in the observation is how many seconds that takes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def prepare(self, observation: Observation, options: Options) -> Prepared:
        name = threading.current_thread().name
        self.seen.append((str(observation.get("name", "")), "here" if name == MAIN else name))
        if name != MAIN:
            assert self.gate.wait(5)
        end = perf_counter() + float(observation.get("busy", 0.0))
        while perf_counter() < end:
            pass
        return super().prepare({"state": np.zeros(3), **observation}, options)

    @property
    def places(self) -> list[str]:
        return ["here" if place == "here" else "thread" for _, place in self.seen]


@asynccontextmanager
async def preparing(threads: int = 1) -> AsyncIterator[Preparation]:
    preparation = Preparation(threads)
    try:
        yield preparation
    finally:
        preparation.close()


async def prepare(
    preparation: Preparation,
    engine: CountedEngine,
    client: Hashable = 0,
    *,
    deadline: float = math.inf,
    idle: bool = True,
    alone: bool = True,
    **observation: Any,
) -> Ready:
    return await preparation.prepare(
        engine, observation, Options(), client=client, deadline=deadline, idle_device=idle, alone=alone
    )


async def prepare_until_here(preparation: Preparation, engine: CountedEngine, **request: Any) -> None:
    """Again and again: on a busy machine, what is cheap may seem dear at first."""
    for _ in range(200):
        await prepare(preparation, engine, **request)
        if engine.places[-1] == "here":
            return
    raise AssertionError("always in a thread")


async def test_what_has_proved_cheap_is_prepared_in_place():
    engine = CountedEngine()
    async with preparing() as preparation:
        await prepare_until_here(preparation, engine, idle=False)
    assert engine.places[0] == "thread"


@pytest.mark.parametrize("alone", [True, False])
async def test_an_observation_has_the_other_cores_only_while_no_other_request_is_there(
    alone: bool, monkeypatch: pytest.MonkeyPatch
):
    helpers = side_by_side._Helpers()  # pyright: ignore[reportPrivateUsage]
    helpers.count = 1
    monkeypatch.setattr(side_by_side, "_helpers", helpers)
    threads: set[str] = set()

    class TwoCameras(FakeEngine):
        def prepare(self, observation: Observation, options: Options) -> Prepared:
            side_by_side.side_by_side(decode, range(2))
            return super().prepare({"state": np.zeros(3)}, options)

    def decode(camera: int) -> None:
        threads.add(threading.current_thread().name)
        sleep(0.05)

    async with preparing() as preparation:
        await preparation.prepare(
            TwoCameras(), {}, Options(), client=0, deadline=math.inf, idle_device=True, alone=alone
        )

    assert ("relay-side-by-side" in threads) is alone


async def test_what_takes_most_of_a_millisecond_is_prepared_in_place_for_an_idle_device_only():
    engine = CountedEngine()
    async with preparing() as preparation:
        preparation._seconds[(9, 0, 0)] = 0.000_8  # pyright: ignore[reportPrivateUsage]
        for idle in (True, False):
            await prepare(preparation, engine, idle=idle, prompt="lift")
    assert engine.places == ["here", "thread"]


async def test_what_takes_long_is_always_prepared_in_threads():
    engine = CountedEngine()
    async with preparing() as preparation:
        for _ in range(4):
            await prepare(preparation, engine, busy=0.01)
    assert engine.places == ["thread"] * 4


async def test_one_slow_preparation_sends_the_next_of_its_kind_to_the_threads():
    engine = CountedEngine()
    async with preparing() as preparation:
        await prepare_until_here(preparation, engine)
        for busy in (0.02, 0.0):
            await prepare(preparation, engine, busy=busy)
    assert engine.places[-1] == "thread"


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((2048, 2048, 3), np.uint8),
        encode_frame(np.zeros((1024, 1024, 3), np.uint8), Codec.JPEG_Q90),
        encode_frame(np.zeros((1024, 1024, 3), np.uint8), Codec.LOSSLESS),
        [encode_frame(np.zeros((640, 640, 3), np.uint8), Codec.JPEG_Q50)] * 2,
    ],
    ids=["array", "jpeg", "webp", "two"],
)
async def test_big_frames_are_never_prepared_in_place(image: Any):
    engine = CountedEngine()
    async with preparing() as preparation:
        for _ in range(3):
            await prepare(preparation, engine, image=image)
    assert engine.places == ["thread"] * 3


async def test_camera_frames_are_prepared_in_place_once_they_have_proved_cheap():
    frames = {name: encode_frame(FRAME, Codec.JPEG_Q90) for name in ("front", "wrist")}
    engine = CountedEngine()
    async with preparing() as preparation:
        await prepare_until_here(preparation, engine, image=frames)
    assert engine.places[0] == "thread"


async def test_larger_frames_do_not_pass_for_cheap_because_smaller_ones_were():
    engine = CountedEngine()
    async with preparing() as preparation:
        await prepare_until_here(preparation, engine, image=encode_frame(FRAME[:64, :64], Codec.JPEG_Q90))
        await prepare(preparation, engine, image=encode_frame(FRAME, Codec.JPEG_Q90))
    assert engine.places[-1] == "thread"


@pytest.mark.parametrize("image", [b"\xff\xd8\xff\xc2 progressive", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n"])
async def test_images_that_are_not_told_at_a_glance_are_left_to_the_threads(image: bytes):
    engine = CountedEngine()
    async with preparing() as preparation:
        for _ in range(2):
            await prepare(preparation, engine, image=image)
    assert engine.places == ["thread"] * 2


async def test_a_large_frame_does_not_pass_for_a_small_one_by_a_comment():
    lie = b"\xff\xc0\x00\x11\x08\x00\x40\x00\x40\x03"  # begins as the frame header of 64x64 pixels
    small, large = (
        encode_frame(frame, Codec.JPEG_Q50) for frame in (FRAME[:64, :64], np.zeros((2048, 2048, 3), np.uint8))
    )
    engine = CountedEngine()
    async with preparing() as preparation:
        await prepare_until_here(preparation, engine, image=small)
        await prepare(preparation, engine, image=large[:2] + b"\xff\xfe\x00\x0c" + lie + large[2:])
    assert engine.places[-1] == "thread"


async def test_what_is_refused_does_not_prove_its_kind_cheap():
    engine = FailingEngine()
    async with preparing() as preparation:
        for _ in range(50):
            with pytest.raises(ObservationError):
                await prepare(preparation, engine, name="fail")
        await prepare(preparation, engine, name="good")
    assert set(engine.places) == {"thread"}


async def test_an_observation_of_very_many_values_is_left_to_the_threads():
    engine = CountedEngine()
    async with preparing() as preparation:
        await prepare_until_here(preparation, engine)
        await prepare(preparation, engine, more=[[[0] * 100] * 10])
    assert engine.places[-1] == "thread"


async def test_one_turn_of_the_loop_prepares_only_so_much_in_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Preparation, "_learn", lambda *of_a_busy_machine: None)
    engine = CountedEngine()
    async with preparing() as preparation:
        preparation._seconds[(0, 0, 0)] = 0.000_1  # pyright: ignore[reportPrivateUsage]
        many = [asyncio.create_task(prepare(preparation, engine, client, busy=TURN_S / 3)) for client in range(8)]
        await asyncio.gather(*many)
    assert engine.places[0] == "here"
    assert engine.places.count("here") <= 3


async def test_the_next_turn_of_the_loop_prepares_in_place_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Preparation, "_learn", lambda *of_a_busy_machine: None)
    engine = CountedEngine()
    async with preparing() as preparation:
        preparation._seconds[(0, 0, 0)] = 0.000_1  # pyright: ignore[reportPrivateUsage]
        for _ in range(8):
            await prepare(preparation, engine, busy=TURN_S / 3)
            await asyncio.sleep(0)
    assert engine.places == ["here"] * 8


async def test_a_kind_that_was_slow_once_has_to_be_quick_several_times():
    engine = CountedEngine()
    async with preparing() as preparation:
        for busy in (0.02, 0.0, 0.0, 0.0):
            await prepare(preparation, engine, busy=busy)
    assert engine.places == ["thread"] * 4


async def test_an_engine_that_waits_does_not_pass_for_cheap():
    class WaitingEngine(CountedEngine):
        def prepare(self, observation: Observation, options: Options) -> Prepared:
            sleep(0.02)  # takes no time of the processor
            return super().prepare(observation, options)

    engine = WaitingEngine()
    async with preparing() as preparation:
        for _ in range(3):
            await prepare(preparation, engine)
    assert engine.places == ["thread"] * 3


async def test_as_many_are_prepared_at_once_as_there_are_threads():
    engine = CountedEngine()
    async with preparing(threads=2) as preparation:
        engine.gate.clear()
        tasks = [asyncio.create_task(prepare(preparation, engine, client)) for client in range(3)]
        end = perf_counter() + 5
        while len(engine.seen) < 2 and perf_counter() < end:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        begun = len(engine.seen)
        engine.gate.set()
        await asyncio.gather(*tasks)
    assert begun == 2


async def test_a_request_does_not_pass_one_that_a_thread_prepares():
    engine = CountedEngine()
    async with preparing() as preparation:
        await prepare(preparation, engine)
        engine.gate.clear()
        slow = asyncio.create_task(prepare(preparation, engine, prompt="an unknown kind"))
        await asyncio.sleep(0.01)
        quick = asyncio.create_task(prepare(preparation, engine))
        await asyncio.sleep(0.01)
        assert not quick.done()
        engine.gate.set()
        await asyncio.gather(slow, quick)
    assert engine.places == ["thread"] * 3


async def in_line(preparation: Preparation, engine: CountedEngine, *requests: dict[str, Any]) -> list[Any]:
    """Submit while the one thread is taken, then let all run; their outcomes."""
    engine.gate.clear()
    first = asyncio.create_task(prepare(preparation, engine, "first", name="first", busy=0.005))
    await asyncio.sleep(0.01)
    tasks = [asyncio.create_task(prepare(preparation, engine, **request)) for request in requests]
    await asyncio.sleep(0.05)
    engine.gate.set()
    return (await asyncio.gather(first, *tasks, return_exceptions=True))[1:]


async def test_clients_take_turns_at_the_threads():
    engine = CountedEngine()
    async with preparing() as preparation:
        greedy = [{"client": "greedy", "name": f"greedy {number}"} for number in range(3)]
        await in_line(preparation, engine, *greedy, {"client": "patient", "name": "patient"})
    assert [name for name, _ in engine.seen] == ["first", "greedy 0", "patient", "greedy 1", "greedy 2"]


async def test_the_tightest_deadline_is_prepared_first():
    engine = CountedEngine()
    async with preparing() as preparation:
        now = perf_counter()
        requests = [{"client": name, "name": name, "deadline": now + left} for name, left in (("late", 9), ("soon", 5))]
        await in_line(preparation, engine, *requests)
    assert [name for name, _ in engine.seen] == ["first", "soon", "late"]


async def test_what_expires_in_line_is_not_prepared():
    engine = CountedEngine()
    async with preparing() as preparation:
        expired, other = await in_line(
            preparation, engine, {"client": "x", "deadline": perf_counter() + 0.02}, {"client": "y", "name": "y"}
        )
    assert isinstance(expired, Expired)
    assert isinstance(other, Ready)
    assert [name for name, _ in engine.seen] == ["first", "y"]


async def test_who_gives_up_leaves_the_line():
    engine = CountedEngine()
    async with preparing() as preparation:
        engine.gate.clear()
        first = asyncio.create_task(prepare(preparation, engine, "first"))
        await asyncio.sleep(0.01)
        gone = asyncio.create_task(prepare(preparation, engine, "gone", name="gone"))
        await asyncio.sleep(0.01)
        gone.cancel()
        engine.gate.set()
        await first
        await prepare(preparation, engine, "after", name="after")
    assert [name for name, _ in engine.seen] == ["", "after"]


async def test_errors_are_the_same_in_place_and_in_a_thread():
    engine = FailingEngine()
    places: set[str] = set()
    async with preparing() as preparation:
        while places != {"here", "thread"}:
            with pytest.raises(ObservationError, match="no such state"):
                await prepare(preparation, engine, name="fail")
            places.add(engine.places[-1])
            await prepare(preparation, engine, name="good")


class FailingEngine(CountedEngine):
    """Refuses what is called so; other names of equal length are of the same kind."""

    def prepare(self, observation: Observation, options: Options) -> Prepared:
        prepared = super().prepare(observation, options)
        if observation.get("name") == "fail":
            raise ObservationError("no such state")
        return prepared


async def test_what_still_waits_is_cancelled_on_closing():
    engine = CountedEngine()
    async with preparing() as preparation:
        engine.gate.clear()
        running = asyncio.create_task(prepare(preparation, engine, "running"))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(prepare(preparation, engine, "waiting"))
        await asyncio.sleep(0.01)
        preparation.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        engine.gate.set()
        await running


async def test_kinds_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preparation_module, "REMEMBERED_KINDS", 4)
    engine = CountedEngine()
    async with preparing() as preparation:
        for size in range(12):
            await prepare(preparation, engine, prompt="x" * 2**size)
        assert len(preparation._seconds) <= 4  # pyright: ignore[reportPrivateUsage]
