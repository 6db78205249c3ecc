"""Hugging Face's Trainer on paceline: two lines before the TrainingArguments.

    paceline run --nproc 2 examples/hf_trainer.py

A small Llama, made from a configuration (nothing is downloaded), learns to count: the next number
follows from the one before. The Trainer stands on Accelerate, which wraps models in torch's
DistributedDataParallel, by name; ``paceline.install()`` makes that name mean ours.

Needs transformers and Accelerate: pip install 'transformers[torch]'.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from toy import start
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import paceline

NUMBERS, LENGTH = 32, 16


def counting(samples: int) -> list[dict[str, torch.Tensor]]:
    """Rows that count up from anywhere, and begin again at 0."""
    rows = torch.arange(samples)[:, None] + torch.arange(LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows % NUMBERS]


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUMBERS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    if "--torch" not in sys.argv:
        paceline.install()
        dist.init_process_group("paceline")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            max_steps=30,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(make_llama(), arguments, train_dataset=counting(256))
        trainer.train()
    if trainer.is_world_process_zero():
        wrapper = trainer.model_wrapped
        print(f"{type(wrapper).__module__}, {dist.group.WORLD}")
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print("losses", *(f"{float(loss):.4f}" for loss in losses))


if __name__ == "__main__":
    start(main)
