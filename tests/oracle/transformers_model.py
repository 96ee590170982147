"""transformers as the oracle: load a checkpoint folder, run prompts and greedy steps, in float32 or float64.

Its plain torch code is what runs: eager attention, eager experts, the chunked gated delta rule for prompts and the
recurrent one for single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoConfig, DynamicCache, PreTrainedModel, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal model of a checkpoint folder, flat or nested, in evaluation mode."""
    nested = AutoConfig.from_pretrained(folder).model_type == "qwen3_5_moe"
    kind = Qwen3_5MoeForConditionalGeneration if nested else Qwen3_5MoeForCausalLM
    model, info = kind.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    left = {key: value for key, value in info.items() if key in ("missing_keys", "mismatched_keys", "error_msgs") and value}
    assert not any("visual" not in key for keys in left.values() for key in keys), left
    return model.eval()


class Run(NamedTuple):
    """A prompt and the greedy steps after it."""

    ids: NDArray[np.int64]
    """[prompt + steps], what was fed."""
    logits: NDArray[np.floating]
    """[prompt + steps, vocab], after each of them."""


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: NDArray[np.int64], steps: int) -> Run:
    """The prompt as one chunk, then `steps` single tokens through the cache, each the best one of the step before."""
    cache = DynamicCache(config=model.config)
    # Given masks and positions: a cache without attention layers cannot count the tokens that they are made from.
    linear_only = "full_attention" not in model.config.get_text_config().layer_types
    mask = {"full_attention": None, "linear_attention": None} if linear_only else None
    chunk, ids, logits = torch.tensor(prompt)[None], list(prompt), []
    for step in range(steps + 1):
        positions = torch.arange(len(ids) - chunk.shape[1], len(ids))[None]
        out = model(input_ids=chunk, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True).logits[0]
        logits.append(out.numpy())
        if step < steps:
            ids.append(int(out[-1].argmax()))
            chunk = torch.tensor([[ids[-1]]])
    return Run(np.array(ids), np.concatenate(logits))


@torch.no_grad()
def whole(model: PreTrainedModel, ids: NDArray[np.int64]) -> NDArray[np.floating]:
    """[n, vocab] logits of one pass without a cache."""
    return model(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0].numpy()


@contextmanager
def everything_float64() -> Iterator[None]:
    """transformers casts to float32 inside norms, softmax, rotary and the delta rule; within this block, to float64.

    Models have to be loaded inside the block too, since rotary frequencies are made then.
    """

    class Float64Torch:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    single = torch.Tensor.float
    try:
        modeling.torch = Float64Torch()
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        modeling.torch = torch
        torch.Tensor.float = single
