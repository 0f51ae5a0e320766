"""Adapters over a real socket: each robot gets its own, in shared batches, while folders come and go."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_policy import running
from folders import write_relay
from lora import EXPERT, EXPERT_ATTENTION, LANGUAGE, merged_by_hand, random_factors, write_peft
from numpy.typing import NDArray
from tiny import golden, golden_inputs, image, load_tiny

import relay
from relay.cli.local_server import LocalServer
from relay.engine.adapter_folders import AdapterChoice
from relay.models import registry
from relay.models.pi0.config import CAMERAS
from relay.server.app import Server

PREFIX = [f"{LANGUAGE}{layer}.mlp.{part}_proj" for layer in (0, 1) for part in ("gate", "down")]
FACTORS = {
    "fold": random_factors("pi05", EXPERT_ATTENTION, seed=1),
    "pour": random_factors("pi05", [*EXPERT_ATTENTION, "action_in_proj", *PREFIX], seed=2),
    "stack": random_factors("pi05", ["time_mlp_in", f"{EXPERT}0.mlp.up_proj", "action_out_proj"], seed=3),
}


def observation(row: int = 0, **options: Any) -> dict[str, Any]:
    gold = golden("pi05")
    return {
        "image": {camera: image(row, i) for i, camera in enumerate(CAMERAS) if gold[f"mask_{camera}"][row]},
        "state": gold["state"][row],
        "tokenized_prompt": gold["tokens"][row],
        "tokenized_prompt_mask": gold["token_mask"][row],
        "noise": gold["noise"][row],
        **options,
    }


def root(tmp_path: Path, *names: str) -> Path:
    """A folder with these adapters."""
    folder = tmp_path / "adapters"
    folder.mkdir(exist_ok=True)
    for name in names:
        write_peft(folder / name, FACTORS[name])
    return folder


def load(tmp_path: Path, choice: AdapterChoice | None = None, max_batch: int = 2) -> Any:
    checkpoint = write_relay(tmp_path / "checkpoint", "pi05", num_steps=3)
    choice = choice or AdapterChoice()
    return registry.load(
        "pi05", checkpoint=checkpoint, dtype="float32", device="cpu", max_batch=max_batch, adapters=choice
    )


@asynccontextmanager
async def serving(tmp_path: Path, choice: AdapterChoice, max_batch: int = 2) -> AsyncIterator[Server]:
    async with running(load(tmp_path, choice, max_batch)) as server:
        await server.ready()
        yield server


def client(server: Server) -> relay.AsyncPolicy:
    return relay.AsyncPolicy(f"ws://127.0.0.1:{server.port}", relay.Codec.RAW)


async def ask(policy: relay.AsyncPolicy, *args: Any, **options: Any) -> NDArray[np.float32]:
    return (await policy.infer(observation(*args, **options)))["actions"]


@cache
def merged_actions(name: str | None, row: int) -> NDArray[np.float32]:
    """What a server answers whose checkpoint has an adapter's changes in its weights, worked out by hand."""
    model = load_tiny(merged_by_hand("pi05", FACTORS[name] if name else {}))
    return model.sample_actions(golden_inputs("pi05", (row,), 3))[0].numpy()


def distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.abs(a - b).max() / b.std())


async def test_eight_robots_with_three_adapters_and_none_get_their_own_actions(tmp_path: Path) -> None:
    wanted = [None, "fold", "pour", "stack", "fold", None, "stack", "pour"]
    async with serving(tmp_path, AdapterChoice(root=root(tmp_path, *FACTORS)), max_batch=8) as server:
        policies = [client(server) for _ in wanted]
        await asyncio.gather(*(policy.__aenter__() for policy in policies))
        answers = [
            await asyncio.gather(
                *(
                    ask(policy, number % 2, **({} if name is None else {"adapter_dir": name}))
                    for number, (policy, name) in enumerate(zip(policies, wanted, strict=True))
                )
            )
            for _ in range(2)
        ]
        await asyncio.gather(*(policy.close() for policy in policies))
    for number, name in enumerate(wanted):
        for answer in answers:
            assert distance(answer[number], merged_actions(name, number % 2)) <= 1e-4, name
            for other in {None, *FACTORS} - {name}:
                assert distance(answer[number], merged_actions(other, number % 2)) > 1e-3


