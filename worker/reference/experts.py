"""A feed-forward layer of several experts, of which each token uses a few: for dumps, counts and graphs, not for speed.

Every expert computes every token, and what was not chosen counts 0. So shapes are fixed, nothing is read back and the result
does not depend on an order: a graph may hold it, and it is bitwise repeatable. It costs `num_experts / topk` times the
computation of a layer that sends tokens to their experts only.
"""

import math

import torch
from torch import nn
from torch.nn import functional


class Router(nn.Module):
    """Scores of the experts for each token. In float32, whatever the rest computes in: ties and small differences decide."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, experts], float32, for `hidden`: [tokens, hidden]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), self.weight.float())


class GroupedLinear(nn.Module):
    """The same input through a matrix of each expert. Modules of this kind called `linear_fc1` tell how many tokens experts
    get (`observe.tokens_per_expert`), hence the second input."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """[tokens, experts, out] for `hidden`: [tokens, in]. `tokens_per_expert`: [experts], int64."""
        num_experts, out_features, _ = self.weight.shape
        return functional.linear(hidden, self.weight.flatten(0, 1)).view(-1, num_experts, out_features)


class GroupedSum(nn.Module):
    """The input of each expert through its matrix, added up."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, out] for `hidden`: [tokens, experts, in]."""
        return functional.linear(hidden.flatten(1), self.weight.transpose(0, 1).flatten(1))


class Experts(nn.Module):
    """Two layers of each expert, without biases, added up by the weights of the router."""

    def __init__(self, num_experts: int, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.linear_fc1 = GroupedLinear(num_experts, hidden_size, ffn_hidden_size)
        self.linear_fc2 = GroupedSum(num_experts, ffn_hidden_size, hidden_size)

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] for `hidden` of the same shape and `weights`: [tokens, experts], 0 where an expert is not chosen."""
        wide = functional.gelu(self.linear_fc1(hidden, tokens_per_expert))
        out: torch.Tensor = self.linear_fc2(wide * weights.to(wide.dtype).unsqueeze(-1))
        return out


class MixtureOfExperts(nn.Module):
    """Router and experts. `topk` experts compute a token; with several their weights add up to 1, a single one has its share of
    all scores (so that the router learns)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_experts: int, topk: int) -> None:
        super().__init__()
        self._topk = topk
        self.router = Router(hidden_size, num_experts)
        self.experts = Experts(num_experts, hidden_size, ffn_hidden_size)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output, [..., hidden], and its load balancing loss, [], float32, for `hidden`: [..., hidden]."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        logits = self.router(tokens)
        scores = logits.softmax(-1)
        best = logits.detach().topk(self._topk).indices.unsqueeze(-1)
        is_chosen = (best == torch.arange(logits.shape[-1], device=logits.device)).any(1)
        counts = is_chosen.sum(0)
        if self._topk > 1:
            weights = logits.masked_fill(~is_chosen, -math.inf).softmax(-1)
        else:
            weights = scores.masked_fill(~is_chosen, 0.0)
        out = self.experts(tokens, weights, counts)
        return out.view_as(hidden), balance_loss(scores, counts, self._topk)


def balance_loss(scores: torch.Tensor, tokens_per_expert: torch.Tensor, topk: int) -> torch.Tensor:
    """1 where tokens and scores are spread evenly over the experts, more where they are not: [], float32.

    `scores`: [tokens, experts], adding up to 1 for each token. Source: Fedus et al., Switch Transformers, arXiv:2101.03961,
    equation 4; its fractions counted over `topk` experts a token, as in Megatron-LM.
    """
    num_tokens, num_experts = scores.shape
    fractions = tokens_per_expert.float() / (num_tokens * topk)
    return num_experts * (fractions * scores.mean(0)).sum()
