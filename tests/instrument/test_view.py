"""What a trainer is asked before its calls are split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

from self_healing.hf.objective import Objective
from self_healing.hf.patching import Replacements
from self_healing.hf.view import TrainerView


class Sharded(TrainerView):
    """Of a model whose weights are DTensors."""

    has_flat_parameters = False


def view_of(
    view: type[TrainerView] = TrainerView,
    name: str = "SFTTrainer",
    objective: str = "sft",
    distributed: DistributedType = DistributedType.MULTI_GPU,
    **attributes: Any,
) -> TrainerView:
    accelerator = SimpleNamespace(device=torch.device("cpu"), distributed_type=distributed)
    made = type(name, (SimpleNamespace,), {})(
        accelerator=accelerator,
        args=SimpleNamespace(n_gpu=attributes.pop("n_gpu", 1)),
        model=torch.nn.Linear(2, 2),
        compute_loss_func=attributes.pop("compute_loss_func", None),
    )
    return view(made, Objective(objective), Replacements())


def test_calls_are_split_under_ddp_whatever_the_loss() -> None:
    for view in (view_of(), view_of(objective="unknown"), view_of(compute_loss_func=print)):
        assert view.can_split_calls
        assert view.why_not_split == ""


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (view_of(n_gpu=2), "nn.DataParallel makes replicas"),
        (view_of(distributed=DistributedType.FSDP), "FSDP1 has the weights in flat parameters"),
        (
            view_of(Sharded, compute_loss_func=print, distributed=DistributedType.FSDP),
            "a loss of one's own cannot be computed in parts",
        ),
        (
            view_of(Sharded, "KTOTrainer", "kto", distributed=DistributedType.FSDP),
            "whether the loss of KTOTrainer can be computed in parts is not known",
        ),
    ],
)
def test_calls_that_are_not_split_say_why(view: TrainerView, why: str) -> None:
    assert not view.can_split_calls
    assert why in view.why_not_split


def test_calls_of_a_sharded_model_are_split_where_its_loss_is_known() -> None:
    assert view_of(Sharded, distributed=DistributedType.FSDP).can_split_calls


def test_the_norm_that_is_clipped_to_is_deepspeeds_own_where_it_steps() -> None:
    view = view_of()
    trainer = view._trainer
    trainer.args.max_grad_norm = 5.0
    assert view.max_grad_norm == 5.0
    # Without `gradient_clipping` in its configuration it has a norm of its own.
    engine = SimpleNamespace(gradient_clipping=lambda: 1.0)
    trainer.accelerator.deepspeed_engine_wrapped = SimpleNamespace(engine=engine)
    assert view.max_grad_norm == 1.0