async def test_an_unknown_adapter_is_refused_with_those_held_and_the_connection_lives_on(tmp_path: Path) -> None:
    async with serving(tmp_path, AdapterChoice(root=root(tmp_path, "fold", "pour"))) as server:
        async with client(server) as policy:
            with pytest.raises(
                Exception, match="adapter 'fodl' is not loaded; this server holds: fold, pour; did you mean 'fold'"
            ):
                await ask(policy, adapter_dir="fodl")
        async with client(server) as policy:
            assert (await ask(policy, adapter_dir="fold")).shape == (10, 32)


HOSTILE = [
    "../x",
    "/etc/passwd",
    "a/../../b",
    "org/repo",
    "https://example.com/adapter",
    "x" * 10_000,
    "..",
    ".",
    "",
    "fold\0",
    "fold\n",
    "linked",
]


@pytest.mark.parametrize("name", HOSTILE, ids=[repr(name[:30]) for name in HOSTILE])
async def test_a_name_that_is_a_path_opens_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root(tmp_path, "fold")
    (folder / "linked").symlink_to(write_peft(tmp_path / "outside", FACTORS["pour"]))
    async with serving(tmp_path, AdapterChoice(root=folder)) as server, client(server) as policy:
        opened = watch_files()
        with pytest.raises(Exception, match="adapter") as refusal:
            await ask(policy, adapter_dir=name)
        assert "this server holds" in str(refusal.value)
        assert len(str(refusal.value)) < 3_000
        assert not opened


def watch_files() -> list[str]:
    """Adapter files that are opened from now on."""
    opened: list[str] = []
    _WATCHING.append(opened)
    return opened


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _WATCHING and any(part in str(arguments[0]) for part in ("adapter", "outside", "passwd")):
        _WATCHING[-1].append(str(arguments[0]))


_WATCHING: list[list[str]] = []
sys.addaudithook(_audit)


async def test_a_default_adapter_serves_those_who_name_none_and_base_names_none(tmp_path: Path) -> None:
    choice = AdapterChoice(root=root(tmp_path, "fold"), default="fold")
    async with serving(tmp_path, choice) as server, client(server) as policy:
        default, named = await ask(policy), await ask(policy, adapter_dir="fold")
        base = await ask(policy, adapter_dir="base")
    assert distance(default, named) <= 1e-5
    assert distance(base, merged_actions(None, 0)) <= 1e-5
    assert distance(default, base) > 1e-3


async def test_a_merged_adapter_answers_as_the_same_one_beside_the_weights(tmp_path: Path) -> None:
    choice = AdapterChoice({"fold": root(tmp_path, "fold") / "fold"}, merged=True)
    async with serving(tmp_path, choice) as server, client(server) as policy:
        named, unnamed = await ask(policy, adapter_dir="fold"), await ask(policy)
        with pytest.raises(Exception, match="adapter 'base' cannot be had: this server has merged 'fold'"):
            await ask(policy, adapter_dir="base")
    assert named.tobytes() == unnamed.tobytes()
    assert distance(named, merged_actions("fold", 0)) <= 1e-5


async def test_without_adapters_the_server_says_that_it_holds_none(tmp_path: Path) -> None:
    async with serving(tmp_path, AdapterChoice()) as server:
        for name in ("fold", "base"):
            async with client(server) as policy:
                with pytest.raises(Exception, match=f"adapter '{name}' is not loaded; this server holds: none"):
                    await ask(policy, adapter_dir=name)


