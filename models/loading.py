"""Load and save Hugging Face causal language models. Unusable models are refused before any weight is read.

`attention` chooses the attention function inside the model:
    "sdpa"    transformers' own, for `model.generate` and plain forwards on padded batches
    "packed"  `models.packed`: many sequences in one row (scoring, learning), without padding where that is exact
    "decode"  the generation engine's, registered by the module that defines it
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from stillhouse.models import packed
from stillhouse.models.description import DtypeName, Quantized
from stillhouse.models.logprobs import lm_head
from stillhouse.models.safetensors_header import coded_weights, head_beside_embedding, read_headers
from stillhouse.models.transfer import whole
from stillhouse.protocol.atomic_file import usual_permissions

Attention: TypeAlias = Literal["sdpa", "packed", "decode"]
Dtype: TypeAlias = DtypeName | Literal["float64"]

IMPLEMENTATIONS: dict[Attention, str] = {
    "sdpa": "sdpa",
    "packed": packed.IMPLEMENTATION,
    "decode": "stillhouse_decode",
}
"""Our names -> the names under which transformers knows the attention functions."""

_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_log = logging.getLogger(__name__)


class ModelError(ValueError):
    """This path cannot be used as a causal language model here; the message says why and what to do."""


def load_causal_lm(
    path: str | Path,
    *,
    device: str | torch.device,
    dtype: Dtype | torch.dtype,
    attention: Attention,
    train: bool = False,
    weights: bool = True,
    quantize: Quantized = "none",
) -> PreTrainedModel:
    """Load a causal LM from a local folder or a hub name. `weights=False`: only its shapes, on the meta device.

    The model comes back in eval mode (dropout is not part of the policy whose log-probs we compare), with gradients
    on its parameters only when `train`. With `attention="packed"` a probe has compared it to its own plain forward, and
    chosen how it runs rows; without weights, `models.packed.set_way` is to follow. `quantize`: transformers' own
    quantised loading; embedding, head and norms stay as `dtype`, in which products are computed, too.

    Raises ModelError: path missing, no config.json, not a causal LM, weights missing from the checkpoint, vocabulary
    and embedding that do not fit, attention that is not registered, layers or an environment that cannot be quantised;
    `models.packed.PackingError`: "packed" asked of an architecture whose rows cannot be exact.
    """
    name = resolve_path(path)
    config = load_config(name)
    torch_dtype: torch.dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    implementation = IMPLEMENTATIONS[attention]
    if implementation not in ALL_ATTENTION_FUNCTIONS:
        raise ModelError(
            f"attention={attention!r} needs the attention function {implementation!r}, which is not registered; "
            "import the module that defines it before loading a model"
        )
    if attention == "packed":
        packed.refuse_bidirectional(config)
        implementation = None  # transformers' choice, until a probe has shown which rows are exact
    if weights:
        how = {} if quantize == "none" else _quantised(name, torch_dtype, device)
        model = _from_pretrained(name, config, torch_dtype, implementation, how)
        _check_embeddings(name, model)
        _check_numbers(name, model)
        _check_scales(name, model)
        make_current(torch.device(device))
        if how:
            _check_quantised(name, model)
        else:
            model.to(torch.device(device))  # pyright: ignore[reportArgumentType]
        if lm_head(model).weight_VH is not model.get_input_embeddings().weight:
            _untie(model.config)
    else:
        if Path(name).is_dir() and head_beside_embedding(read_headers(Path(name))):
            _untie(config)
        with torch.device("meta"):
            model = outline(config, dtype=torch_dtype, attn_implementation=implementation)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(train and parameter.is_floating_point())
    if weights and attention == "packed":
        packed.choose_way(model)
    return model


def make_current(device: torch.device) -> None:
    """Make `device` this thread's GPU, if it is one. Otherwise a call that names no GPU would create a context on the
    first GPU, which takes half a GB there from its owner."""
    if device.type == "cuda" and device.index is not None:  # pyright: ignore[reportUnnecessaryComparison]
        torch.cuda.set_device(device)


def save_hf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write config, safetensors weights, generation config and tokenizer into `folder` (made if missing), so that
    `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load the folder itself."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with _no_progress_bars():
        model.save_pretrained(target)
    usual_permissions(target)
    _describe_inputs(model, tokenizer, target)


def describe_hf(model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write all of that but the weights; without a model, only the tokenizer."""
    if model is not None:
        with _no_progress_bars():
            model.save_pretrained(folder, state_dict={})
    _describe_inputs(model, tokenizer, folder)


