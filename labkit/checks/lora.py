"""Checks of lab 11, LoRA: a small update to frozen weights (Hu et al. 2021, arXiv 2106.09685)."""

from labkit.checks import (  # noqa: F401  they register their checks
    _lora_adapter,
    _lora_inject,
    _lora_linear,
    _lora_merge,
)
