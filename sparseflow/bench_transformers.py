"""One run of transformers with generic disk offload, in a process of its own: what `sf-bench --peer transformers` measures.

    python -P -m sparseflow.bench_transformers    an OffloadRun as one line of JSON on standard input, the answer on standard output

The decoder layers are left on the disk, and accelerate reads each in whole whenever it is due; embedding, last norm and head are in
memory. Weights are of the type they were saved in. Timed as in `sparseflow.bench_cell`: `load_s` is from_pretrained, `ttft_s` the
forward of the prompt, `token_s` each later token's; tokens are chosen greedily. Imports are outside.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparseflow.bench_cell import leave_with_parent
from sparseflow.errors import CapacityError, SparseFlowError
from sparseflow.evidence import disk_bytes_read, peak_rss_bytes

PACKAGES = ("torch", "transformers", "accelerate")
_IN_MEMORY = ("embed_tokens", "norm", "rotary_emb")


@dataclass(frozen=True, slots=True)
class OffloadRun:
    """What to run: the checkpoint's folder, one to offload to, threads, the prompt's ids, how many tokens to make."""

    checkpoint: str
    offload: str
    threads: int
    prompt_ids: Sequence[int]
    new_tokens: int


def measure(run: OffloadRun) -> dict[str, Any]:
    """Loads the checkpoint, runs, and tells what it took."""
    torch, transformers, _ = (importlib.import_module(name) for name in PACKAGES)
    torch.set_num_threads(run.threads)
    config = transformers.AutoConfig.from_pretrained(run.checkpoint)
    text = config.get_text_config()
    nested = text is not config
    kind = transformers.Qwen3_5MoeForConditionalGeneration if nested else transformers.Qwen3_5MoeForCausalLM
    stem = "model.language_model" if nested else "model"
    places = {f"{stem}.layers.{layer}": "disk" for layer in range(text.num_hidden_layers)}
    places |= {f"{stem}.{name}": "cpu" for name in _IN_MEMORY} | {"lm_head": "cpu"}
    if nested:
        places["model.visual"] = "disk"
    read_before = disk_bytes_read()
    with torch.no_grad():
        started = time.perf_counter()
        model = kind.from_pretrained(run.checkpoint, dtype="auto", device_map=places, offload_folder=run.offload).eval()
        load_s = time.perf_counter() - started
        cache = transformers.DynamicCache(config=config)
        ids = torch.tensor([run.prompt_ids])
        generated: list[int] = []
        seconds: list[float] = []
        while len(generated) < run.new_tokens:
            started = time.perf_counter()
            logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(dim=-1)
            generated.append(int(ids))
            seconds.append(time.perf_counter() - started)
    read_after = disk_bytes_read()
    return {
        "load_s": load_s,
        "ttft_s": seconds[0],
        "token_s": seconds[1:],
        "peak_rss_bytes": peak_rss_bytes(),
        "physical_bytes": None if read_before is None or read_after is None else read_after - read_before,
        "ids": generated,
    }


def main() -> None:
    """The process: reads an OffloadRun, prints what was measured."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the folder
    line = sys.stdin.buffer.readline()
    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        answer = measure(OffloadRun(**json.loads(line)))
    except SparseFlowError as error:
        answer = {"error": str(error), "exit_status": error.exit_status}
    except MemoryError:
        answer = {"error": "the machine has no memory left", "exit_status": CapacityError.exit_status}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
