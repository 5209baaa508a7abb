"""A decoder with DeepSpeed-MoE layers, experts spread over the ranks."""

import torch
from deepspeed.moe.layer import MoE

WIDTH, HEADS, EXPERTS, VOCABULARY = 256, 4, 8, 1000


class Layer(torch.nn.Module):
    def __init__(self, expert_parallel: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        expert = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        self.moe = MoE(WIDTH, expert, EXPERTS, ep_size=expert_parallel, k=2, min_capacity=4)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        mixed, balance, _ = self.moe(hidden)
        return hidden + mixed, balance


class Decoder(torch.nn.Module):
    def __init__(self, expert_parallel: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Layer(expert_parallel) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        total = torch.zeros((), device=ids.device)
        for layer in self.layers:
            hidden, balance = layer(hidden)
            total = total + balance
        logits = self.head(hidden)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()) + 0.01 * total


def spread() -> tuple[torch.nn.Module, object]:
    """Experts over four ranks."""
    return Decoder(4), batch


def alone() -> tuple[torch.nn.Module, object]:
    """All experts on every rank."""
    return Decoder(1), batch


def batch(micro_batch: int, seq_len: int, device: torch.device) -> tuple[torch.Tensor]:
    return (torch.zeros((micro_batch, seq_len), dtype=torch.long, device=device),)
