"""A byte-level GPT: pre-norm blocks, learned positions, tied embeddings."""

import math

import torch
from torch import nn
from torch.nn import functional

VOCABULARY_SIZE = 256


class Attention(nn.Module):
    """Causal self-attention with dropout on the attention weights."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.projection = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [batch, sequence, hidden]."""
        batch, length, size = hidden.shape
        qkv = self.qkv(hidden).view(batch, length, 3, self.num_heads, size // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: torch.Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, length, size))
        return out


class Block(nn.Module):
    """Attention and a four times wider feed-forward layer, each on a residual path."""

    def __init__(self, hidden_size: int, num_heads: int, attention_dropout: float, hidden_dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, attention_dropout)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp_in = nn.Linear(hidden_size, 4 * hidden_size)
        self.mlp_out = nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [batch, sequence, hidden]."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        wide = functional.gelu(self.mlp_in(self.mlp_norm(hidden)))
        out: torch.Tensor = hidden + self.dropout(self.mlp_out(wide))
        return out


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        seq_length: int,
        attention_dropout: float,
        hidden_dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY_SIZE, hidden_size)
        self.positions = nn.Embedding(seq_length, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, attention_dropout, hidden_dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self._initialise(num_layers)

    def _initialise(self, num_layers: int) -> None:
        residual_std = 0.02 / math.sqrt(2 * num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                std = residual_std if name.endswith(("projection.weight", "mlp_out.weight")) else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, in nats per byte, of each byte given those before it. `text`: [batch, sequence + 1], int64."""
        inputs, targets = text[:, :-1], text[:, 1:]
        places = torch.arange(inputs.shape[1], device=text.device)
        hidden = self.dropout(self.tokens(inputs) + self.positions(places))
        for block in self.blocks:
            hidden = block(hidden)
        logits = functional.linear(self.norm(hidden), self.tokens.weight)
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY_SIZE), targets.reshape(-1))


def mean_loss(model: nn.Module, text: torch.Tensor, bf16: bool) -> torch.Tensor:
    """Loss of one micro-batch, computed in bfloat16 where asked: [], float32."""
    with torch.autocast(text.device.type, torch.bfloat16, enabled=bf16):
        loss: torch.Tensor = model(text)
    return loss.float()


def microbatch_loss(model: nn.Module, batch: dict[str, torch.Tensor], bf16: bool, device: torch.device) -> torch.Tensor:
    """Loss of one of the loader's micro-batches, counted by the mean of its samples' weights: [], float32, on `device`."""
    loss = mean_loss(model, batch["text"].to(device), bf16)
    return loss * batch["weight"].to(device).mean()
