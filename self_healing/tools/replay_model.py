"""Model, trainer and weights for a replay."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer


class ReplayError(ValueError):
    """An incident that cannot be replayed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """The weights for a replay."""

    told: str
    exact: bool
    checkpoint: str | None
    tensors: Mapping[str, Any]


# What to write instead of the command.
IN_PYTHON = (
    "Please replay it with the trainer of your script, built and not yet trained:\n"
    "  import self_healing\n"
    "  trainer = ...  # as in your script\n"
    '  print(self_healing.replay("RUN_DIR", "INCIDENT", trainer=trainer))'
)
# Where a class named in a file may come from.
_LIBRARIES = ("transformers", "trl", "peft")
# How the arguments begin that belong to the machine, the data, the optimizer or the output, not to loss and gradient.
_NOT_OF_THE_LOSS = (
    *("output_dir", "use_cpu", "deepspeed", "fsdp", "parallelism_config", "accelerator_config", "ddp_", "local_rank"),
    *("debug", "hub_", "push_to_hub", "report_to", "resume_from_checkpoint", "load_best_model_at_end", "eval_"),
    *("do_eval", "save_", "logging_", "auto_find_batch_size", "optim", "lr_scheduler_", "warmup_", "train_sampling_"),
    *("torch_compile", "use_liger_kernel", "liger_kernel_", "model_init_", "ref_model_init_", "chat_template_path"),
    *("eos_token", "pad_token", "packing", "padding_free", "completion_only_loss", "assistant_only_loss", "dataset_"),
    *("use_vllm", "vllm_mode", "use_transformers_", "cast_lm_head", "generation_batch_size", "reward_weights"),
    *("log_completions", "precompute_ref_log_probs", "length_column_name", "dataloader_"),
)
# A row of what each trainer is made for: it is never computed, but a trainer is not built without.
_ROWS: Mapping[str, list[dict[str, Any]]] = {
    "SFTTrainer": [{"text": "a"}],
    "DPOTrainer": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    "RewardTrainer": [{"chosen": "ab", "rejected": "ac"}],
    "KTOTrainer": [{"prompt": "a", "completion": text, "label": text == "b"} for text in ("b", "c")],
    "GRPOTrainer": [{"prompt": "a"}],
    "RLOOTrainer": [{"prompt": "a"}],
}


def build_model(blueprint: Mapping[str, Any], weights: WeightsChoice, model: str | None, all_weights: bool) -> Any:
    """Builds the model of a run again, with weights in it that are those chosen, or that those chosen are put over."""
    written = blueprint["model"]
    cls = _library_class(written["class"])
    if cls is None or not hasattr(cls, "from_pretrained") or not written["config"]:
        raise ReplayError(
            f"The model is a {written['class'][1]} of {written['class'][0]}, which cannot be built from a "
            f"configuration. {IN_PYTHON}"
        )
    options = _options(written)
    adapters = written["adapters"]
    if all_weights and weights.tensors and model is None and not adapters:
        network = cls._from_config(cls.config_class.from_dict(written["config"]), **options)
    else:
        source = model or (None if adapters else weights.checkpoint) or _found(written["name_or_path"], blueprint)
        network = _from_pretrained(cls, source, options)
    # Reference models are loaded from where the model came from.
    network.config._name_or_path = _found(written["name_or_path"], blueprint) or ""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in written["frozen"])
    return _with_adapters(network, adapters, written["trained_dtype"]) if adapters else network


def _options(written: Mapping[str, Any]) -> dict[str, Any]:
    return {"dtype": getattr(torch, written["dtype"] or "float32"), "attn_implementation": written["attention"]}


def _from_pretrained(cls: Any, source: str | None, options: Mapping[str, Any]) -> Any:
    if not source:
        raise ReplayError(
            "Where the model came from is not known, and no checkpoint from before the incident is there. Please name "
            "one: --checkpoint PATH, or --model PATH for the model that training began with."
        )
    try:
        return cls.from_pretrained(source, **options)
    except Exception as error:
        raise ReplayError(
            f"The model could not be loaded from {source} ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Please name a place to load it from: --model PATH, or a name on the Hub."
        ) from error


def _with_adapters(network: Any, adapters: Mapping[str, Any], dtype: str | None) -> Any:
    from peft import PeftConfig, get_peft_model

    build: Any = PeftConfig.from_peft_type
    configs = {name: build(**values | {"inference_mode": False}) for name, values in adapters.items()}
    (first, config), *others = configs.items()
    made = get_peft_model(network, config, adapter_name=first)
    for name, config in others:
        made.add_adapter(name, config)
    for parameter in made.parameters():
        if parameter.requires_grad and dtype is not None:
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return made


