"""How many operations one request dispatches: what the host does, and a GPU is told, where nothing is captured.

Depths are the released model's and widths tiny; the observation is DROID's, two cameras of two frames each.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_groot import described, drawn_row, tiny_json
from torch.utils._python_dispatch import TorchDispatchMode

from relay.engine.adapters import Adapter, Pair
from relay.models.groot.adapters import GrootAdapter, pack
from relay.models.groot.assemble import assemble
from relay.models.groot.config import COSMOS_REASON2, RELEASED, read_config
from relay.models.groot.fixed_shapes import FixedShapes
from relay.models.groot.model import Groot
from relay.models.groot.resident import ResidentAdapters
from relay.models.groot.shapes import Pictures, Shape, ShapePlan
from relay.models.groot.transforms import GrootPrepared
from relay.models.groot.weights import checkpoint_shapes

LEROBOT, LEROBOT_COMPUTING = 10_521, 4_775
"""lerobot 0.6.1, counted by benchmarks/engine.py: all operations, and those that are not views."""

VIEWS = {"alias", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes"}
VIEWS |= {"squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def deep_model() -> Groot:
    config, backbone = copy.deepcopy(tiny_json()), copy.deepcopy(described()["backbone"])
    for section in ("diffusion_model_cfg", "vl_self_attention_cfg"):
        config[section]["num_layers"] = RELEASED[section]["num_layers"]
    for key in ("select_layer", "action_horizon", "max_seq_len"):
        config[key] = RELEASED[key]
    for key in ("depth", "deepstack_visual_indexes"):
        backbone["vision_config"][key] = COSMOS_REASON2["vision_config"][key]
    model = Groot(read_config(config, backbone), [2]).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.05)
    return model


def count(model: Groot, num_steps: int, adapter: GrootAdapter | None = None) -> Counter[str]:
    """As lerobot runs, under `no_grad`: inference mode would count composite operations as one."""
    row = drawn_row(1, [(8, 14)] * 4, words=11)
    inputs = assemble(model, [row], torch.randn(1, 40, model.config.max_action_dim), num_steps)
    resident = ResidentAdapters(model, lambda: (adapter,) if adapter else (), 2**30)
    model, inputs = resident.apply(inputs, [adapter], [4])
    model.sample_actions(inputs)  # tables are made
    with torch.no_grad(), Counting() as counting:
        Groot.sample_actions.__wrapped__(model, inputs)  # pyright: ignore
    return counting.counts


def computing(counts: Counter[str]) -> int:
    return sum(times for name, times in counts.items() if name not in VIEWS)


def test_a_request_dispatches_less_than_half_of_lerobots_operations() -> None:
    model = deep_model()
    counts = count(model, 4)
    assert 2000 < sum(counts.values()) <= 3_100 < 0.5 * LEROBOT
    assert 1000 < computing(counts) <= 2_200 < 0.5 * LEROBOT_COMPUTING
    another_step = sum(count(model, 5).values()) - sum(counts.values())
    assert another_step <= 32 * 15 + 10  # of a step's operations all but ten are in its 32 blocks


def test_an_adapter_costs_two_operations_for_each_layer_that_it_changes() -> None:
    model, rank = deep_model(), 4
    shapes = checkpoint_shapes(model.config)
    names = [name for name in shapes if name.endswith(("attn1.to_q.weight", "attn1.to_v.weight")) and ".model." in name]
    pairs = {name: Pair(torch.randn(rank, shapes[name][1]), torch.randn(shapes[name][0], rank)) for name in names}
    adapter = pack(Adapter(pairs, {}), model)
    without, with_adapter = count(model, 4), count(model, 4, adapter)
    assert with_adapter["mm"] - without["mm"] == with_adapter["addmm_"] - without["addmm_"] == 4 * 32 + 16
    assert computing(with_adapter) - computing(without) == 2 * (4 * 32 + 16)
    assert sum(with_adapter.values()) - sum(without.values()) == 2 * (4 * 32 + 16) + 16  # views of the packed values


def replayed(*, whole: bool) -> tuple[Counter[str], Counter[str]]:
    """What a prepared request dispatches beside replays, and these; its images of a prepared size or not."""
    model, replays, shape = deep_model(), Counter[str](), Shape(text=32, images=448, rows=1)
    pictures = {shape.images: Pictures(4, 256, 448)} if whole else {}
    fixed = FixedShapes(model, 2, ShapePlan((shape.text,), (shape.images,), (shape.rows,), pictures), capture=False)
    request = [GrootPrepared(drawn_row(1, [(8, 14)] * 4, words=11), raw_state={})]
    noise = torch.randn(1, 40, model.config.max_action_dim)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:  # as in `count`
        for method in ("prepare", "sample", "look", "denoise"):
            patch.setattr(FixedShapes, method, getattr(FixedShapes, method).__wrapped__)
        fixed.prepare(lambda phase, share: None)
        fixed.sample(request, noise, 4)  # tables are made
        fixed.graphs.replay = lambda key: replays.update([key[0]])  # pyright: ignore  # all that a GPU is told of it
        with Counting() as counting:
            assert fixed.sample(request, noise, 4) is not None
    return counting.counts, replays


def test_a_prepared_request_is_a_copy_to_the_device_five_replays_and_little_between_them() -> None:
    counts, replays = replayed(whole=True)
    assert replays == {"look": 1, "step": 4}
    assert computing(counts) <= 8  # the inputs, the noise and the step's size; the time of each step; the actions
    assert sum(counts.values()) <= 25


def test_with_images_of_other_sizes_what_is_before_the_steps_is_left_beside_their_replays() -> None:
    counts, replays = replayed(whole=False)
    whole = count(deep_model(), 4)
    assert replays == {"step": 4}
    assert 1_000 < sum(counts.values()) <= 1_200 < 0.4 * sum(whole.values())
    assert 800 < computing(counts) <= 900 < 0.45 * computing(whole)


def test_a_prepared_part_takes_nothing_from_the_cpu_and_never_waits() -> None:
    """What a CUDA graph cannot hold: new tensors of Python's numbers, and results that Python looks at."""
    plan = ShapePlan((32,), (24,), (2,), {24: Pictures(2, 96, 128)})
    fixed = FixedShapes(deep_model(), 2, plan, capture=False)
    with torch.no_grad():
        FixedShapes.prepare.__wrapped__(fixed, lambda phase, share: None)  # pyright: ignore
        for part in ("look", "step"):
            with Counting() as counting:
                fixed.graphs.replay((part, plan.largest))
            assert counting.counts["addmm"] >= 100
            assert not {"lift_fresh", "_local_scalar_dense", "nonzero", "is_nonzero"} & counting.counts.keys()
