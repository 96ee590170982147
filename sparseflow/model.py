"""A packed model, opened: weights resident, experts leased, sessions and text on top."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sparseflow import demo_model
from sparseflow.chat import ChatTemplate
from sparseflow.checks import MemoryPlan, quick_checks
from sparseflow.config import Geometry
from sparseflow.decoder import Decoder
from sparseflow.errors import CapacityError, OptionError, PackedModelError, SparseFlowError
from sparseflow.evidence import RunEvidence, peak_rss_bytes
from sparseflow.footprint import PREFILL_CHUNK, Footprint, planned_context
from sparseflow.generate import Generation, Prompt, generate, prepare_prompt
from sparseflow.kernels import isa
from sparseflow.kernels.threads import check_threads
from sparseflow.layout import ExpertLayout
from sparseflow.leases import LeaseTable
from sparseflow.memory import require_memory
from sparseflow.packfile import EXPERTS_FILE, Manifest, read_manifest
from sparseflow.replay import RouteReplay
from sparseflow.sampling import Sampler
from sparseflow.session import Session
from sparseflow.store import PackedStore
from sparseflow.tokenizer import TOKENIZER_FILE, Tokenizer
from sparseflow.weights import READ_BYTES, DenseCore, Embedding

Progress = Callable[[str, int, int], None]


def load(
    model: str | os.PathLike[str],
    *,
    cache: str | int = "auto",
    threads: int | None = None,
    strict: bool = False,
    context: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    prefetch: bool = True,
    force: bool = False,
    check_finite: bool = False,
    progress: Progress | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> Model:
    """Opens a packed model.

    Args:
        model: a folder made by sf-pack, or "demo".
        cache: memory for routed experts: a size ("4GiB", or bytes), "resident" for all of them, read at once, or "auto" for what
            `sparseflow doctor` recommends: what the available memory allows.
        threads: compute threads; None for the processors this process may use.
        strict: evicted experts are also dropped from the page cache, so that the bound holds for the machine.
        context: the most tokens of one session; None for the model's own limit, of which memory is planned for 4,096.
        prefill_chunk: tokens fed at once; more need more memory and fewer passes over the experts.
        prefetch: in a strict run, read ahead the experts that the next layer is likely to choose, as long as the guesses are mostly right.
            It changes no result.
        force: load even what does not fit in the available memory. It may be slow; where the kernel would kill it, it stops with
            CapacityError, now or when experts are asked for.
        check_finite: after every layer, look for NaN and infinity, and name the layer where they began. Without it they are found in
            the logits, too, but not where they come from.
        progress: called as progress(what, done, total) with bytes while weights are read.
        on_warning: called with each of `Model.warnings` before any weights are read.

    The quick checks of `sparseflow doctor` are made first; `Model.warnings` tells what they warn of. Raises PackedModelError for a
    folder that is no complete packed model, OptionError for a bad argument, CapacityError when the cache or the memory is too
    small, StorageError when the disk refuses.
    """
    threads = check_threads(threads)
    isa.active()  # an unusable SPARSEFLOW_ISA is told before weights are read
    manifest = read_manifest(model_folder(model))
    planned = planned_context(context, manifest.geometry.max_position_embeddings)
    context = check_context(context, manifest.geometry)
    if isinstance(prefill_chunk, bool) or not isinstance(prefill_chunk, int) or prefill_chunk < 1:
        raise OptionError(f"prefill_chunk is {prefill_chunk!r}: give a whole number of at least 1")
    for name, value in (("strict", strict), ("prefetch", prefetch), ("force", force), ("check_finite", check_finite)):
        if not isinstance(value, bool):
            raise OptionError(f"{name} is {value!r}: give True or False")
    footprint = Footprint.of(manifest)
    slots = footprint.cache_slots(cache, planned, prefill_chunk)
    plan = MemoryPlan.of(footprint, slots, planned, prefill_chunk)
    checks = quick_checks(plan, threads)
    for check in checks:
        if check.status == "fail" and not force:
            raise CapacityError(f"{check.text}: {check.advice}, or force it (--force, force=True)")
    warnings = tuple(
        f"{check.text}: {check.advice}" + ("; forced all the same, it may be slow or fail" if check.status == "fail" else "")
        for check in checks
        if check.status in ("warning", "fail")
    )
    if on_warning is not None:
        for warning in warnings:
            on_warning(warning)
    watch: Callable[[int], None] | None = None
    if any(check.status == "fail" for check in checks):
        activations = sum(item.bytes for item in plan.items if item.name == "activations")  # they come whatever came before

        def watch(needed: int) -> None:
            require_memory(needed + activations)

    return Model(
        manifest, slots, cache == "resident", threads, strict, context, prefill_chunk, prefetch, check_finite, progress, warnings, watch
    )


class Model:
    """A packed model, ready to run. Made by `load`; a context manager.

    Attributes:
        folder, manifest, geometry: what was opened.
        layout: the expert slice's layout.
        store, leases: the mapped experts and the table of those in memory.
        core_bytes: bytes of the resident dense core.
        decoder: the layers.
        threads, strict, context, prefill_chunk: as in `load`.
        warnings: what the checks before loading warn of, one sentence each.

    Thread-safety: sessions of one model may run in different threads.
    """

    def __init__(
        self,
        manifest: Manifest,
        slots: int,
        resident: bool,
        threads: int,
        strict: bool,
        context: int,
        prefill_chunk: int,
        prefetch: bool,
        check_finite: bool,
        progress: Progress | None,
        warnings: tuple[str, ...] = (),
        watch: Callable[[int], None] | None = None,
    ) -> None:
        """watch: called with the bytes that are taken next, while weights are loaded and where experts get memory; may raise to stop."""
        self.manifest = manifest
        self.warnings = warnings
        self.folder = manifest.folder
        self.geometry = manifest.geometry
        self.threads = threads
        self.strict = strict
        self.context = context
        self.prefill_chunk = prefill_chunk
        g = self.geometry
        self.layout = ExpertLayout(g.hidden_size, g.moe_intermediate_size, manifest.expert_bits)
        self.store = PackedStore(self.folder / EXPERTS_FILE, strict=strict)
        try:
            core = DenseCore(manifest, drop_page_cache=strict, progress=_labelled(progress, "dense core", watch))
            self.core_bytes = core.nbytes
            # Past the page cache where it must not, or need not, hold the same bytes a second time.
            self.leases = LeaseTable(self.store, slots, direct=self.store.direct and (strict or resident))
            self.leases.watch = watch
            self.decoder = Decoder(core, Embedding(manifest), g, self.layout, self.leases, threads, prefetch, check_finite)
            if resident:
                self.leases.admit_all(_labelled(progress, "experts", None))
        except BaseException:
            self.store.close()
            if hasattr(self, "leases"):
                self.leases.close()  # the traceback may hold this for long
            raise

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises PackedModelError when it is missing, damaged, or that of another model."""
        tokenizer = Tokenizer.from_folder(self.folder)
        if tokenizer.largest_id >= self.geometry.vocab_size:
            raise PackedModelError(
                f"{self.folder / TOKENIZER_FILE}: has the token id {tokenizer.largest_id}, the model's vocabulary ends at"
                f" {self.geometry.vocab_size - 1}: copy the tokenizer files of this checkpoint"
            )
        return tokenizer

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template."""
        return ChatTemplate.from_folder(self.folder, self.tokenizer)

    @property
    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's generation_config.json."""
        return self.tokenizer.generation_config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return self.tokenizer.eos_token_ids

    def session(self, *, trace: bool = True, replay: RouteReplay | None = None) -> Session:
        """A new, empty session; with `trace`, it records its routes, with `replay`, it follows recorded ones instead of its routers.

        Raises OptionError when the replay is not for a model of this geometry.
        """
        self.require_open()
        return Session(self, trace=trace, replay=replay)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        enable_thinking: bool | None = None,
        trace: bool = True,
    ) -> Generation:
        """Text in, pieces of text out, computed as they are asked for.

        Args:
            prompt: text (control tokens in it are parsed), a list of chat messages {"role", "content"}, or a list of token ids.
            temperature, top_k, top_p, min_p, repetition_penalty, seed: sampling; None is greedy for text and ids, and the
                checkpoint's generation config for chat.
            stop: texts before which to stop.
            enable_thinking: for chat; None leaves it to the template.
            trace: whether the session records its routes.

        Raises OptionError for a bad prompt or option, CapacityError for a prompt longer than the context.
        """
        prepared = prepare_prompt(
            self,
            prompt,
            enable_thinking=enable_thinking,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        return generate(
            self.session(trace=trace),
            prepared.ids,
            self.tokenizer,
            max_new_tokens=max_new_tokens,
            sampler=Sampler(prepared.sampling),
            eos_token_ids=self.eos_token_ids,
            stop=stop,
            opening=prepared.opening,
        )

    def evidence(self, generation: Generation) -> RunEvidence:
        """What a generation on this model did, once it has ended."""
        fed = generation.prompt_tokens + max(len(generation.ids) - 1, 0)
        own = []
        for usage in reversed(generation.session.usage):
            if fed <= 0:
                break
            own.append(usage)
            fed -= usage.tokens
        read = [usage.bytes_read for usage in own]
        return RunEvidence(
            prompt_tokens=generation.prompt_tokens,
            new_tokens=len(generation.ids),
            ttft_seconds=generation.ttft_seconds or 0.0,
            decode_seconds=generation.decode_seconds,
            peak_rss_bytes=peak_rss_bytes(),
            cache_slots=self.leases.slots,
            cache_bytes=self.leases.slots * self.layout.stride,
            requests=sum(usage.requests for usage in own),
            hits=sum(usage.hits for usage in own),
            evictions=sum(usage.evictions for usage in own),
            bytes_asked=sum(usage.bytes_asked for usage in own),
            bytes_read=None if None in read else sum(count for count in read if count is not None),
            strict=self.strict,
            threads=self.threads,
            isa=isa.active(),
            replayed=None if generation.session.replay is None else generation.session.replay.label,
        )

    def close(self) -> None:
        """Frees the experts. Sessions can not be used afterwards. Closing again does nothing."""
        self.store.close()
        self.leases.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def require_open(self) -> None:
        """Raises SparseFlowError when the model is closed."""
        if self.store.closed:
            raise SparseFlowError("the model is closed: open it again with sparseflow.load")


def _labelled(progress: Progress | None, what: str, watch: Callable[[int], None] | None) -> Callable[[int, int], None] | None:
    """What a reader of weights is to call: progress with a label, and `watch` before the next piece."""
    if watch is None:
        return None if progress is None else lambda done, total: progress(what, done, total)

    def tell(done: int, total: int) -> None:
        watch(READ_BYTES)
        if progress is not None:
            progress(what, done, total)

    return tell


def model_folder(model: str | os.PathLike[str]) -> Path:
    """The packed folder that a `model` argument means; "demo" is packed first if it is not yet."""
    return demo_model.packed_folder() if os.fspath(model) == "demo" else Path(model)


def check_context(context: int | None, geometry: Geometry) -> int:
    """`context`, or the model's own limit for None. Raises OptionError when the model cannot hold so many tokens."""
    limit = geometry.max_position_embeddings
    if context is None:
        return limit
    if isinstance(context, bool) or not isinstance(context, int) or not 1 <= context <= limit:
        raise OptionError(f"context is {context!r}: this model takes a whole number of tokens from 1 to {limit}")
    return context

