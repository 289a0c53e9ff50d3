"""A small GPT: the decoder-only transformer that the lectures count, at any size.

Pre-LN blocks, learned positions, GELU, weights of the head tied to the embedding or not (Radford et al. 2019). Query, key and value are
Linears of their own, so that an adapter can be put on each. Attention is written out, so that what it keeps for backward can be counted.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT: vocabulary, longest sequence, blocks, heads per block, width of a token's vector; width is a multiple of heads."""

    vocab: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    tied: bool = True
    dropout: float = 0.0


GPT2_XL = GPTConfig(vocab=50257, context=1024, layers=48, heads=25, width=1600)
GPT3 = GPTConfig(vocab=50257, context=2048, layers=96, heads=96, width=12288)


class Attention(nn.Module):
    """Causal self-attention: (batch, seq, width) -> (batch, seq, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.drop_weights = nn.Dropout(config.dropout)
        self.drop_out = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        # (batch, heads, seq, width / heads)
        query, key, value = (
            part.view(batch, seq, self.heads, width // self.heads).transpose(1, 2) for part in (self.query(x), self.key(x), self.value(x))
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)  # (batch, heads, seq, seq)
        future = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
        weights = self.drop_weights(scores.masked_fill(future, float("-inf")).softmax(-1))
        return self.drop_out(self.out((weights @ value).transpose(1, 2).reshape(batch, seq, width)))


class MLP(nn.Module):
    """Two Linears with GELU between, four times as wide inside: (batch, seq, width) -> (batch, seq, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop_out = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop_out(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside a residual: (batch, seq, width) -> (batch, seq, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Token ids (batch, seq) -> logits (batch, seq, vocab)."""

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.drop_in = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # residual branches start smaller, as in GPT-2
                std = 0.02 / math.sqrt(2 * config.layers) if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))  # (batch, seq, width)
        x = self.drop_in(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats of logits (batch, seq, vocab) against token ids (batch, seq); a target of -100 does not count."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
