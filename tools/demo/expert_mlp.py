"""The routed experts of a layer as one differentiable operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class ExpertMlp(torch.autograd.Function):
    """The weighted sum of the chosen experts, down(silu(gate) * up), of each token.

    The (token, expert) pairs are sorted by expert, so that each expert is one matrix product a direction. Written by
    hand because autograd would keep and scatter a gradient for every expert's slice of the stacked weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, experts: Tensor, weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
    ) -> Tensor:
        """x [tokens, hidden], experts and weights [tokens, top_k] -> [tokens, hidden].

        gate_up_proj is [experts, 2 * intermediate, hidden], down_proj [experts, hidden, intermediate].
        """
        tokens, top_k = experts.shape
        order = torch.argsort(experts.flatten())  # position in expert order -> token * top_k + choice
        position = torch.empty_like(order)
        position[order] = torch.arange(tokens * top_k)
        counts = torch.bincount(experts.flatten(), minlength=len(gate_up_proj)).tolist()

        x_sorted = x.index_select(0, order // top_k)  # [tokens * top_k, hidden]
        gate_up = x.new_empty(tokens * top_k, gate_up_proj.shape[1])
        for expert, rows in _spans(counts):
            torch.mm(x_sorted[rows], gate_up_proj[expert].t(), out=gate_up[rows])
        gate, up = gate_up.chunk(2, -1)
        gate_sigmoid = torch.sigmoid(gate)
        hidden = gate * gate_sigmoid * up
        output = torch.empty_like(x_sorted)
        for expert, rows in _spans(counts):
            torch.mm(hidden[rows], down_proj[expert].t(), out=output[rows])

        ctx.save_for_backward(
            x_sorted, gate_up, gate_sigmoid, hidden, output, order, position, weights, gate_up_proj, down_proj
        )
        ctx.counts = counts
        return torch.einsum("tk,tkh->th", weights, output.index_select(0, position).unflatten(0, (tokens, top_k)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weights, gate_up_proj and down_proj; the choice of experts has none."""
        x_sorted, gate_up, gate_sigmoid, hidden, output, order, position, weights, gate_up_proj, down_proj = (
            ctx.saved_tensors
        )
        tokens, top_k = weights.shape
        d_output_sum = gradients[0].index_select(0, order // top_k)  # [tokens * top_k, hidden]
        d_weights = (d_output_sum * output).sum(-1).index_select(0, position).view(tokens, top_k)
        d_output = d_output_sum * weights.flatten().index_select(0, order).unsqueeze(1)

        d_hidden = torch.empty_like(hidden)
        d_down_proj = torch.zeros_like(down_proj)
        for expert, rows in _spans(ctx.counts):
            torch.mm(d_output[rows], down_proj[expert], out=d_hidden[rows])
            torch.mm(d_output[rows].t(), hidden[rows], out=d_down_proj[expert])

        gate, up = gate_up.chunk(2, -1)
        silu = gate * gate_sigmoid
        d_silu = gate_sigmoid + silu * (1 - gate_sigmoid)
        d_gate_up = torch.cat([d_hidden * up * d_silu, d_hidden * silu], -1)
        d_x_sorted = torch.empty_like(x_sorted)
        d_gate_up_proj = torch.zeros_like(gate_up_proj)
        for expert, rows in _spans(ctx.counts):
            torch.mm(d_gate_up[rows], gate_up_proj[expert], out=d_x_sorted[rows])
            torch.mm(d_gate_up[rows].t(), x_sorted[rows], out=d_gate_up_proj[expert])
        d_x = d_x_sorted.index_select(0, position).unflatten(0, (tokens, top_k)).sum(1)
        return d_x, None, d_weights, d_gate_up_proj, d_down_proj


def _spans(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """Each expert that was chosen, and its rows in expert order."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