def put_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Puts weights that were kept over those of a model."""
    state = model.state_dict(keep_vars=True)
    unknown = [name for name, tensor in tensors.items() if name not in state or state[name].shape != tensor.shape]
    if unknown:
        raise ReplayError(
            f"The model is not the one of the incident: {len(unknown)} of {len(tensors)} weights that were kept do "
            f"not fit it, {unknown[0]} for one. Please name the right one with --model, or weights with --checkpoint."
        )
    for name, tensor in tensors.items():
        state[name].data = tensor.to(state[name].device, copy=True)


def build_trainer(blueprint: Mapping[str, Any], model: Any, scratch: str, notes: list[str]) -> Any:
    """Builds a trainer of the same class, with the arguments that its loss and gradient depend on."""
    names = [name for _, name in blueprint["classes"]]
    if blueprint["own_loss"]:
        raise ReplayError(
            f"The loss was computed by code of your own ({names[0]}), which is stored in no file. {IN_PYTHON}"
        )
    cls, known = next(
        (found, name) for module, name in blueprint["classes"] if (found := _library_class([module, name])) is not None
    )
    if known != names[0]:
        notes.append(f"the trainer was a {names[0]}, and is a {known} here; both compute the loss alike")
    args = _arguments(cls, blueprint, scratch, notes)
    if cls is Trainer:
        return Trainer(model=model, args=args)
    rows = _ROWS.get(known)
    if rows is None:
        raise ReplayError(f"How a {known} is built again is not known. {IN_PYTHON}")
    from datasets import Dataset

    given: dict[str, Any] = {"train_dataset": Dataset.from_list(rows), "processing_class": _tokenizer(model)}
    if known in ("GRPOTrainer", "RLOOTrainer"):
        given["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    reference = blueprint.get("reference")
    if known in ("DPOTrainer", "KTOTrainer") and reference is not None:
        source = _found(reference["name_or_path"], blueprint)
        given["ref_model"] = _from_pretrained(_library_class(reference["class"]), source, _options(reference))
    trainer = cls(model=model, args=args, **given)
    if reference is not None and trainer.ref_model is not None:
        # One that was given in train mode has dropout, and draws random numbers.
        trainer.ref_model.train(reference["training"])
    return trainer


def _arguments(cls: type, blueprint: Mapping[str, Any], scratch: str, notes: list[str]) -> Any:
    own = (
        ["transformers", "TrainingArguments"] if cls is Trainer else ["trl", cls.__name__.replace("Trainer", "Config")]
    )
    # A dataclass of the user's own adds to one of a library.
    args_class = _library_class(blueprint["arguments_class"]) or _library_class(own)
    written = blueprint["arguments"]
    known = {each.name for each in dataclasses.fields(args_class) if each.init}
    taken = {name: value for name, value in written.items() if name in known and not name.startswith(_NOT_OF_THE_LOSS)}
    on_cpu = not torch.accelerator.is_available()
    for name in ("torch_compile", "use_liger_kernel"):
        if written.get(name):
            notes.append(f"{name} is off: hooks see into plain modules only, and numbers may round differently")
    wanted = blueprint["device"]
    here = "cpu" if on_cpu else str(torch.accelerator.current_accelerator())
    if here != wanted:
        notes.append(
            f"it was computed on {wanted}, and is on {here} here: numbers round differently, and dropout differs"
        )
    if blueprint["processes"] > 1:
        notes.append(f"it was one of {blueprint['processes']} processes: the others' rows are not in the gradient")
    plain = {"output_dir": scratch, "use_cpu": on_cpu, "report_to": [], "save_strategy": "no", "eval_strategy": "no"}
    return args_class(**taken, **plain, optim="sgd")


def _tokenizer(model: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens of a model: no text is tokenized that anything is made of."""
    config = (model.get_base_model() if hasattr(model, "peft_config") else model).config.get_text_config()
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id or 0
    pad = end if config.pad_token_id is None else config.pad_token_id
    words = {"<pad>": pad, "<eos>": end} if pad != end else {"<eos>": end}
    backend = Tokenizer(WordLevel(words, unk_token="<eos>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<eos>", eos_token="<eos>", pad_token="<pad>" if pad != end else "<eos>"
    )


def _library_class(name: list[str]) -> Any:
    module, qualname = name
    if module.partition(".")[0] not in _LIBRARIES:
        return None
    try:
        return getattr(importlib.import_module(module), qualname, None)
    except ImportError:
        return None


def _found(name_or_path: str | None, blueprint: Mapping[str, Any]) -> str | None:
    """Where the model came from: a relative path was one of the directory that the run was started in."""
    if not name_or_path:
        return None
    then = Path(blueprint["directory"], name_or_path)
    return str(then) if not Path(name_or_path).exists() and then.is_dir() else name_or_path
