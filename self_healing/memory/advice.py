"""Words for an out-of-memory error: how much did not fit, and what to do about it."""

from __future__ import annotations

from ..failures.recipes import FAILURE_RECIPES, FailureType
from ..hf.batches import CallShape
from ..hf.memory import OutOfMemory


# What has become of the batches that are kept, by whether it was the host's memory that ran out.
BATCHES_MOVED = {
    False: "{:.1f} MB of batches, kept to compute earlier steps again, are in host memory from here on",
    True: "{:.1f} MB of batches were given up: until the next snapshot a rollback loses the steps since the last one",
}

OPTIMIZER_ADVICE = (
    "(1) Take an optimizer with smaller state or with paging (8-bit, Adafactor, paged AdamW), or train fewer weights "
    "(LoRA). (2) Take one whose update needs no extra memory (fused). (3) Check whether another process uses the "
    "device."
)

SMALLER_BATCHES = (
    "Please lower per_device_train_batch_size and raise gradient_accumulation_steps, or set "
    "gradient_checkpointing=True."
)

ENGINE_ADVICE = (
    "(1) Lower vllm_gpu_memory_utilization, the share of memory that the engine reserves, or set "
    "vllm_enable_sleep_mode=True, which releases it during training steps. (2) Shorten max_completion_length and "
    "vllm_max_model_length. (3) Have vLLM generate on another device (vllm_mode='server')."
)


def advice_on(ran_out: OutOfMemory, alone: bool) -> str:
    """Gives three things to try."""
    if ran_out.place == "evaluation":
        return (
            "Only the evaluation did not fit. (1) Lower per_device_eval_batch_size. (2) Set eval_accumulation_steps, "
            "so that predictions are moved to the host. (3) Evaluate on shorter rows, or without predictions "
            "(prediction_loss_only=True)."
        )
    if ran_out.place == "generation":
        return (
            "(1) Shorten max_completion_length, or the prompts. (2) Use less permanent memory: LoRA, weights "
            "in bf16, an 8-bit optimizer. (3) Generate elsewhere (vLLM on another device)."
        )
    smaller = (
        "Halve per_device_train_batch_size and double gradient_accumulation_steps, or let SelfHealingTrainer do it. "
        if alone
        else ""
    )
    return smaller + FAILURE_RECIPES[FailureType.OUT_OF_MEMORY].advice


def size_in_words(shape: CallShape | None) -> str:
    """Names the call that did not fit."""
    return "the size of what ran is not known" if shape is None else f"{shape} (rows x padded length) did not fit"


def figures_in_words(ran_out: OutOfMemory) -> str:
    """Gives how much memory was in use, and how much was asked for."""
    figures = ran_out.figures
    asked = "" if ran_out.requested is None else f"{ran_out.requested / 1e9:.2f} GB asked for, "
    if "allocated" in figures:
        return (
            f"{asked}{figures['allocated'] / 1e9:.2f} GB allocated ({figures['peak'] / 1e9:.2f} GB at most), "
            f"{figures['reserved'] / 1e9:.2f} GB reserved, {figures['free'] / 1e9:.2f} of "
            f"{figures['total'] / 1e9:.2f} GB free"
        )
    return (
        f"{asked}{figures['host_used'] / 1e9:.2f} GB in use by this process, "
        f"{figures['host_available'] / 1e9:.2f} GB available"
    )
