"""The suite's workloads. Those that take long to compile come first in a run, whatever their order
here."""

from __future__ import annotations

from benchmarks.steps import large, learning, small
from benchmarks.steps.program import StepWorkload

STEPS: list[StepWorkload] = [
    StepWorkload("mlp", 64, small.mlp, small.mlp_batch),
    StepWorkload("transformer", 8, small.transformer, small.tokens),
    StepWorkload("ppo", 256, learning.ppo, learning.ppo_batch),
    StepWorkload("resnet18", 16, large.resnet("resnet18"), large.images(64)),
    StepWorkload("lstm", 32, small.lstm, small.tokens),
    StepWorkload("dcgan", 64, learning.dcgan, learning.dcgan_batch),
    StepWorkload("sac", 256, learning.sac, learning.sac_batch),
    StepWorkload("bert", 8, large.bert, large.sentences),
    StepWorkload("resnet50", 32, large.resnet("resnet50"), large.images(224)),
    StepWorkload("gpt2_lora", 4, large.lora, large.text),
]
