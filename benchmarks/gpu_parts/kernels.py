"""Small trials that say which kernels to use: ways to attend, and decoders of JPEG."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_parts.networks import Case
from gpu_parts.times import seconds, synchronize
from relay.engine import decode
from relay.models.pi0.config import Pi0Config
from relay.models.pi0.gemma import key_bias
from relay.protocol.images import decode_frame


@torch.inference_mode()
def attention(config: Pi0Config, case: Case, device: torch.device, rounds: int) -> Mapping[str, float]:
    """Microseconds of one layer's attention, in the prefix and in a step: with a bias, without, and written out."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    prefix = case.cameras * config.vision.tokens + (case.prompt + 15) // 16 * 16
    everything = prefix + case.horizon
    valid = torch.ones(1, prefix, dtype=torch.bool, device=device)
    valid[:, -3:] = False
    result: dict[str, float] = {}
    for place, tokens, keys in (("prefix", prefix, prefix), ("step", case.horizon, everything)):
        q = torch.randn(1, 1, tokens * config.heads, config.head_dim, dtype=dtype, device=device)
        k, v = torch.randn(2, 1, 1, keys, config.head_dim, dtype=dtype, device=device).unbind(0)
        bias = key_bias(valid, keys - prefix, dtype)
        spread = q.view(1, tokens, config.heads, config.head_dim).transpose(1, 2)  # one key-value head for all of them
        ways: dict[str, Callable[[], Tensor]] = {
            "folded, bias": lambda q=q, k=k, v=v, b=bias: F.scaled_dot_product_attention(q, k, v, attn_mask=b),
            "folded, no bias": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
            "by head, no bias": lambda q=spread, k=k, v=v: F.scaled_dot_product_attention(
                q, k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)
            ),
            "written out, bias": lambda q=q, k=k, v=v, b=bias: _written_out(q, k, v, b),
        }
        for name, way in ways.items():
            result[f"{place}: {name}"] = 1e6 * _each(way, device, rounds)
    return result


def _written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Logits and softmax in float32, as two products."""
    logits = torch.matmul(q.float() * q.shape[-1] ** -0.5, k.float().transpose(-1, -2)) + bias
    return torch.matmul(logits.softmax(-1).to(v.dtype), v)


def _each(work: Callable[[], object], device: torch.device, rounds: int, times: int = 20) -> float:
    def run() -> None:
        for _ in range(times):
            work()
        synchronize(device)

    if device.type == "cuda":  # as a graph, so that launching does not count
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                work()

        def run() -> None:
            graph.replay()
            synchronize(device)

    run()
    return statistics.median(seconds(run) for _ in range(rounds)) / times


def jpeg(device: torch.device, rounds: int) -> Mapping[str, object]:
    """Milliseconds a frame on the CPU and on the GPU, by size, and how the GPU's pixels differ."""
    gpu = decode.installed(device)
    result: dict[str, object] = {
        "gpu": "no GPU, or neither torchvision nor nvidia-nvimgcodec" if gpu is None else "yes"
    }
    for width, height in decode.TRIAL_SIZES:
        data = decode.trial((width, height))[0]
        cpu_ms = 1e3 * statistics.median(seconds(lambda d=data: decode_frame(d, "trial")) for _ in range(rounds))
        result[f"{width}x{height}: cpu_ms"] = cpu_ms
        if gpu is not None:
            gpu(data)
            gpu_ms = 1e3 * statistics.median(seconds(lambda d=data: gpu(d)) for _ in range(rounds))
            result[f"{width}x{height}: gpu_ms"] = gpu_ms
    if gpu is not None:
        largest, share = decode.pixel_difference(decode.gpu_decoder(gpu))
        result["largest_difference"], result["share_that_differs"] = largest, share
        chosen, _ = decode.choose_decoder("auto", device)
        result["auto_takes"] = "cpu" if chosen is decode_frame else "gpu"
    return result
