"""What training a policy leaves: a folder with a JSON file, scorer weights and adapted LM weights; no pickle.

    kvbench_policy.json       what was trained, for which model, how; SHA-256 of the other two files
    scorer.safetensors        fp32 weights of one scorer a layer; absent for policies without
    adapted_lm.safetensors    bf16 weights of the LM; absent if the LM was not trained

The JSON file is written last, so that a folder with it is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from kvbench.core.errors import KvbenchError, canonical
from kvbench.core.policy import Geometry, LearnedPolicy
from kvbench.entries import PolicyEntry
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry

FORMAT_VERSION = 1
MANIFEST = "kvbench_policy.json"
SCORER = "scorer.safetensors"
ADAPTED_LM = "adapted_lm.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A trained policy.

    Attributes:
        policy_name: as registered.
        parameters: hyper-parameters of the policy, JSON values.
        base_model: name of the model that it was trained for.
        weights_hash: of that model (`LoadedModel.weights_hash`).
        geometry: of that model.
        trained_budgets: `crs` as fractions and the `reference_lengths` they were taken of.
        recipe: settings of the training, seed included.
        training: summary of the training: losses and measurements on held-back problems.
        kv_dtype: of the cached keys and values for which state was charged to the budget.
        state_dtype: in which the policy's state was charged.
        variant: what the training changed of its recipe, as `name=value, ...`; tables show it beside the policy.
        scorer_weights: state dict of the ModuleList of scorers.
        lm_weights: adapted LM parameters by name.
        hash: SHA-256 over the files; empty for a checkpoint that was never written.
    """

    policy_name: str
    parameters: Mapping[str, Any]
    base_model: str
    weights_hash: str
    geometry: Geometry
    trained_budgets: Mapping[str, Any]
    recipe: Mapping[str, Any]
    training: Mapping[str, Any]
    kv_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    variant: str = ""
    scorer_weights: Mapping[str, Tensor] | None = field(default=None, repr=False)
    lm_weights: Mapping[str, Tensor] | None = field(default=None, repr=False)
    hash: str = ""

    @classmethod
    def load(cls, path: str | Path) -> Checkpoint:
        """Reads a checkpoint folder onto the CPU.

        Raises:
            KvbenchError: it is missing, damaged, incomplete, or of another format.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise KvbenchError(f"There is no checkpoint folder {folder}; train one with 'kvbench train'.")
        if not (folder / MANIFEST).is_file():
            raise KvbenchError(f"{folder} is not a checkpoint: it has no {MANIFEST}.")
        text = _read(folder / MANIFEST)
        manifest = _parse(folder / MANIFEST, text)
        hashes = manifest.pop("files", {})
        try:
            geometry = Geometry(**manifest.pop("geometry"))
            weights = {name: _load_weights(folder / name, sha) for name, sha in hashes.items()}
            digest = hashlib.sha256(b"".join([text, *(hashes[name].encode() for name in sorted(hashes))])).hexdigest()
            return cls(
                **manifest,
                geometry=geometry,
                scorer_weights=weights.get(SCORER),
                lm_weights=weights.get(ADAPTED_LM),
                hash=digest,
            )
        except (TypeError, AttributeError, KeyError) as error:
            raise KvbenchError(
                f"{folder / MANIFEST} is damaged: its fields are not those of a checkpoint ({error})."
            ) from error

    def save(self, path: str | Path) -> Checkpoint:
        """Writes the folder, the JSON file last and each file at once; returns what `load` makes of it."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        hashes = {}
        for name, weights in ((SCORER, self.scorer_weights), (ADAPTED_LM, self.lm_weights)):
            if weights is None:
                (folder / name).unlink(missing_ok=True)
                continue
            data = save_tensors({key: value.detach().cpu().contiguous() for key, value in weights.items()})
            hashes[name] = hashlib.sha256(data).hexdigest()
            write_atomically(folder / name, data)
        left_out = {"scorer_weights", "lm_weights", "hash"}
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        manifest = {
            "format_version": FORMAT_VERSION,
            **fields,
            "geometry": dataclasses.asdict(self.geometry),
            "files": hashes,
        }
        write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
        return Checkpoint.load(folder)

    def require(self, loaded: LoadedModel, policy_name: str | None = None) -> None:
        """Checks that this checkpoint is for a model, as far as its weights are known, and, if named, for a policy.

        Raises:
            KvbenchError: it is for another one.
        """
        if policy_name is not None and checkpoint_of(policy_name) != self.policy_name:
            raise KvbenchError(
                f"The checkpoint is for policy '{self.policy_name}', not for '{canonical(policy_name)}'; "
                "pass one that was trained for it."
            )
        if loaded.geometry != self.geometry:
            raise KvbenchError(
                f"The checkpoint is for a model with {_sizes(self.geometry)}, "
                f"but '{loaded.name}' has {_sizes(loaded.geometry)}."
            )
        if loaded.weights_hash and loaded.weights_hash != self.weights_hash:
            raise KvbenchError(
                f"The checkpoint is for model '{self.base_model}' with weights {self.weights_hash[:12]}, "
                f"but '{loaded.name}' has weights {loaded.weights_hash[:12]}; train one for this model."
            )

    def policy(self, name: str | None = None) -> LearnedPolicy:
        """The policy, or another one that runs on its checkpoints, with the hyper-parameters that it was trained with."""
        return build_policy(load_registry().policy(name or self.policy_name), self.parameters)

    def scorers(self, geometry: Geometry) -> nn.ModuleList | None:
        """One trained scorer a layer, in eval mode on the CPU; None for a policy without.

        Raises:
            KvbenchError: the stored weights have other names or shapes than the policy's scorers.
        """
        modules = make_scorers(self.policy(), geometry)
        if modules is None and self.scorer_weights is None:
            return None
        if modules is None or self.scorer_weights is None:
            has = "has no scorer weights" if self.scorer_weights is None else "has scorer weights"
            needs = "needs none" if modules is None else "needs them"
            raise KvbenchError(f"The checkpoint {has}, but policy '{self.policy_name}' {needs}.")
        expected = {name: tuple(tensor.shape) for name, tensor in modules.state_dict().items()}
        _same_shapes(f"Scorer weights of the checkpoint for '{self.policy_name}'", self.scorer_weights, expected)
        modules.load_state_dict(dict(self.scorer_weights))
        return modules.requires_grad_(False).eval()

    @contextmanager
    def adapted(self, model: nn.Module) -> Iterator[None]:
        """Runs `model` with the adapted weights inside the block, and exactly as it was afterwards.

        Weights are copied in place: whatever has captured their addresses stays valid. The model's own wait in the
        host's memory, so that a device never holds both. Nothing happens if the LM was not trained.

        Raises:
            KvbenchError: the adapted weights have other names or shapes than the model's.
        """
        if self.lm_weights is None:
            yield
            return
        parameters = dict(model.named_parameters())
        expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        _same_shapes("Adapted LM weights of the checkpoint", self.lm_weights, expected)
        saved = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}
        try:
            _copy_into(parameters, self.lm_weights)
            yield
        finally:
            _copy_into(parameters, saved)


