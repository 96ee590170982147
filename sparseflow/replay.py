"""RouteReplay: recorded routes that a session follows instead of its router's choice.

With it, a model whose own routing means nothing (random weights of the right size) asks for experts as a real model did,
token by token and layer by layer. The text it writes is worth nothing; what it reads and when is that of the recording.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from sparseflow.config import Geometry
from sparseflow.errors import CapacityError, OptionError
from sparseflow.kernels.experts import route_given

UNION_PROMPT_TOKENS = 41
"""Tokens of a prompt of which only the union of its experts was recorded."""


class RouteReplay:
    """Recorded expert ids of one text: its prompt, then one token at a time.

    Parameters
        label: where they come from; every output of a replayed run carries it.
        ids: integers [tokens, layers, top_k], distinct along the last axis.
        n_prefill: how many of the tokens were the prompt.
        ranked: the last axis is in the router's order, heaviest first; else its order means nothing.

    Attributes
        label, ids (int32, in the order given), n_prefill, ranked
        tokens, num_layers, top_k: the shape of `ids`.

    Raises
        OptionError: ids or n_prefill that cannot be routes.
    """

    def __init__(self, label: str, ids: NDArray[np.generic], n_prefill: int, *, ranked: bool) -> None:
        if ids.ndim != 3 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise OptionError(f"{label}: {ids.dtype} {list(ids.shape)} are no routes, expected integers [tokens, layers, top_k]")
        ascending = np.sort(ids.astype(np.int64), axis=-1)
        if ascending.min() < 0 or ascending.max() > np.iinfo(np.int32).max or (np.diff(ascending, axis=-1) == 0).any():
            raise OptionError(f"{label}: an expert id is negative, too large, or there twice in one token and layer")
        self.tokens, self.num_layers, self.top_k = ids.shape
        if not 1 <= n_prefill <= self.tokens:
            raise OptionError(f"{label}: routes of {self.tokens} tokens cannot begin with a prompt of {n_prefill}")
        self.label = label
        self.ids = ids.astype(np.int32)
        self.n_prefill = n_prefill
        self.ranked = ranked
        # A forward takes some tokens of one layer: contiguous in this order of axes.
        by_layer = (self.ids if ranked else ascending).transpose(1, 0, 2)
        self._by_layer = np.ascontiguousarray(by_layer, np.int32)

    @classmethod
    def load(cls, spec: str) -> RouteReplay:
        """Reads "FILE.npz:NAME". The file holds the routes of NAME in one of two forms:

        * NAME_ids [tokens, layers, top_k], in router order, and NAME_n_prefill;
        * NAME_decode_sets [steps, layers, top_k] and NAME_prefill_union [layers, n], padded with -1: of a prompt of 41 tokens
          only the experts that any of them used are known, and its tokens draw from those at random.

        Raises OptionError when there is no such file or name, or the arrays are no routes.
        """
        file, _, name = spec.rpartition(":")
        if not file or not name:
            raise OptionError(f"replay {spec!r} is not of the form FILE.npz:NAME, a file of routes and the name of a text in it")
        names, arrays = _read(file, f"{name}_")
        label = f"{os.path.basename(file)}:{name}"
        if {f"{name}_ids", f"{name}_n_prefill"} <= arrays.keys():
            n_prefill = arrays[f"{name}_n_prefill"]
            if n_prefill.size != 1 or n_prefill.dtype.kind not in "iu":
                raise OptionError(f"{label}: {name}_n_prefill is not a whole number")
            return cls(label, arrays[f"{name}_ids"], int(n_prefill.item()), ranked=True)
        if {f"{name}_decode_sets", f"{name}_prefill_union"} <= arrays.keys():
            decode = arrays[f"{name}_decode_sets"]
            prompt = _prompt_of(arrays[f"{name}_prefill_union"], decode, label)
            return cls(label, np.concatenate([prompt, decode]), len(prompt), ranked=False)
        raise OptionError(f"{file} holds no routes of {name!r}, but of {', '.join(names) or 'none at all'}")

    @staticmethod
    def names(file: str) -> list[str]:
        """The texts whose routes a file holds. Raises OptionError when it cannot be read."""
        return _read(file, "")[0]

    def check(self, geometry: Geometry) -> None:
        """Raises OptionError unless a model of this geometry can follow the routes: one of fewer layers takes the first of them."""
        wanted = f"a model of at most {self.num_layers} layers, {self.top_k} experts a token"
        layers, top_k, experts = geometry.num_hidden_layers, geometry.num_experts_per_tok, geometry.num_experts
        if layers > self.num_layers or top_k != self.top_k:
            raise OptionError(f"replay {self.label} is for {wanted}; this one has {layers} layers, {top_k} experts a token")
        # The files do not say how many experts there were. Real routes reach nearly all of them.
        largest = int(self.ids.max())
        if not largest < experts <= 2 * (largest + 1):
            raise OptionError(
                f"replay {self.label} has expert ids up to {largest}; this model has {experts} experts a layer, so it is not one"
                " that the routes were recorded from"
            )

    def check_position(self, end: int) -> None:
        """Raises CapacityError when the recording is over before `end` tokens."""
        if end > self.tokens:
            raise CapacityError(f"replay {self.label} holds routes of {self.tokens} tokens, {end} are asked for: feed fewer")

    def route(
        self, logits: NDArray[np.float32], layer: int, position: int, threads: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """What `kernels.experts.route` would give, had the router of `layer` chosen the recorded experts.

        logits: float32 [n, num_experts] of the tokens at `position` and after. Returns ids int32 and weights float32 [n, top_k],
        ascending ids: softmax of these experts' logits. If the recording tells their order, the weights follow it.
        """
        given = self._by_layer[layer, position : position + len(logits)]
        return route_given(logits, given, self.ranked, threads)


def _read(file: str, prefix: str) -> tuple[list[str], dict[str, NDArray[np.generic]]]:
    """The names of the texts in a file of routes, and its arrays whose names begin with `prefix`."""
    try:
        with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as saved:
            marks = ("_n_prefill", "_prefill_union")
            names = sorted(key.removesuffix(mark) for key in saved.files for mark in marks if key.endswith(mark))
            return names, {key: saved[key] for key in saved.files if key.startswith(prefix)}
    except OSError as error:
        raise OptionError(f"{file}: the routes cannot be read: {error.strerror or error}") from error
    except Exception as error:  # damage shows as whatever zipfile, zlib or numpy stumbles over first
        raise OptionError(f"{file}: not an .npz file of routes, or damaged") from error


def _prompt_of(union: NDArray[np.generic], decode: NDArray[np.generic], label: str) -> NDArray[np.int64]:
    """Expert ids int64 [41, layers, top_k] whose union in each layer is the recorded one.

    Who used which is not known: every token draws at random, so that nothing recurs with a period of its own; some draw without
    putting back until all are drawn. The draws are the same every time.
    """
    if union.dtype.kind != "i" or union.ndim != 2 or decode.ndim != 3 or len(union) != decode.shape[1]:
        raise OptionError(
            f"{label}: a prompt {list(union.shape)}, [layers, n], does not belong to steps {list(decode.shape)}, [steps, layers, top_k]"
        )
    top_k = decode.shape[2]
    draws = np.random.default_rng(0)
    prompt = np.empty((UNION_PROMPT_TOKENS, len(union), top_k), np.int64)
    for layer, row in enumerate(union.astype(np.int64)):
        experts = np.unique(row[row >= 0])
        if not top_k <= len(experts) <= UNION_PROMPT_TOKENS * top_k:
            raise OptionError(f"{label}: {len(experts)} experts in layer {layer} cannot be those of {UNION_PROMPT_TOKENS} tokens")
        deck = draws.permutation(experts)
        deck = np.append(deck, draws.choice(deck[: len(deck) // top_k * top_k], -len(deck) % top_k, replace=False))
        hands = [*deck.reshape(-1, top_k)]
        hands += [draws.choice(experts, top_k, replace=False) for _ in range(UNION_PROMPT_TOKENS - len(hands))]
        prompt[:, layer] = draws.permutation(hands)
    return prompt
