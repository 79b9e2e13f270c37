"""A user's own transformers model under a policy: what stands behind `kvbench.evict`.

Inside the context three things are different about the model, and all three are put back: its attention goes through the
engine, a forward pre-hook replaces the cache of every call by an `EvictedCache`, and the weights are a checkpoint's if
that has any. Everything else, `generate` with its sampling and stopping included, is transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvbench.core.errors import KvbenchError
from kvbench.engine import attention
from kvbench.engine.evicted import EvictedCache
from kvbench.engine.run import Setting, contact, refuse_unsupported
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.source import LoadedModel, geometry_of


class Eviction:
    """What `kvbench.evict` yields: what the newest batch of sequences holds.

    A batch stays until the next one starts. `generate(..., return_dict_in_generate=True)` returns a batch's cache, which has
    the same attributes and can be handed to another call to go on.
    """

    def __init__(self, setting: Setting, seed: int) -> None:
        self._setting = setting
        self._seed = seed
        self._newest: EvictedCache | None = None
        self._mine: WeakSet[EvictedCache] = WeakSet()
        self._by_given: WeakKeyDictionary[Cache, EvictedCache] = WeakKeyDictionary()
        self._parameters = tuple(inspect.signature(setting.loaded.model.forward).parameters)
        # The name changed between releases of transformers.
        self._cache_name = "cache" if "cache" in self._parameters else "past_key_values"

    @property
    def positions(self) -> tuple[Tensor, ...]:
        """Positions that each layer with a policy holds [R, H, B], int32, negative where a slot is empty."""
        return () if self._newest is None else self._newest.positions

    @property
    def tokens_seen(self) -> tuple[int, ...]:
        """Tokens that each row has read, padding not counted."""
        return () if self._newest is None else self._newest.tokens_seen

    @property
    def bytes_held(self) -> int:
        """Bytes of all slots with their metadata and of the policy's state, those of sliding-window layers included."""
        return 0 if self._newest is None else self._newest.bytes_held

    def before_call(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """The forward pre-hook: what `model` is called with instead."""
        kwargs = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        given = [kwargs.pop(name, None) for name in ("cache", "past_key_values")]
        cache = self._cache_for(given[0] if given[0] is not None else given[1])
        tokens = kwargs.get("input_ids")
        rows, columns = (kwargs["inputs_embeds"] if tokens is None else tokens).shape[:2]
        positions = cache.feed(rows, columns, kwargs.pop("attention_mask", None))
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions
        return (), {**kwargs, self._cache_name: cache, "kvbench": cache}

    def _cache_for(self, given: object) -> EvictedCache:
        if isinstance(given, EvictedCache):
            if given not in self._mine:
                raise KvbenchError(
                    "This cache belongs to another kvbench.evict context; a cache goes on in its own alone."
                )
            self._newest = given
        elif given is None:
            self._newest = self._fresh()
        elif type(given) is not DynamicCache or given.offloading or given.get_seq_length() > 0:
            raise KvbenchError(
                f"The model was called with a cache of its own ({type(given).__name__}); kvbench.evict brings the cache: "
                "leave out cache_implementation and past_key_values."
            )
        elif getattr(given, "_is_user_defined", False):
            raise KvbenchError(
                "Under kvbench.evict, generate takes no DynamicCache: to go on with a sequence, pass the cache that "
                "generate(..., return_dict_in_generate=True) returned."
            )
        else:
            # generate makes an empty one for each call; a loop of one's own may pass the same one again and again.
            if given not in self._by_given:
                self._by_given[given] = self._fresh()
            self._newest = self._by_given[given]
        return self._newest

    def _fresh(self) -> EvictedCache:
        # The batch before is given up first, so that two never take memory at once.
        self._newest = None
        fresh = EvictedCache(self._setting, self._seed)
        self._mine.add(fresh)
        return fresh


def loaded_from(model: object) -> LoadedModel:
    """A model that its user loaded, as the engine gets it.

    Raises:
        KvbenchError: it is not a decoder-only transformers model, lies on several devices, is compiled, or is in use already.
    """
    if not isinstance(model, PreTrainedModel):
        raise KvbenchError(
            f"kvbench.evict takes a transformers model, not {type(model).__name__}; of a wrapped or compiled one, pass what "
            "is inside."
        )
    name = str(model.config._name_or_path or type(model).__name__)
    name = Path(name).name if Path(name).is_dir() else name
    if model.config.is_encoder_decoder or model.config.get_text_config() is not model.config:
        raise KvbenchError(
            f"Model '{name}' ({type(model).__name__}) is more than a decoder; kvbench.evict takes those only."
        )
    if model.config._attn_implementation == attention.NAME:
        raise KvbenchError(f"Model '{name}' runs under kvbench already; leave that context before you enter another.")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise KvbenchError(
            f"Model '{name}' lies on {' and '.join(devices)}; kvbench.evict needs it on one device (device_map={{'': 0}})."
        )
    if model._compiled_call_impl is not None:
        raise KvbenchError(f"Model '{name}' is compiled; kvbench.evict needs it as it was before model.compile().")
    refuse_unsupported(model, name)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=None,
        geometry=geometry_of(model.config),
        weights_hash="",
        random=False,
        eos=frozenset(),
        max_positions=int(model.config.max_position_embeddings),
        device=torch.device(devices[0]),
        dtype=model.dtype,
    )


@contextmanager
def evicting(setting: Setting, seed: int, checkpoint: Checkpoint | None) -> Iterator[Eviction]:
    """Runs the setting's model under the setting's policy, and leaves it exactly as it was."""
    model = setting.loaded.model
    eviction = Eviction(setting, seed)
    with ExitStack() as restored:
        if checkpoint is not None:
            restored.enter_context(checkpoint.adapted(model))
        restored.enter_context(contact(setting.loaded))
        hook = model.register_forward_pre_hook(eviction.before_call, with_kwargs=True)
        restored.callback(hook.remove)
        yield eviction
