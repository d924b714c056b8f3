"""LoRA with peft: adapters are added to the student's own layers, so every forward pass uses them, packed ones too.

    trained, kept by the optimizer    lora_A, lora_B of each target                   float32
    sent to actors                    W + alpha / rank * B A, under the student's names, computed one matrix at a time;
                                      to servers that load adapters, lora_A and lora_B alone
    in a checkpoint                   the adapters in peft's format, and which student they belong to (base.json)

With W in 4 bits (`lora.quantize`, QLoRA) all of this is of W as it is there, not as it was: what is sent and exported
is the policy that was trained, and `base.json` says how W was quantized.

There is no dropout, because the policy that is trained must be the one that samples.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stillhouse.learner.config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig
from stillhouse.models.description import Quantized
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.atomic_file import usual_permissions
from stillhouse.weights.staged_weights import Merged, tensor_of

BASE: Final = "base.json"
_ADAPTER: Final = "default"
"""Peft's name for the only adapter of a model."""
_BASE_LAYER: Final = ".base_layer"
"""Part that peft adds to the parameter names of a layer with an adapter."""
_NAMES_IN_ERROR: Final = 8


class LoraError(ValueError):
    """These adapters do not fit this student."""


class BaseModel(msgspec.Struct, frozen=True):
    """base.json: the weights that the adapters were trained on."""

    path: str
    sha256: str
    """Over names, shapes, dtypes and values of all its parameters."""
    quantize: Quantized = "none"


class Adapters:
    """The adapters of one student. They are added on construction with B = 0, so the student's output does not
    change."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, *, base: str) -> None:
        """`base`: path of the student. Draws A from torch's global generator. Afterwards only the adapters have
        gradients. Raises LoraError for targets that do not exist or cannot have an adapter."""
        _check_targets(model, config.targets)
        names = [name for name, _ in model.named_parameters()]
        targets = config.targets or _linear_layers(model)
        self.base = BaseModel(base, fingerprint(model), config.quantize)
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=cast(int, config.alpha),
            target_modules=list(targets),  # not peft's "all-linear", which adds the experts that are one tensor
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            # peft 0.21 asks transformers 5 by a name that is deprecated there.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            self._wrapped = cast(peft.PeftModel, peft.get_peft_model(model, settings))
        settings.base_model_name_or_path = base
        self._layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
        self._model = model
        published = [name for name, _ in self.published()]
        if any(isinstance(layer, ParamWrapper) for layer in self._layers.values()):
            raise LoraError(
                f"lora.targets: with these peft {peft.__version__} gives adapters to the experts of "
                f"{type(model).__name__} too, which are one tensor for a whole layer; expected targets that are not "
                "also names of experts' matrices, e.g. q_proj,k_proj,v_proj,o_proj"
            )
        if published != names:
            changed = sorted(set(published) ^ set(names))[:_NAMES_IN_ERROR]
            raise LoraError(f"peft {peft.__version__} changes the names of parameters: {changed}; LoRA cannot be used")

    def __repr__(self) -> str:
        return f"Adapters(layers={len(self._layers)}, trained={self.n_trained})"

    @property
    def n_trained(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self._model.parameters() if p.requires_grad)

    def published(self) -> Iterator[tuple[str, Tensor | Merged]]:
        """The student's parameters in their own order, by their own names. Adapters are added in when a weight is
        read."""
        for name, parameter in self._model.named_parameters():
            if ".lora_" in name:
                continue
            layer_name, in_adapted, leaf = name.rpartition(f"{_BASE_LAYER}.")
            if hasattr(parameter, "quant_state"):  # kept in 4 bits
                layer = self._layers[layer_name] if in_adapted else None
                outline = torch.empty(parameter.quant_state.shape, dtype=torch.float32, device="meta")
                own = name.replace(f"{_BASE_LAYER}.", ".")
                yield own, Merged(outline, functools.partial(_in_full, parameter, layer))
            elif in_adapted and leaf == "weight":
                layer = self._layers[layer_name]
                yield f"{layer_name}.{leaf}", Merged(parameter.detach(), functools.partial(_delta, layer))
            else:
                yield name.replace(f"{_BASE_LAYER}.", "."), parameter

    def tensors(self) -> dict[str, Tensor]:
        """The adapters' matrices themselves, by peft's names; of several ranks, each has its share."""
        return get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)

    def save(self, folder: Path) -> None:
        """Write adapters that are whole here in peft's format, and base.json.
        `PeftModel.from_pretrained(base, folder)` loads them."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()}
        save_file(tensors, folder / ADAPTER_WEIGHTS)
        usual_permissions(folder)
        self.describe(folder)

    def describe(self, folder: Path) -> None:
        """Write all of that but the matrices."""
        settings = self._wrapped.peft_config[_ADAPTER]
        settings.inference_mode = True  # as in peft's own files: loading them must not start training
        settings.save_pretrained(str(folder))
        settings.inference_mode = False
        (folder / BASE).write_bytes(msgspec.json.encode(self.base))

    def config_text(self) -> bytes:
        """adapter_config.json in peft's format."""
        with tempfile.TemporaryDirectory() as folder:
            self.describe(Path(folder))
            return (Path(folder) / ADAPTER_CONFIG).read_bytes()

    def load(self, folder: Path) -> None:
        """Load saved adapters. Raises LoraError, changing nothing, for adapters of another student or of other
        shapes."""
        try:
            base = msgspec.json.decode((folder / BASE).read_bytes(), type=BaseModel)
            tensors = load_file(folder / ADAPTER_WEIGHTS)
        except (OSError, msgspec.MsgspecError, SafetensorError) as error:
            raise LoraError(f"{folder}: no adapters of a learner: {error}") from error
        if base.sha256 != self.base.sha256:
            raise LoraError(
                f"{folder}: its adapters belong to {base.path} with sha256 {base.sha256[:16]}; the student "
                f"{self.base.path} has {self.base.sha256[:16]}: expected the same weights (models.student)"
            )
        wanted = {name: tensor.shape for name, tensor in self.tensors().items()}
        got = {name: tensor.shape for name, tensor in tensors.items()}
        if wanted != got:
            differing = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
            raise LoraError(
                f"{folder}: {len(differing)} of its {len(got)} adapter matrices do not fit learner.lora, e.g. "
                f"{differing[:_NAMES_IN_ERROR]}; use the rank and targets that it was trained with"
            )
        set_peft_model_state_dict(self._wrapped, tensors)

    def merge(self) -> PreTrainedModel:
        """Add the adapters to the weights in place and remove them; those in fewer bits than float32 to a new model, in
        float32: a sum in bfloat16 is not what was trained. This object cannot be used afterwards. Raises what loading
        raises."""
        if any(parameter.dtype != torch.float32 for parameter in self._model.parameters()):
            return self._in_full()
        self._layers = {}
        return cast(PreTrainedModel, self._wrapped.merge_and_unload())  # pyright: ignore[reportCallIssue]

    @torch.no_grad()
    def _in_full(self) -> PreTrainedModel:
        model = load_causal_lm(self.base.path, device="cpu", dtype="float32", attention="sdpa")
        parameters = dict(model.named_parameters())
        for name, weight in self.published():
            if isinstance(weight, Merged) and not weight.base.is_meta:
                parameters[name].add_(weight.delta().cpu())
            else:
                parameters[name].copy_(tensor_of(weight))
        return model


