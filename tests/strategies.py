"""How jobs on several ranks are trained: DDP, FSDP2 and ZeRO, all of them on the CPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from two_sharded_processes import sharded_on_the_cpu, whole
from two_zero_processes import config_of, zero_on_the_cpu

from self_healing.hf.deepspeed import engine_of
from self_healing.hf.state import local


STATE_DICTS = {"fsdp2_full": "FULL_STATE_DICT", "fsdp2_sharded": "SHARDED_STATE_DICT"}
# The stage, and whether in bf16.
ZERO = {"zero1": (1, False), "zero2": (2, True), "zero3": (3, True)}
STRATEGIES = ("ddp", *STATE_DICTS, *ZERO)
# Of a checkpoint each rank writes its own part.
IN_PARTS = {"fsdp2_sharded", *ZERO}
WITH_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed (`make test-deepspeed`)"
)


def prepare(strategy: str) -> None:
    """Has this process train in one of these ways."""
    if strategy in STATE_DICTS:
        os.environ["FSDP_STATE_DICT_TYPE"] = STATE_DICTS[strategy]
        sharded_on_the_cpu("fsdp2")
    elif strategy in ZERO:
        zero_on_the_cpu()


def arguments_of(strategy: str) -> dict[str, Any]:
    """What the trainer is given for it, each time that one is made."""
    if strategy not in ZERO:
        return {"ddp_backend": "gloo"}
    # Of the trainer before.
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    stage, bf16 = ZERO[strategy]
    return {"ddp_backend": "gloo", "use_cpu": False, "bf16": bf16, "deepspeed": config_of(stage)}


def trained_as(trainer: Any) -> str:
    """Tells how a trainer trains, by what it has made."""
    engine = engine_of(trainer)
    if engine is not None:
        return f"zero{engine.zero_optimization_stage()}"
    return "fsdp2" if all(isinstance(each, DTensor) for each in trainer.model.parameters()) else "ddp"


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Gathers the weights; under ZeRO also in the precision that they are updated in. Collective."""
    if engine_of(trainer) is None:
        return {name: whole(value) for name, value in trainer.model.state_dict().items()}
    import deepspeed

    parameters = dict(trainer.model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        weights = {name: each.detach().float().clone() for name, each in parameters.items()}
    masters = {f"{name}, master": deepspeed.utils.safe_get_full_fp32_param(each) for name, each in parameters.items()}
    return weights | masters


def own_weights(trainer: Any, layer: torch.nn.Module) -> list[torch.Tensor]:
    """What this rank keeps of the weights of a layer, and updates: to be written to."""
    parameters = list(layer.parameters())
    if engine_of(trainer) is None:
        return [local(each.data) for each in parameters]
    if hasattr(parameters[0], "ds_id"):
        return [each._z3_optimizer._get_fp32_opt_state_partition(each, False)[0].data for each in parameters]
    fragments = [each._hp_mapping for each in parameters]
    return [each.get_hp_fragment().data for each in fragments if each is not None]