def _describe_inputs(model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer, and copies of what nothing here reads: what makes inputs of images, and code that an
    `auto_map` names."""
    tokenizer.save_pretrained(folder)
    if model is None or not (source := Path(model.name_or_path or "")).is_absolute():
        return
    for file in (*map(source.joinpath, _PROCESSORS), *source.glob("*.py")):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def weights_to_save(model: PreTrainedModel, *, converted: bool = False) -> dict[str, Tensor]:
    """The tensors that `save_pretrained` would write, by their names in the file. They are the model's own, shares of
    them if it is sharded. If they are `converted`, they are new and whole; all ranks must ask then."""
    kept = model.state_dict().keys() - set(model._keys_to_ignore_on_save or ())  # pyright: ignore[reportPrivateUsage]
    own = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers()) if n in kept}
    return revert_weight_conversion(model, {name: whole(tensor) for name, tensor in own.items()}) if converted else own


def converted_on_saving(model: PreTrainedModel) -> bool:
    """Whether `save_pretrained` renames or divides tensors, as of mixtures of experts."""
    own = weights_to_save(model)
    outlines = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in own.items()}
    saved = revert_weight_conversion(model, dict(outlines))
    return saved.keys() != own.keys() or any(saved[name] is not outline for name, outline in outlines.items())


def resolve_device(device: str) -> str:
    """ "auto" -> "cuda" where there is one, else "cpu"; anything else as it is."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_path(path: str | Path) -> str:
    """A local folder with a config.json (absolute), or a hub name as it is. Raises ModelError, touches no network."""
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            found = sorted(entry.name for entry in local.iterdir())[:8]
            raise ModelError(
                f"{local} has no config.json (it holds: {', '.join(found) or 'nothing'}); expected a folder"
                " written by save_pretrained"
            )
        return str(local.resolve())
    if local.is_file():
        raise ModelError(f"{local} is a file; expected the folder that holds config.json and the safetensors files")
    name = str(path)
    looks_local = isinstance(path, Path) or name.startswith((".", "~", os.sep)) or name.count("/") > 1 or not name
    if looks_local:
        raise ModelError(f"model folder {name!r} does not exist (working directory: {Path.cwd()})")
    return name


def load_config(name: str) -> PreTrainedConfig:
    """Read config.json of a resolved path or hub name and refuse what is not a decoder-only causal LM, alone or as the
    text model of one that also takes images."""
    try:
        config = cast(PreTrainedConfig, AutoConfig.from_pretrained(name, trust_remote_code=False))
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:  # the last three: malformed fields
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{name!r} needs code of its own (auto_map in config.json), which is not run here; expected an "
                "architecture of transformers (docs/models.md)"
            ) from error
        hint = "" if Path(name).is_dir() else f"; no local folder of that name either{_offline_hint()}"
        raise ModelError(f"cannot read the model configuration of {name!r}: {error}{hint}") from error
    architectures: list[str] = getattr(config, "architectures", None) or []
    known = _flat_names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | _flat_names(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if architectures and not any(architecture in known for architecture in architectures):
        raise ModelError(f"{name!r} is a {', '.join(architectures)}; expected a causal language model (…ForCausalLM)")
    if _auto_class(config) is None or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name!r} has model_type {config.model_type!r}, for which transformers has no causal LM")
    return config


def outline(config: PreTrainedConfig, **how: Any) -> PreTrainedModel:
    """A model of this configuration as `load_causal_lm` makes it, with weights as its class initialises them."""
    return cast(PreTrainedModel, _auto_class(config).from_config(config, **how))


def _auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that makes the model whose weights a checkpoint has; None if there is none. A checkpoint that
    also takes images is loaded whole, so that its exports are too."""
    said = set(cast("list[str] | None", getattr(config, "architectures", None)) or ())
    of_text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    if with_images is not None and (of_text is None or with_images in said - {of_text}):
        return AutoModelForImageTextToText
    return None if of_text is None else AutoModelForCausalLM


def _from_pretrained(
    name: str, config: PreTrainedConfig, dtype: torch.dtype, implementation: str | None, how: Mapping[str, Any]
) -> PreTrainedModel:
    try:
        with _no_progress_bars():
            loaded = _auto_class(config).from_pretrained(
                name, dtype=dtype, attn_implementation=implementation, output_loading_info=True, **how
            )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(f"cannot load the weights of {name!r}: {error}{_offline_hint()}") from error
    model, report = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    missing = sorted(str(key) for key in report["missing_keys"])
    if missing:
        raise ModelError(
            f"{name!r} lacks {len(missing)} tensors that its config.json asks for, e.g. {missing[:4]}; the model would "
            "run on random numbers there"
        )
    if unexpected := sorted(str(key) for key in report["unexpected_keys"]):
        _log.warning("%s: %d tensors in the checkpoint are not used, e.g. %s", name, len(unexpected), unexpected[:4])
    return model


def _quantised(name: str, dtype: torch.dtype, device: str | torch.device) -> dict[str, Any]:
    """transformers' arguments to load a checkpoint in 4 bits."""
    if missing := [package for package in ("bitsandbytes", "accelerate") if find_spec(package) is None]:
        raise ModelError(f"{name!r} in 4 bits needs {' and '.join(missing)}: pip install -e '.[bitsandbytes]'")
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": nf4, "device_map": {"": torch.device(device)}}