async def test_an_adapter_without_effect_is_noted_once(tmp_path: Path) -> None:
    zeros = {name: 0 * tensor for name, tensor in FACTORS["fold"].items()}
    choice = AdapterChoice({"fold": write_peft(tmp_path / "zero", zeros)})
    async with serving(tmp_path, choice) as server, client(server) as policy:
        replies = [await policy.infer(observation(1, adapter_dir="fold")) for _ in range(2)]
    assert [reply.get("notes") for reply in replies] == [["adapter fold has no effect: all its changes are zero"], None]


async def test_adapters_come_and_go_while_requests_run(tmp_path: Path) -> None:
    folder = root(tmp_path, "fold", "pour")
    async with (
        serving(tmp_path, AdapterChoice(root=folder)) as server,
        client(server) as robot,
        client(server) as other,
    ):
        before = await ask(robot, adapter_dir="fold")
        running_on = [asyncio.create_task(ask(robot, adapter_dir="fold")) for _ in range(4)]
        (folder / "pour").rename(tmp_path / "pour")
        root(tmp_path, "stack")
        await server.rescan_adapters()
        for answer in await asyncio.gather(*running_on):
            assert distance(answer, before) <= 1e-5
        assert distance(await ask(other, adapter_dir="stack"), merged_actions("stack", 0)) <= 1e-4
        with pytest.raises(Exception, match="adapter 'pour' is not loaded; this server holds: fold, stack"):
            await ask(other, adapter_dir="pour")


async def test_adapters_of_nan_are_not_loaded_and_the_server_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = root(tmp_path, "fold")
    async with serving(tmp_path, AdapterChoice(root=folder)) as server, client(server) as robot:
        before = await ask(robot, adapter_dir="fold")
        for name in ("fold", "pour"):
            factors = {module: factor.clone() for module, factor in FACTORS[name].items()}
            next(iter(factors.values()))[0, 0] = np.nan
            write_peft(folder / name, factors)
        await server.rescan_adapters()
        assert distance(await ask(robot, adapter_dir="fold"), before) <= 1e-5
        with pytest.raises(Exception, match="adapter 'pour' is not loaded; this server holds: fold"):
            await ask(robot, adapter_dir="pour")
    for name in ("fold", "pour"):
        assert re.search(rf"adapter {name} is not loaded anew: .*lora_A.weight in .*{name}/.*: 1 of ", caplog.text)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_sighup_looks_through_the_root_again(tmp_path: Path) -> None:
    checkpoint, folder = write_relay(tmp_path / "checkpoint", "pi05", num_steps=3), root(tmp_path, "fold")
    arguments = ["pi05", "--checkpoint", str(checkpoint), "--adapter-root", str(folder), "--max-batch", "1"]
    with LocalServer([*arguments, "--device", "cpu", "--dtype", "float32"]) as server:
        server.wait_until_ready(lambda phase: None)
        assert ask_once(server, "pour") is None
        root(tmp_path, "pour")
        server._process.send_signal(signal.SIGHUP)
        answer = None
        give_up = time.monotonic() + 30
        while answer is None and time.monotonic() < give_up:
            answer = ask_once(server, "pour")
    assert answer is not None
    assert distance(answer, merged_actions("pour", 0)) <= 1e-4


def ask_once(server: LocalServer, adapter: str) -> NDArray[np.float32] | None:
    """The actions with an adapter; None if it is not loaded."""
    with relay.Policy(server.url, relay.Codec.RAW) as policy:
        try:
            return policy.infer(observation(adapter_dir=adapter))["actions"]
        except RuntimeError as error:
            if "is not loaded; this server holds: fold" in str(error):
                return None
            raise


def test_a_damaged_adapter_ends_the_start_with_its_fault(tmp_path: Path) -> None:
    factors = {name: tensor[:2] if "lora_A" in name else tensor for name, tensor in FACTORS["fold"].items()}
    choice = AdapterChoice({"fold": write_peft(tmp_path / "bad", factors)})
    with pytest.raises(ValueError, match=r"the adapter in .*bad cannot be used:\n  wrong shape: lora_A of model\.pali"):
        load(tmp_path, choice)