def build_policy(entry: PolicyEntry, parameters: Mapping[str, Any]) -> LearnedPolicy:
    """Makes a learned policy from its entry and hyper-parameters as JSON values.

    Raises:
        KvbenchError: the entry is not a learned policy, or does not have these hyper-parameters.
    """
    policy_class = entry.load()
    if not (isinstance(policy_class, type) and issubclass(policy_class, LearnedPolicy)):
        raise KvbenchError(
            f"Policy '{entry.name}' is not a learned policy, so there is nothing to train or to load for it."
        )
    known = {f.name for f in dataclasses.fields(policy_class) if f.init}
    unknown = sorted(set(parameters) - known)
    if unknown:
        has = ", ".join(sorted(known)) or "none"
        raise KvbenchError(f"Policy '{entry.name}' has no parameter '{unknown[0]}'; it has {has}.")
    # JSON has lists only; a hashable policy holds tuples.
    return policy_class(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in parameters.items()}
    )


def make_scorers(policy: LearnedPolicy, geometry: Geometry) -> nn.ModuleList | None:
    """Fresh scorers, one a layer; None for a policy without."""
    scorers = [policy.scorer(geometry) for _ in range(geometry.layers)]
    modules = [scorer for scorer in scorers if scorer is not None]
    return nn.ModuleList(modules) if modules else None


def checkpoint_of(policy_name: str) -> str:
    """The policy whose checkpoints a policy runs on: usually itself."""
    entry = load_registry().policy(policy_name)
    return entry.runs_on or entry.name


def shipped(policy_name: str, model_name: str) -> Path | None:
    """The checkpoint that comes with a policy for a named model; None if there is none.

    It lies in the distribution that defines the policy: `PACKAGE/checkpoints/MODEL/POLICY`.
    """
    entry = load_registry().policy(checkpoint_of(policy_name))
    package = entry.target.partition(":")[0].partition(".")[0]
    # A wheel is unpacked when it is installed, so the resource is a real folder.
    folder = Path(str(files(package))) / "checkpoints" / canonical(model_name) / entry.name
    return folder if (folder / MANIFEST).is_file() else None


def find_checkpoint(policy_name: str, model_name: str, given: str | Path | None = None) -> Path:
    """The checkpoint folder to use: the given one, else the one that is shipped.

    Raises:
        KvbenchError: none is given and none is shipped.
    """
    if given is not None:
        return Path(given)
    found = shipped(policy_name, model_name)
    if found is None:
        raise KvbenchError(
            f"Policy '{policy_name}' has no checkpoint for model '{model_name}'; "
            f"train one (kvbench train --policy {checkpoint_of(policy_name)} --model {model_name} --out DIR) "
            "or pass one (--checkpoint DIR)."
        )
    return found


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file that is, at any moment, the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise KvbenchError(f"The checkpoint is incomplete: {path} is missing.") from error
    except OSError as error:
        raise KvbenchError(f"Cannot read {path}: {error.strerror}.") from error


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise KvbenchError(f"{path} is damaged: it is not JSON.") from error
    if not isinstance(manifest, dict):
        raise KvbenchError(f"{path} is damaged: it is not a JSON object.")
    version = manifest.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise KvbenchError(f"{path} has format version {version}; this kvbench reads version {FORMAT_VERSION}.")
    return manifest


def _load_weights(path: Path, sha: str) -> dict[str, Tensor]:
    data = _read(path)
    if hashlib.sha256(data).hexdigest() != sha:
        raise KvbenchError(f"{path} is damaged: its content is not what {MANIFEST} says it is.")
    return load_tensors(data)


def _same_shapes(what: str, stored: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted(set(stored) ^ set(expected)):
        found = "an unexpected" if name in stored else "no"
        raise KvbenchError(f"{what} do not fit: there is {found} tensor '{name}'.")
    for name, tensor in stored.items():
        if tuple(tensor.shape) != expected[name]:
            raise KvbenchError(f"{what} do not fit: '{name}' has shape {tuple(tensor.shape)}, not {expected[name]}.")


@torch.no_grad()
def _copy_into(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def _sizes(geometry: Geometry) -> str:
    return f"{geometry.layers} layers, {geometry.query_heads}/{geometry.kv_heads} heads of {geometry.head_dim}"
