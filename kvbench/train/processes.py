"""The processes of one training, as transformers and accelerate find them: alone, or by torchrun or accelerate launch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed
from transformers import TrainingArguments

from kvbench.core.errors import KvbenchError
from kvbench.train.recipe import Recipe

_DECIDED = (
    "output_dir", "max_steps", "seed", "use_cpu", "gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16",
    "gradient_checkpointing", "activation_checkpointing", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "logging_strategy", "save_strategy", "eval_strategy", "per_device_train_batch_size", "num_train_epochs",
)  # fmt: skip
"""Arguments of transformers that a recipe has its own settings for, or that kvbench decides."""


class Processes:
    """This process among those that train together.

    Args:
        device: where the model was loaded; in a launched training, each process's own.
        recipe: settings.
        out: folder of the training.
        seed: of the training.

    Raises:
        KvbenchError: the recipe's further arguments are wrong.
    """

    def __init__(self, device: torch.device, recipe: Recipe, out: Path, seed: int) -> None:
        for name in recipe.trainer:
            if name in _DECIDED:
                raise KvbenchError(f"The recipe setting 'trainer.{name}' is kvbench's own; leave it out.")
        try:
            self.arguments = TrainingArguments(
                output_dir=str(out),
                max_steps=recipe.steps,
                seed=seed % 2**32,
                use_cpu=device.type == "cpu",
                gradient_accumulation_steps=recipe.accumulation,
                max_grad_norm=recipe.clip,
                # Gradients are clipped, losses read back, states saved and evaluations run by kvbench's own rules.
                logging_strategy="no",
                save_strategy="no",
                eval_strategy="no",
                logging_nan_inf_filter=False,
                disable_tqdm=True,
                dataloader_pin_memory=False,
                remove_unused_columns=False,
                **{
                    "report_to": "none",
                    "log_level": "error",
                    "ddp_find_unused_parameters": False,
                    **({"ddp_backend": "gloo"} if device.type == "cpu" and "WORLD_SIZE" in os.environ else {}),
                    **recipe.trainer,
                },
            )
        except (TypeError, ValueError) as error:
            raise KvbenchError(f"The recipe setting 'trainer' does not fit transformers: {error}") from error
        self.device = self._device(device)
        self.rank: int = self.arguments.process_index
        self.count: int = self.arguments.world_size
        if self.arguments.fsdp and self.count == 1:
            raise KvbenchError(
                "The recipe shards the model (trainer.fsdp), which takes several processes: launch it with "
                "'torchrun --nproc-per-node N -m kvbench train ...', or add --set trainer.fsdp=false."
            )

    def _device(self, loaded: torch.device) -> torch.device:
        found: torch.device = self.arguments.device
        if self.arguments.world_size == 1:
            # Left alone, transformers takes the first of all GPUs and copies the model to the others.
            self.arguments.__dict__["_setup_devices"] = loaded
            self.arguments._n_gpu = min(1, self.arguments._n_gpu)
            if loaded.index is not None:
                torch.cuda.set_device(loaded)
            return loaded
        return found

    @property
    def is_first(self) -> bool:
        """Whether this one writes and reports."""
        return self.rank == 0

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process runs the block before the others do."""
        with self.arguments.main_process_first(local=False):
            yield

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            distributed.barrier()

    def sums(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Each scalar summed over all processes: one exchange and one wait for the device."""
        if not values:
            return {}
        stacked = self.summed(torch.stack([value.detach().float() for value in values.values()]))
        return dict(zip(values, stacked.tolist(), strict=True))

    def summed(self, tensor: Tensor) -> Tensor:
        """A tensor summed over all processes, without waiting for the device."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor
