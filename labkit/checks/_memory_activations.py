"""Check "memory.activations": what forward leaves for backward, by a formula of the sizes."""

from collections.abc import Callable
from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._memory_truth import activation_bytes, config_of, draw, near, number, random_config, told, with_
from labkit.gpt import GPT2_XL, GPTConfig

TOLERANCE = 0.05
CRITERIA = {"wide": "inside the blocks", "long": "attention weights", "loss": "the loss"}


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    groups = {}
    for kind, criterion in CRITERIA.items():
        groups[criterion] = [random_config(generator, kind=kind) | {"itemsize": 4} for _ in range(5 if strict else 3)]
    half = [random_config(generator, kind=kind) | {"itemsize": 2} for kind in CRITERIA]
    if strict:
        half.append({"config": vars(GPT2_XL), "batch": draw(generator, 1, 40), "seq": 1024, "itemsize": 2})
        half.append({"config": vars(with_(GPT2_XL, tied=False)), "batch": 1, "seq": draw(generator, 64, 512), "itemsize": 8})
    return [Case("many sizes", {"groups": groups | {"other sizes of a number": half}})]


def _probe(candidate: Any, case: Case) -> Observation:
    def ask(row: dict[str, Any]) -> float:
        extra = () if row["itemsize"] == 4 else (row["itemsize"],)
        return number(candidate(config_of(row["config"]), row["batch"], row["seq"], *extra), "activation_bytes")

    return Observation({"bytes": {name: [ask(row) for row in rows] for name, rows in case.values["groups"].items()}})


def _blocks(config: GPTConfig, batch: int, seq: int, size: int, per_width: float, per_score: float) -> float:
    tokens = batch * seq
    return config.layers * size * tokens * (per_width * config.width + per_score * config.heads * seq)


def usual_mistakes(config: GPTConfig, batch: int, seq: int, size: int) -> dict[str, tuple[float, ...]]:
    """hint -> what a count with that fault gives."""
    right, tokens = activation_bytes(config, batch, seq, size), batch * seq
    blocks: Callable[[float, float], float] = lambda width, score: _blocks(config, batch, seq, size, width, score)  # noqa: E731
    loss, tail = size * tokens * config.vocab, size * 2 * tokens * config.width
    return {
        "paper": tuple(base / 2 * (blocks(34, 5) + more) for base in (1, 2 / size) for more in (0, 2 * loss, 2 * (loss + tail))),
        "layers": (activation_bytes(with_(config, layers=1), batch, seq, size), right + (config.layers - 1) * loss),
        "dropout": tuple(right + more for more in (blocks(2, 2), blocks(2, 2) + tail / 2)),
        "outputs": tuple(right + more for more in (blocks(1, 0), blocks(2, 0), blocks(3, 0), blocks(4, 0), blocks(5, 0), blocks(6, 0))),
        "mlp": tuple(right - less for less in (blocks(4, 0), blocks(7, 0), blocks(8, 0))),
        "qkv": tuple(right - less for less in (blocks(2, 0), blocks(3, 0))),
        "scores-missing": (right - blocks(0, 1),),
        "scores-twice": (right + blocks(0, 1), right + blocks(0, 2)),
        "heads": tuple(right + blocks(0, tables / config.heads - 1) for tables in (1, config.width / config.heads)),
        "loss-missing": (right - loss, right - loss - tail),
        "logits": (right + loss, right + 2 * loss),
        "bytes": (right / size, right / size * 2, right * size),
        "half": (right * 4 / size,) if size != 4 else (),
        "batch": (activation_bytes(config, 1, seq, size),),
        "context": (activation_bytes(config, batch, config.context, size), right + blocks(0, config.context / seq - 1)),
    }


def _hint(rows: list[dict[str, Any]], answers: list[float], fallback: str) -> str:
    """The fault that explains the most of the answers: all of them within 1.5%, or the criterion's own question."""
    explained: set[str] | None = None
    for row, got in zip(rows, answers, strict=True):
        mistakes = usual_mistakes(config_of(row["config"]), row["batch"], row["seq"], row["itemsize"])
        mask = row["config"]["layers"] * row["seq"] ** 2  # counted or not
        here = {hint for hint, values in mistakes.items() if any(near(got + more, v, 0.015) for v in values for more in (0, mask))}
        explained = here if explained is None else explained & here
    return next((hint for hint in mistakes if hint in (explained or ())), fallback)


