"""Evaluate a demo checkpoint with transformers: held-out loss, four-choice questions, samples, use of the experts.

    python tools/demo/evaluate.py sparseflow/demo --dtype float32

Needs torch and transformers. A file of questions has a JSON object a line: "task", "ctx" (the text before the choice),
"choices" (four continuations) and "gold" (the index of the right one). A choice is scored by its log-likelihood after
the context, as a sum and as a mean over its bytes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from chats import write_chat
from corpus import DocumentSource
from draws import Draws
from everyday import write_everyday
from facts import write_facts
from special_tokens import END_OF_TEXT, IM_END
from stories import tell_story

HELD_OUT_SEED = 424242
KINDS: dict[str, Callable[[Draws], str]] = {
    "stories": tell_story,
    "facts": write_facts,
    "chats": write_chat,
    "everyday": write_everyday,
}
LENGTH = 256
KIND_WINDOWS = 24
LONG_LENGTH = 2048
LONG_WINDOWS = 8
BATCH = 8

# (prompt, thinking); thinking is None for plain text
SAMPLES = (
    ("Once upon a time, there was a little girl called Mia.", None),
    ("One rainy day, Ben went to the farm with his grandpa.", None),
    ("The days of the week are", None),
    ("A baby sheep is called", None),
    ("What do bees live in?", False),
    ("Tell me a story about a lion.", False),
    ("What is 6 plus 7?", True),
    ("Who are you?", False),
    ("What is the capital of France?", False),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint under evaluation."""

    model: Any
    chat_tokenizer: Any
    tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype) -> Checkpoint:
        """Load the folder with transformers."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(model, AutoTokenizer.from_pretrained(folder), tokenizer)

    def token_id(self, token: str) -> int:
        """The id of an added token."""
        return self.tokenizer.get_vocab()[token]

    def logits(self, ids: Tensor) -> Tensor:
        """Logits in float32 [B, S, vocab_size] of token ids [B, S]."""
        return self.model(input_ids=ids).logits.float()

    def windows(self, documents: Iterator[str], length: int, count: int) -> Tensor:
        """Token ids [count, length]; a window is a few documents from the start of the first one."""
        windows = []
        for _ in range(count):
            ids: list[int] = []
            while len(ids) < length:
                ids += self.tokenizer.encode(next(documents)).ids
                ids.append(self.token_id(END_OF_TEXT))
            windows.append(ids[:length])
        return torch.tensor(windows)


def held_out_losses(checkpoint: Checkpoint, documents: Iterator[str], length: int, count: int) -> Tensor:
    """The mean loss at each position [length] of windows of unseen documents."""
    total = torch.zeros(length)
    for windows in checkpoint.windows(documents, length + 1, count).split(BATCH):
        logits = checkpoint.logits(windows[:, :-1]).transpose(1, 2)
        total += F.cross_entropy(logits, windows[:, 1:], reduction="none").sum(0)
    return total / count


def report_losses(checkpoint: Checkpoint, count: int) -> None:
    """Print the perplexity on unseen documents, of each kind, and the loss by position in long windows."""
    documents = iter(DocumentSource(HELD_OUT_SEED))
    loss = held_out_losses(checkpoint, documents, LENGTH, count).mean().item()
    print(f"held out: loss {loss:.4f} perplexity {math.exp(loss):.3f}")
    draws = Draws(HELD_OUT_SEED + 1)
    for name, write in KINDS.items():
        loss = held_out_losses(checkpoint, _repeat(write, draws), LENGTH, KIND_WINDOWS).mean().item()
        print(f"  {name}: loss {loss:.4f} perplexity {math.exp(loss):.3f}")
    documents = iter(DocumentSource(HELD_OUT_SEED + 2))
    losses = held_out_losses(checkpoint, documents, LONG_LENGTH, LONG_WINDOWS)
    by_position = "  ".join(f"{part.mean():.3f}" for part in losses.split(LENGTH))
    print(f"windows of {LONG_LENGTH}: loss {losses.mean():.4f}; each {LENGTH} tokens: {by_position}")


def _repeat(write: Callable[[Draws], str], draws: Draws) -> Iterator[str]:
    while True:
        yield write(draws)


def choice_score(checkpoint: Checkpoint, context: str, choice: str) -> float:
    """The log-likelihood of the choice after the context, in nats."""
    context_ids = checkpoint.tokenizer.encode(context).ids
    choice_ids = checkpoint.tokenizer.encode(choice).ids
    log_probabilities = checkpoint.logits(torch.tensor([context_ids + choice_ids]))[0].log_softmax(-1)
    predictions = log_probabilities[len(context_ids) - 1 : -1]
    return predictions.gather(1, torch.tensor(choice_ids).unsqueeze(1)).sum().item()


def report_questions(checkpoint: Checkpoint, questions: Path) -> None:
    """Print how many four-choice questions are answered right, in all and by task."""
    asked: Counter[str] = Counter()
    right_by_sum: Counter[str] = Counter()
    right_by_byte: Counter[str] = Counter()
    for line in questions.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        sums = [choice_score(checkpoint, question["ctx"], choice) for choice in question["choices"]]
        means = [score / len(choice.encode()) for score, choice in zip(sums, question["choices"])]
        gold, task = question["gold"], question["task"]
        asked[task] += 1
        right_by_sum[task] += sums[gold] == max(sums)
        right_by_byte[task] += means[gold] == max(means)
    print(f"questions: {right_by_sum.total()}/{asked.total()} right by sum, {right_by_byte.total()} by byte")
    for task, count in asked.items():
        print(f"  {task}: {right_by_sum[task]}/{count} by sum, {right_by_byte[task]} by byte")


def report_samples(checkpoint: Checkpoint, new_tokens: int) -> None:
    """Print greedy continuations and answers."""
    end_ids = [checkpoint.token_id(IM_END), checkpoint.token_id(END_OF_TEXT)]
    for text, thinking in SAMPLES:
        prompt = text if thinking is None else _chat_prompt(checkpoint, text, thinking)
        ids = torch.tensor([checkpoint.tokenizer.encode(prompt).ids])
        output = checkpoint.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=end_ids,
            pad_token_id=end_ids[1],
        )
        continuation = checkpoint.tokenizer.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=False)
        print(f"{text!r}\n  -> {continuation!r}")


def _chat_prompt(checkpoint: Checkpoint, text: str, thinking: bool) -> str:
    prompt = checkpoint.chat_tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    return str(prompt)


def report_experts(checkpoint: Checkpoint, count: int) -> None:
    """Print how evenly each layer uses its experts, and how many a token shares with the token before."""
    windows = checkpoint.windows(iter(DocumentSource(HELD_OUT_SEED + 3)), LENGTH, count)
    num_experts, top_k = checkpoint.model.config.num_experts, checkpoint.model.config.num_experts_per_tok
    print(f"experts: {top_k} of {num_experts}; by chance a token shares {top_k / num_experts:.3f} of them")
    for index, experts in enumerate(_chosen_experts(checkpoint, windows)):
        share = experts.float().mean((0, 1)) / top_k
        entropy = torch.special.entr(share).sum().item() / math.log(num_experts)
        shared = (experts[:, 1:] & experts[:, :-1]).sum(-1).float().mean().item() / top_k
        print(
            f"  layer {index} {checkpoint.model.config.layer_types[index]}: usage entropy {entropy:.3f} of 1, "
            f"shares {share.min():.4f} to {share.max():.3f}, shared with the token before {shared:.3f}"
        )


def _chosen_experts(checkpoint: Checkpoint, windows: Tensor) -> list[Tensor]:
    """For each layer, whether an expert was chosen: bool [windows, length, num_experts]."""
    layers = checkpoint.model.model.layers
    chosen: list[list[Tensor]] = [[] for _ in layers]

    def record(index: int) -> Callable[..., None]:
        return lambda router, inputs, outputs: chosen[index].append(outputs[2])

    hooks = [layer.mlp.gate.register_forward_hook(record(index)) for index, layer in enumerate(layers)]
    for batch in windows.split(BATCH):
        checkpoint.logits(batch)
    for hook in hooks:
        hook.remove()
    num_experts = checkpoint.model.config.num_experts
    shape = (*windows.shape, num_experts)
    return [F.one_hot(torch.cat(ids), num_experts).sum(1).bool().view(shape) for ids in chosen]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="checkpoint folder in Hugging Face form")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=96, help="windows of held-out text (default: %(default)s)")
    parser.add_argument("--questions", type=Path, help="file of four-choice questions")
    parser.add_argument("--new-tokens", type=int, default=160, help="longest sample (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    checkpoint = Checkpoint.load(options.folder, getattr(torch, options.dtype))
    with torch.no_grad():
        report_losses(checkpoint, options.windows)
        if options.questions:
            report_questions(checkpoint, options.questions)
        report_samples(checkpoint, options.new_tokens)
        report_experts(checkpoint, options.windows // 2)


if __name__ == "__main__":
    main()
