"""A byte-level GPT: pre-norm blocks, learned positions, tied embeddings."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rsup.worker.activation_offload import ActivationOffload
from rsup.worker.reference.experts import MixtureOfExperts

VOCABULARY_SIZE = 256
_INTO_RESIDUAL = ("projection.weight", "mlp_out.weight", "linear_fc2.weight")
"""Ends of the names of weights that write onto the residual path."""


class Attention(nn.Module):
    """Causal self-attention with dropout on the attention weights. `recomputes`: its core is computed again in backward."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, recomputes: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.recomputes = recomputes
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.projection = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [batch, sequence, hidden]."""
        batch, length, size = hidden.shape
        qkv = self.qkv(hidden).view(batch, length, 3, self.num_heads, size // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if self.recomputes and torch.is_grad_enabled():
            mixed = _recomputed(self._core, self.dropout > 0, query, key, value)
        else:
            mixed = self._core(query, key, value)
        out: torch.Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, length, size))
        return out

    def _core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


@dataclass(frozen=True)
class ExpertsOfBlock:
    """A feed-forward layer of several experts. `aux_loss_coeff`: weight of the load balancing loss, for each layer; 0: none."""

    num_experts: int
    topk: int
    ffn_hidden_size: int
    aux_loss_coeff: float = 0.0


class Block(nn.Module):
    """Attention and a four times wider feed-forward layer, or `experts`, each on a residual path."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        attention_dropout: float,
        hidden_dropout: float,
        recompute: str | None,
        experts: ExpertsOfBlock | None = None,
    ) -> None:
        super().__init__()
        self.recomputes = recompute == "full"
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, attention_dropout, recompute == "selective")
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.balance: torch.Tensor | None = None
        """Load balancing loss of the last forward, [], float32; for whoever takes it."""
        if experts is None:
            self.mlp_in = nn.Linear(hidden_size, 4 * hidden_size)
            self.mlp_out = nn.Linear(4 * hidden_size, hidden_size)
        else:
            self.mlp = MixtureOfExperts(hidden_size, experts.ffn_hidden_size, experts.num_experts, experts.topk)
        self.has_experts = experts is not None
        self.dropout = nn.Dropout(hidden_dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [batch, sequence, hidden]."""
        if self.recomputes and torch.is_grad_enabled():
            draws = self.dropout.p > 0 or self.attention.dropout > 0
            found: tuple[torch.Tensor, torch.Tensor | None] = _recomputed(self._compute, draws, hidden)
        else:
            found = self._compute(hidden)
        out, self.balance = found
        return out

    def _compute(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        out, balance = self._feed_forward(self.mlp_norm(hidden))
        return hidden + self.dropout(out), balance

    def _feed_forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the layer gives, and where there are experts their load balancing loss."""
        if self.has_experts:
            out, balance = self.mlp(hidden)
            return out, balance
        return self.mlp_out(functional.gelu(self.mlp_in(hidden))), None


def _recomputed(function: Any, draws: bool, *inputs: torch.Tensor) -> Any:
    """The same, computed again in the backward pass. `draws`: with the same random numbers, whose state is then kept on the
    host: nothing for a CUDA graph."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=draws)


class GPT(nn.Module):
    """Predicts the next byte. `recompute`: `full` for whole blocks, `selective` for the core of the attention."""

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        seq_length: int,
        attention_dropout: float,
        hidden_dropout: float,
        recompute: str | None = None,
        experts: ExpertsOfBlock | None = None,
    ) -> None:
        super().__init__()
        self.has_experts = experts is not None
        self.aux_loss_coeff = experts.aux_loss_coeff if experts is not None else 0.0
        self.balance: torch.Tensor | None = None
        """Load balancing loss of the last micro-batch, mean over the blocks: [], float32; None where it is not in the loss."""
        self.offload: ActivationOffload | None = None
        """Where activations are until the backward pass."""
        self.tokens = nn.Embedding(VOCABULARY_SIZE, hidden_size)
        self.positions = nn.Embedding(seq_length, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, attention_dropout, hidden_dropout, recompute, experts) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_size)
        self._initialise(num_layers)

    def _initialise(self, num_layers: int) -> None:
        residual_std = 0.02 / math.sqrt(2 * num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                std = residual_std if name.endswith(_INTO_RESIDUAL) else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, in nats per byte, of each byte given those before it. `text`: [batch, sequence + 1], int64."""
        with self.saving():
            hidden = self.embed(text[:, :-1])
            for block in self.blocks:
                hidden = block(hidden)
            return self.loss(hidden, text[:, 1:])

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the first block gets, [batch, sequence, hidden], for `inputs`: [batch, sequence], int64."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        out: torch.Tensor = self.dropout(self.tokens(inputs) + self.positions(places))
        return out

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, [], for what the last block gives and `targets`: [batch, sequence], int64. In training its
        gradient is also that of the load balancing loss, which adds nothing to the number."""
        logits = functional.linear(self.norm(hidden), self.tokens.weight)
        loss = functional.cross_entropy(logits.reshape(-1, VOCABULARY_SIZE), targets.reshape(-1))
        balance = self._take_balance()
        if balance is None or not self.training or not self.aux_loss_coeff:
            return loss
        self.balance = balance.detach() / len(self.blocks)
        return loss + self.aux_loss_coeff * (balance - balance.detach())

    def _take_balance(self) -> torch.Tensor | None:
        """Sum over the blocks, [], float32; they keep none of it."""
        if not self.has_experts:
            return None
        found = []
        for block in self.modules():  # somebody may have wrapped them
            if isinstance(block, Block) and block.balance is not None:
                found.append(block.balance)
                block.balance = None
        return torch.stack(found).sum() if found else None

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Around the forward pass of a micro-batch: what it saves goes to host memory, where that is asked for."""
        return contextlib.nullcontext() if self.offload is None else self.offload.saving(self.parameters())


def mean_loss(model: nn.Module, text: torch.Tensor, compute: torch.dtype | None) -> torch.Tensor:
    """Loss of one micro-batch, with matrix products in the type `compute` (None: that of the parameters): [], float32."""
    with torch.autocast(text.device.type, compute or torch.bfloat16, enabled=compute is not None):
        loss: torch.Tensor = model(text)
    return loss.float()


def microbatch_loss(
    model: nn.Module, batch: dict[str, torch.Tensor], compute: torch.dtype | None, device: torch.device
) -> torch.Tensor:
    """Loss of one of the loader's micro-batches, counted by the mean of its samples' weights: [], float32, on `device`."""
    loss = mean_loss(model, batch["text"].to(device), compute)
    return loss * batch["weight"].to(device).mean()
