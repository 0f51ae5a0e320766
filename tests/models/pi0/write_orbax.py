"""Write a safetensors file of openpi-PyTorch names as the JAX checkpoint that openpi would have written.

    python write_orbax.py WEIGHTS.safetensors FOLDER [--heads 8] [--vision-heads 2] [--dtype float32]
                          [--value] [--no-ocdbt] [--zarr3] [--chunk-bytes N]
                          [--add NAME] [--leaves LEAVES.safetensors]

Runs where orbax-checkpoint is installed (`make references`) and knows nothing of `relay`: the layouts are written out
here once more, in the other direction and in NumPy, so that the reader is checked by something else than itself.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from safetensors import safe_open

TOWERS = {
    "paligemma_with_expert.paligemma.model.language_model.": "",
    "paligemma_with_expert.gemma_expert.model.": "_1",
}
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vision-heads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--value", action="store_true", help="wrap every leaf as training checkpoints do")
    parser.add_argument("--no-ocdbt", action="store_true", help="a folder per array, as older releases did")
    parser.add_argument("--zarr3", action="store_true")
    parser.add_argument("--chunk-bytes", type=int, help="cut arrays into chunks of at most this size")
    parser.add_argument("--add", help="a further leaf of zeros under this name")
    parser.add_argument("--leaves", type=Path, help="a safetensors file of further leaves under their JAX names")
    options = parser.parse_args()

    with safe_open(options.weights, "flax") as file:
        tensors = {name: np.asarray(file.get_tensor(name)).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    leaves = to_jax(tensors, options.heads, options.vision_heads)
    if options.add:
        leaves[options.add] = np.zeros((1, 2), np.float32)
    if options.leaves:
        with safe_open(options.leaves, "numpy") as file:
            leaves |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    dtype = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[options.dtype]
    tree: dict = {}
    for name, leaf in leaves.items():
        *parents, last = [*name.split("/"), *(["value"] if options.value else [])]
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.numpy.asarray(leaf.astype(dtype))
    save_args = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=options.chunk_bytes), tree)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=not options.no_ocdbt, use_zarr3=options.zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(
            options.folder.resolve(), ocp.args.PyTreeSave({"params": tree}, save_args={"params": save_args})
        )


def to_jax(tensors: dict[str, np.ndarray], heads: int, vision_heads: int) -> dict[str, np.ndarray]:
    """openpi's JAX names and layouts."""
    leaves: dict[str, np.ndarray] = {}

    def stack(pattern: str) -> np.ndarray | None:
        """The tensors of all layers, on a new axis 0."""
        found = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
            if match:
                found[int(match[1])] = tensor
        return np.stack([found[i] for i in range(len(found))]) if found else None

    image = "PaliGemma/img/"
    conv = tensors[VISION + "embeddings.patch_embedding.weight"]  # (D, 3, rows, columns)
    leaves[image + "embedding/kernel"] = np.einsum("dcyx->yxcd", conv)
    leaves[image + "embedding/bias"] = tensors[VISION + "embeddings.patch_embedding.bias"]
    leaves[image + "pos_embedding"] = tensors[VISION + "embeddings.position_embedding.weight"][np.newaxis]
    block, layer = image + "Transformer/encoderblock/", VISION + "encoder.layers.*."
    for i in (0, 1):
        leaves[f"{block}LayerNorm_{i}/scale"] = stack(f"{layer}layer_norm{i + 1}.weight")
        leaves[f"{block}LayerNorm_{i}/bias"] = stack(f"{layer}layer_norm{i + 1}.bias")
        leaves[f"{block}MlpBlock_0/Dense_{i}/kernel"] = np.einsum("loi->lio", stack(f"{layer}mlp.fc{i + 1}.weight"))
        leaves[f"{block}MlpBlock_0/Dense_{i}/bias"] = stack(f"{layer}mlp.fc{i + 1}.bias")
    attention = block + "MultiHeadDotProductAttention_0/"
    for jax_name, name in (("query", "q"), ("key", "k"), ("value", "v")):
        weight, bias = stack(f"{layer}self_attn.{name}_proj.weight"), stack(f"{layer}self_attn.{name}_proj.bias")
        depth, _, width = weight.shape
        by_head = weight.reshape(depth, vision_heads, -1, width)  # (layers, N, H, D)
        leaves[f"{attention}{jax_name}/kernel"] = np.einsum("lnhd->ldnh", by_head)
        leaves[f"{attention}{jax_name}/bias"] = bias.reshape(depth, vision_heads, -1)
    out = stack(layer + "self_attn.out_proj.weight")  # (layers, D, N * H)
    leaves[attention + "out/kernel"] = np.einsum("ldnh->lnhd", out.reshape(*out.shape[:2], vision_heads, -1))
    leaves[attention + "out/bias"] = stack(layer + "self_attn.out_proj.bias")
    leaves[image + "Transformer/encoder_norm/scale"] = tensors[VISION + "post_layernorm.weight"]
    leaves[image + "Transformer/encoder_norm/bias"] = tensors[VISION + "post_layernorm.bias"]
    projector = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear."
    leaves[image + "head/kernel"] = np.einsum("oi->io", tensors[projector + "weight"])
    leaves[image + "head/bias"] = tensors[projector + "bias"]

    llm = "PaliGemma/llm/"
    leaves[llm + "embedder/input_embedding"] = tensors[next(iter(TOWERS)) + "embed_tokens.weight"]
    for tower, suffix in TOWERS.items():
        layer, layers = tower + "layers.*.", llm + "layers/"
        q = stack(layer + "self_attn.q_proj.weight")  # (layers, N * H, D)
        depth, _, width = q.shape
        leaves[f"{layers}attn/q_einsum{suffix}/w"] = np.einsum("lnhd->lndh", q.reshape(depth, heads, -1, width))
        k, v = stack(layer + "self_attn.k_proj.weight"), stack(layer + "self_attn.v_proj.weight")
        kv = np.einsum("jlhd->ljdh", np.stack([k, v]))  # (layers, 2, D, H)
        leaves[f"{layers}attn/kv_einsum{suffix}/w"] = kv[:, :, np.newaxis]
        o = stack(layer + "self_attn.o_proj.weight")  # (layers, D, N * H)
        by_head = o.reshape(depth, width, heads, -1)
        leaves[f"{layers}attn/attn_vec_einsum{suffix}/w"] = np.einsum("ldnh->lnhd", by_head)
        gate, up = stack(layer + "mlp.gate_proj.weight"), stack(layer + "mlp.up_proj.weight")
        leaves[f"{layers}mlp{suffix}/gating_einsum"] = np.einsum("jlfd->ljdf", np.stack([gate, up]))
        leaves[f"{layers}mlp{suffix}/linear"] = np.einsum("ldf->lfd", stack(layer + "mlp.down_proj.weight"))
        norms = {
            f"{layers}pre_attention_norm{suffix}/": layer + "input_layernorm.",
            f"{layers}pre_ffw_norm{suffix}/": layer + "post_attention_layernorm.",
            f"{llm}final_norm{suffix}/": tower + "norm.",
        }
        for theirs, ours in norms.items():
            find = stack if "*" in ours else tensors.get
            if find(ours + "weight") is not None:
                leaves[theirs + "scale"] = find(ours + "weight")
            else:
                leaves[theirs + "Dense_0/kernel"] = np.einsum("...oi->...io", find(ours + "dense.weight"))
                leaves[theirs + "Dense_0/bias"] = find(ours + "dense.bias")
    for name in sorted({name.split(".")[0] for name in tensors if name.count(".") == 1}):
        leaves[name + "/kernel"] = np.einsum("oi->io", tensors[name + ".weight"])
        leaves[name + "/bias"] = tensors[name + ".bias"]
    return leaves


if __name__ == "__main__":
    main()