def fingerprint(model: PreTrainedModel) -> str:
    """sha256 over names, shapes, dtypes and values of the parameters, hexadecimal. One pass over all weights. Empty for
    a model without values."""
    if model.device.type == "meta":
        return ""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        of_bytes = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        value = hashlib.sha256(of_bytes).hexdigest()[:16]
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {value}\n".encode())
    return digest.hexdigest()


@torch.no_grad()
def _in_full(parameter: Any, layer: LoraLayer | None) -> Tensor:
    """A weight that is kept in 4 bits, with its adapter, in float32."""
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(parameter.data, parameter.quant_state).float()
    return weight if layer is None else weight.add_(_delta(layer))


def _delta(layer: LoraLayer) -> Tensor:
    with torch.no_grad():
        return cast(Any, layer).get_delta_weight(_ADAPTER)


def _linear_layers(model: PreTrainedModel) -> tuple[str, ...]:
    head = model.get_output_embeddings()
    kinds = torch.nn.Linear | Conv1D
    return tuple(name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head)


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Raises LoraError unless each target ends the name of a layer, and only of layers that can have an adapter."""
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, torch.nn.Linear | Conv1D)]
    ends = sorted({name.rpartition(".")[2] for name in linear})
    read_directly = (model.get_input_embeddings(), model.get_output_embeddings())
    for target in targets:
        hit = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not hit:
            raise LoraError(f"lora.targets: no layer of {type(model).__name__} is called {target!r}; it has {ends}")
        for name in hit:
            if modules[name] in read_directly:
                raise LoraError(
                    f"lora.targets: {target!r} is {name}, the embedding or the output head, whose weight the loss "
                    f"reads itself, past any adapter; expected others of {ends}"
                )
            if name not in linear:
                kind = type(modules[name]).__name__
                raise LoraError(f"lora.targets: {target!r} is {name}, a {kind}; expected linear layers: {ends}")
