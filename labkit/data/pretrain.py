"""`python -m labkit.data.pretrain`: train the small GPT of lab 11 on Python's documentation topics and write its checkpoint.

Under five minutes on two cores, seeded. The result, gpt_docs.safetensors, is kept in 16 bit and ships with the package: the lab begins
where this ends. `pretrained_gpt()` loads it.
"""

import math
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from labkit.data import batches, python_docs
from labkit.gpt import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig(vocab=256, context=128, layers=4, heads=4, width=128)
STEPS, BATCH, SEQ, RATE, WARM = 2000, 8, 128, 3e-3, 100
_FILE = Path(__file__).parent / "gpt_docs.safetensors"


def pretrained_gpt() -> GPT:
    """The pretrained model, in fp32 and in eval mode: 842,496 parameters, tokens are bytes, at most 128 of them."""
    model = GPT(CONFIG)
    saved = {name: tensor.float() for name, tensor in load_file(_FILE).items()}
    missing, unexpected = model.load_state_dict(saved, strict=False)
    if unexpected or missing != ["head.weight"]:  # the head is the embedding
        raise ValueError(f"{_FILE.name} is not this model's: missing {missing}, unexpected {unexpected}")
    return model.eval()


@torch.no_grad()
def validation_loss(model: GPT, ids: torch.Tensor, windows: int = 16, seq: int = SEQ) -> float:
    """Mean loss in nats per token over `windows` windows of `seq` tokens, spread evenly over `ids`: the same ones every time."""
    starts = torch.linspace(0, len(ids) - seq - 1, windows).long()[:, None]
    at = starts + torch.arange(seq)
    training = model.training
    loss = next_token_loss(model.eval()(ids[at]), ids[at + 1])
    model.train(training)
    return float(loss)


def main() -> None:
    torch.set_num_threads(1)  # on a busy machine two threads wait for each other longer than they work
    train, held_out = python_docs()
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / STEPS)))
    )
    started = time.perf_counter()
    for step, (inputs, targets) in enumerate(batches(train, BATCH, SEQ, STEPS, seed=1), start=1):
        optimizer.zero_grad()
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == STEPS:
            done, seconds = step / STEPS, time.perf_counter() - started
            bar = "#" * round(30 * done)
            told = f"loss {loss.item():.3f}, {seconds:.0f} s, {seconds / done - seconds:.0f} s left"
            print(f"\r[{bar:<30}] {step} of {STEPS} steps, {told}   ", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    kept = {name: tensor.half() for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(kept, _FILE, metadata={"torch": torch.__version__, "steps": str(STEPS)})
    print(f"{_FILE.name}: {_FILE.stat().st_size / 1e6:.2f} MB, held-out loss {validation_loss(pretrained_gpt(), held_out, 64):.3f}")


if __name__ == "__main__":
    main()