def _judge(case: Case, seen: Observation) -> list[Finding]:
    groups, answers = case.values["groups"], seen.values["bytes"]
    fp32 = [name for name in groups if name in CRITERIA.values()]
    # One fault that explains every answer in fp32 is told from others that look alike where blocks, or attention, or the loss prevail.
    common = _hint([row for name in fp32 for row in groups[name]], [got for name in fp32 for got in answers[name]], "")
    return [_judge_group(name, rows, answers[name], common if name in fp32 else "") for name, rows in groups.items()]


def _judge_group(criterion: str, rows: list[dict[str, Any]], answers: list[float], common: str) -> Finding:
    worst = 0.0
    fallback = {"inside the blocks": "blocks", "attention weights": "scores", "the loss": "loss"}.get(criterion, "half")
    for row, got in zip(rows, answers, strict=True):
        config = config_of(row["config"])
        right = activation_bytes(config, row["batch"], row["seq"], row["itemsize"])
        worst = max(worst, abs(got - right) / right)
        if not near(got, right, TOLERANCE):
            sizes = f"{config.layers} layers of width {config.width}, {config.heads} heads, vocabulary {config.vocab}"
            where = f"{told(got)} ({got / right:.2f} times) for {sizes}, {row['batch']} sequences of {row['seq']}"
            if row["itemsize"] != 4:
                where += f", {row['itemsize']} bytes per number"
            return Finding(criterion, False, f"{told(right)}, within 5%", where, common or _hint(rows, answers, fallback))
    return Finding(criterion, True, "within 5% of the recorder", f"within {worst:.1%}")


def _summary(case: Case, seen: Observation) -> str:
    errors = []
    for name, rows in case.values["groups"].items():
        for row, got in zip(rows, seen.values["bytes"][name], strict=True):
            right = activation_bytes(config_of(row["config"]), row["batch"], row["seq"], row["itemsize"])
            errors.append(abs(got - right) / right)
    return f"within {max(errors):.2%} of the recorder (at most 5%)"


register(Check(
    "memory.activations",
    criteria=(
        Criterion("inside the blocks", "technique", 1.25, "recomputed"),
        Criterion("attention weights", "technique", 0.75, "recomputed"),
        Criterion("the loss", "technique", 0.5, "recomputed"),
        Criterion("other sizes of a number", "technique", 0.5, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints={
        "blocks": "Set your formula for one layer beside the list that `kept` prints for one layer. Which line is missing, or there twice?",
        "paper": "That formula was counted on another graph: dropout, a fused mask of one byte, 16 bit. Which tensors does this one save?",
        "outputs": "One layer's output is the next one's input. Is it a new tensor, or one that you have counted already?",
        "dropout": "Your count has dropout's masks in it. What does dropout do, and keep, when its probability is 0?",
        "mlp": "The MLP is four times as wide inside. Which tensors of that width does its backward need: before GELU, after it, or both?",
        "qkv": "Which of query, key and value does the backward of attention need, and are they one tensor or three?",
        "scores": "The table of attention weights has an entry for each pair of tokens. How many such tables does one layer keep?",
        "scores-missing": "Double the sequence with the recorder on. Which kept tensors grow fourfold?",
        "scores-twice": "Softmax needs one of its two sides in backward. Which of the tables of attention can go?",
        "heads": "Each head attends for itself. How many tables of seq by seq does a layer have?",
        "loss": "Take a vocabulary of thousands. What is the largest tensor of the whole step, and how many of that size stay?",
        "loss-missing": "What is the largest tensor of the step when the vocabulary is large?",
        "logits": "Backward of the loss needs probabilities. Does it need the logits, too, and does anything still hold them?",
        "bytes": "Your number is off by the same factor everywhere. Is it a count of numbers or of bytes?",
        "half": "Which of your terms shrink when a number takes fewer bytes?",
        "batch": "Which of your terms grow with the number of sequences?",
        "layers": "Which of your terms are there once, and which once per layer?",
        "context": "Does a step compute on the longest possible sequence, or on the one that it got?",
    },
    forbids=("labkit.gpt.GPT",),
    summary=_summary,
))  # fmt: skip
