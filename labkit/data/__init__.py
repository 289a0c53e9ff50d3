"""Text to train on that needs no download: a frozen copy of Python's own documentation topics (what `help("topics")` reads).

The text is that of CPython 3.11 and stays under the Python Software Foundation's license, which lies beside it. It is frozen here because
each version of Python brings another text, and a course needs the same losses everywhere. Tokens are bytes of UTF-8: a vocabulary of 256.
"""

import json
import lzma
from functools import cache
from pathlib import Path

import torch

VOCAB = 256


@cache
def topics() -> dict[str, str]:
    """Texts by topic ("assignment", "import", ...), 79 of them, 465,000 characters."""
    return json.loads(lzma.decompress((Path(__file__).parent / "python_topics.json.xz").read_bytes()))


def tokens(text: str) -> torch.Tensor:
    """The text's bytes as token ids from 0 to 255: (length,) int64."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def text(ids: torch.Tensor) -> str:
    """Token ids back to text; bytes that do not make a character show as a replacement mark."""
    return bytes(ids.tolist()).decode(errors="replace")


def python_docs() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids to train on and to validate with: every fifth topic is held out."""
    parts = list(topics().values())
    train = "\n".join(part for index, part in enumerate(parts) if index % 5 != 4)
    return tokens(train), tokens("\n".join(parts[4::5]))


def batches(ids: torch.Tensor, batch: int, seq: int, count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` pairs (inputs, targets) of random windows, both (batch, seq); targets are the inputs' next tokens."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(seq)
    pairs = []
    for _ in range(count):
        starts = torch.randint(len(ids) - seq, (batch, 1), generator=generator)
        pairs.append((ids[starts + offsets], ids[starts + offsets + 1]))
    return pairs