def _check_quantised(name: str, model: PreTrainedModel) -> None:
    """transformers quantizes linear layers only; experts that are one tensor for a layer stay as they are."""
    outside = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
    left = sorted(
        n for n, p in model.named_parameters() if p.ndim > 1 and p.dtype != torch.uint8 and id(p) not in outside
    )
    if left:
        raise ModelError(
            f"{name!r}: {len(left)} of its tensors cannot be quantized, e.g. {left[:3]}; expected a model whose layers "
            "are linear, or quantize = none, or an SGLang server of a checkpoint in fewer bits"
        )


def _check_numbers(name: str, model: PreTrainedModel) -> None:
    """Raise ModelError for NaN and infinity. The largest and the least number tell of both."""
    named = [(n, p.detach()) for n, p in model.named_parameters() if p.numel()]
    named = [(n, p.float() if p.is_floating_point() and p.element_size() < 2 else p) for n, p in named]
    wrong = [n for n, p in named if not bool(torch.isfinite(torch.stack(torch.aminmax(p))).all())]
    if wrong:
        raise ModelError(
            f"{name!r}: NaN or infinity in {len(wrong)} of its tensors as {model.dtype}, e.g. {wrong[:4]}; expected "
            "finite weights: the file is damaged, its training diverged, or float16 is too narrow for it"
        )


def _check_scales(name: str, model: PreTrainedModel) -> None:
    """Raise ModelError for weights of one byte that were taken without their scales. transformers does so where
    config.json does not say how they were quantized, and with some that say it (its issue 47145)."""
    own, wrong = dict(model.named_parameters()), list[str]()
    for file, header in (read_headers(Path(name)) if Path(name).is_dir() else {}).items():
        with safe_open(file, framework="pt") as tensors:
            for key in own.keys() & set(coded_weights(header)):
                codes, values = tensors.get_tensor(key), own[key].detach()
                if values.element_size() > 1 and torch.equal(values, codes.to(values.dtype)):
                    wrong.append(key)
    if wrong:
        raise ModelError(
            f"{name!r}: {len(wrong)} of its tensors are codes of one byte whose scales were not used, e.g. "
            f"{sorted(wrong)[:2]}; expected one in bfloat16 or float32, or for a teacher a server of this one"
        )


def _untie(config: PreTrainedConfig) -> None:
    """Say in the configuration that the head is not the embedding. Where a checkpoint has both, transformers goes by
    its numbers, whatever its config.json says; ranks that see no numbers, and who reads an export, go by this."""
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False


def _check_embeddings(name: str, model: PreTrainedModel) -> None:
    """Embedding and head rows must agree, and every id of the folder's tokenizer must have a row."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, torch.nn.Embedding) or not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"{name!r}: expected a token embedding and a linear LM head, got {type(embedding).__name__} and "
            f"{type(head).__name__}"
        )
    rows, head_rows = embedding.weight.shape[0], head.weight.shape[0]
    if rows != head_rows:
        raise ModelError(f"{name!r}: {rows} embedding rows against {head_rows} LM head rows; expected the same number")
    tokenizer_file = Path(name) / "tokenizer.json"
    if not tokenizer_file.is_file():
        return
    vocabulary = Tokenizer.from_file(str(tokenizer_file)).get_vocab(with_added_tokens=True)
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= rows:
        raise ModelError(
            f"{name!r}: its tokenizer has id {largest} ({token!r}), its embedding only {rows} rows; the tokenizer "
            "belongs to another model, or resize_token_embeddings was forgotten"
        )


def _flat_names(mapping: Any) -> set[str]:
    names: set[str] = set()
    for value in mapping.values():
        names.update([value] if isinstance(value, str) else value)
    return names


def _offline_hint() -> str:
    return " (HF_HUB_OFFLINE is set: only the local cache was asked)" if os.environ.get("HF_HUB_OFFLINE") else ""


@contextmanager
def _no_progress_bars() -> Generator[None]:
    """Progress bars are off, because a worker's log is a file."""
    were_on = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            transformers.utils.logging.enable_progress_bar()
