"""Train the tokenizer of the demo checkpoint and write it, with its configuration, in Hugging Face form.

    python tools/demo/train_tokenizer.py corpus.txt sparseflow-demo
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from special_tokens import ADDED_TOKENS, CONTROL_TOKENS, END_OF_TEXT, IM_END, IM_START, THINK_TOKENS

VOCAB_SIZE = 4096
CONTEXT = 4096
CHAT_TEMPLATE = Path(__file__).parent / "templates" / "chat_template.jinja"

# The pattern by which the Qwen3.5 family splits text, so that its tokenizer classes and tokenizer.json agree.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def train_tokenizer(text: str) -> Tokenizer:
    """A byte-level BPE tokenizer learned from the text; the added tokens have the highest ids, as in Qwen."""
    tokenizer = Tokenizer(models.BPE(unk_token=None, fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_added_tokens(text), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINK_TOKENS])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(_tokenizer_config(tokenizer), folder / "tokenizer_config.json")
    _write_json(_generation_config(tokenizer), folder / "generation_config.json")


def _without_added_tokens(text: str) -> list[str]:
    """The pieces of the text between added tokens, which the trainer must not learn parts of."""
    for token in ADDED_TOKENS:
        text = text.replace(token, "\n\0")
    return [piece for piece in text.split("\0") if piece.strip()]


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in CONTROL_TOKENS,
            }
            for token in ADDED_TOKENS
        },
        "additional_special_tokens": [IM_START, IM_END],
        "bos_token": None,
        "chat_template": _chat_template(),
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "errors": "replace",
        "model_max_length": CONTEXT,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _chat_template() -> str:
    """The chat template in one line: its tags trim the white space before them anyway."""
    return "".join(line.strip() for line in CHAT_TEMPLATE.read_text(encoding="utf-8").splitlines())


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = tokenizer.get_vocab()
    return {
        "bos_token_id": ids[END_OF_TEXT],
        "do_sample": True,
        "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }


def _write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="text written by corpus.py")
    parser.add_argument("folder", type=Path, help="folder to write the three files into")
    options = parser.parse_args(arguments)
    tokenizer = train_tokenizer(options.corpus.read_text(encoding="utf-8"))
    write_tokenizer(tokenizer, options.folder)
    print(f"{tokenizer.get_vocab_size()} tokens written to {options.folder}")


if __name__ == "__main__":
    main()
