"""Write a training checkpoint as a Hugging Face checkpoint folder in BF16. Needs torch and transformers.

    python tools/demo/export.py demo.pt sparseflow-demo --tokenizer sparseflow-demo-tokenizer
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from model import TEXT_CONFIG

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def export(weights: dict[str, Tensor], tokenizer_folder: Path, folder: Path) -> None:
    """Write the folder: weights rounded to BF16, configuration, and the tokenizer's files copied from its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(flat_config(), folder / "config.json")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder / name, folder / name)


def flat_config() -> dict[str, Any]:
    """config.json of a text-only checkpoint."""
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **TEXT_CONFIG,
        "transformers_version": transformers.__version__,
    }


def nested_config() -> dict[str, Any]:
    """The same configuration in the form of the full multimodal checkpoint."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": TEXT_CONFIG,
        "tie_word_embeddings": TEXT_CONFIG["tie_word_embeddings"],
        "transformers_version": transformers.__version__,
    }


def _write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="file written by train.py")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder written by train_tokenizer.py")
    parser.add_argument("--nested-config", type=Path, help="also write the configuration in nested form to this file")
    options = parser.parse_args(arguments)
    export(torch.load(options.checkpoint)["model"], options.tokenizer, options.folder)
    if options.nested_config:
        _write_json(nested_config(), options.nested_config)
    size = (options.folder / "model.safetensors").stat().st_size
    print(f"{size} bytes of weights written to {options.folder}")


if __name__ == "__main__":
    main()
