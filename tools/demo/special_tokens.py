"""The tokens of the demo checkpoint that stand for no text, in the order of their ids."""

from __future__ import annotations

END_OF_TEXT, IM_START, IM_END = CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK_START, THINK_END = THINK_TOKENS = ("<think>", "</think>")
ADDED_TOKENS = CONTROL_TOKENS + THINK_TOKENS
