"""Any causal language model of `transformers`, from a local folder, as the model of a run (extra `huggingface`).

Only architectures that `transformers` itself knows are built: code from the folder is never run, pickled weights are
never opened, and nothing is fetched from the network.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import Refused, UsageError
from thrifty.models.folder import end_of_text, read_config, weight_files, write_tokenizer, written_aside
from thrifty.models.sampling import evaluating


class HuggingFaceCausalLM(nn.Module):
    """A `transformers` causal LM that answers as our own models do; its parameters keep their names under `lm.`.

    Usually `model(tokens)` gives hidden states (b, t, d), and `model.head(hidden)` their logits (b, t, v). Some
    architectures do more between hidden state and logit than one module (a soft cap, a scale, a projection). For those
    **`head` is None and `model(tokens)` gives logits (b, t, v)**; a chunked loss is then not possible. Which of the
    two holds is measured when the model is wrapped.

    Raises Refused for a model in which a token can see later ones: it would learn to copy what it should predict.
    """

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self.apart = _is_head_apart(lm)
        _refuse_unless_causal(lm)

    @property
    def head(self) -> nn.Module | None:
        """Looked up each time, so that it is whatever stands in the head's place now."""
        return self.lm.get_output_embeddings() if self.apart else None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.apart:
            return self.lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return self.lm(input_ids=tokens, use_cache=False).logits

    def logits(self, tokens: Tensor) -> Tensor:
        return self.lm(input_ids=tokens, use_cache=False).logits

    @property
    def vocabulary(self) -> int:
        return self.lm.get_input_embeddings().weight.shape[0]


def load_causal_lm(
    folder: Path, fresh: bool = False, vocabulary: int | None = None, length: int | None = None
) -> HuggingFaceCausalLM:
    """The model of a folder in float32; with `fresh`, its architecture with random values from torch's generator.

    `vocabulary` and `length` (tokens of context) change a fresh architecture, and are ignored otherwise. Raises
    UsageError without `transformers` or for a folder without config.json or safetensors, Refused for an architecture
    that `transformers` does not know as a causal language model.
    """
    transformers = _transformers()
    content = read_config(folder)
    if not fresh:
        weight_files(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if fresh:
            _resize(config, vocabulary, length)
            lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        else:
            lm = _with_weights(transformers, folder, config)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise Refused(
            f"transformers cannot build a causal language model of type {content.get('model_type')!r} "
            f"from {folder}: {error}",
            fix="give a folder of an architecture that this version of transformers knows as a causal LM",
        ) from error
    return HuggingFaceCausalLM(lm)


def _with_weights(transformers: Any, folder: Path, config: Any) -> nn.Module:
    lm, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    if found["missing_keys"] or found["mismatched_keys"]:
        names = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
        raise Refused(
            f"{folder} lacks the values of {len(names)} parameters of its architecture: {names[:3]}",
            fix="fetch the whole folder again, or set model.fresh = true to start from random values",
        )
    return lm


def export_causal_lm(
    model: HuggingFaceCausalLM, folder: Path, tokenizer_json: Path | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """The model's folder as `save_pretrained` writes it, complete or not at all, with its tokenizer."""
    values = {
        name: value.to("cpu", dtype if value.is_floating_point() else value.dtype)
        for name, value in _untied(model.lm).items()
    }
    config = deepcopy(model.lm.config)
    with written_aside(folder) as aside:
        model.lm.save_pretrained(aside, state_dict=values)
        config.dtype = dtype
        if tokenizer_json is not None:
            config.bos_token_id = config.eos_token_id = end_of_text(tokenizer_json)
            write_tokenizer(aside, tokenizer_json, getattr(config, "max_position_embeddings", None) or 1024)
        config.save_pretrained(aside)


def _untied(lm: nn.Module) -> dict[str, Tensor]:
    """The state with each tensor once: copies of tied weights in another dtype would count as different tensors."""
    once = {id(parameter): name for name, parameter in reversed(list(lm.named_parameters(remove_duplicate=False)))}
    kept = set(once.values())
    tied = {name for name, _ in lm.named_parameters(remove_duplicate=False)} - kept
    return {name: value for name, value in lm.state_dict().items() if name not in tied}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "models other than the GPT-2 and Llama families need the package transformers, which is not installed",
            fix="pip install 'thrifty[huggingface]'",
        ) from error
    return transformers


def _resize(config: Any, vocabulary: int | None, length: int | None) -> None:
    if vocabulary is not None:
        config.vocab_size = vocabulary
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(config, name, None)
            if isinstance(token, int) and token >= vocabulary:
                setattr(config, name, None)
    if length is not None and length > (getattr(config, "max_position_embeddings", None) or length):
        config.max_position_embeddings = length


def _probe_tokens(lm: nn.Module) -> Tensor:
    embedding = lm.get_input_embeddings().weight
    return (torch.arange(8, device=embedding.device) % embedding.shape[0])[None]


def _is_head_apart(lm: nn.Module) -> bool:
    """Whether logits are exactly head(last hidden state).

    The head's output is enlarged a thousandfold on the way: a small random model's logits are so near zero that a soft
    cap would not show otherwise.
    """
    head = lm.get_output_embeddings()
    if head is None or lm.base_model is lm:
        return False
    seen: list[Tensor] = []

    def enlarge(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.extend((inputs[0], output * 1000))
        return output * 1000

    tokens = _probe_tokens(lm)
    hook = head.register_forward_hook(enlarge)
    try:
        with evaluating(lm), torch.no_grad():
            logits = lm(input_ids=tokens, use_cache=False).logits
            hidden = getattr(lm.base_model(input_ids=tokens, use_cache=False), "last_hidden_state", None)
    finally:
        hook.remove()
    if len(seen) != 2 or hidden is None or hidden.shape != seen[0].shape:
        return False
    return torch.allclose(hidden, seen[0], rtol=1e-5, atol=1e-6) and torch.allclose(logits, seen[1].to(logits.dtype))


def _refuse_unless_causal(lm: nn.Module) -> None:
    tokens = _probe_tokens(lm)
    changed = tokens.clone()
    changed[0, -1] = tokens[0, 0]
    with evaluating(lm), torch.no_grad():
        before, after = (lm(input_ids=ids, use_cache=False).logits for ids in (tokens, changed))
    moved = (after - before).abs().amax(-1)[0]
    if moved[:-1].max() > 1e-4 * moved[-1]:
        raise Refused(
            f"{type(lm).__name__} lets a token see later ones: it is not a causal language model",
            fix="for an encoder such as BERT, set is_decoder to true in config.json or choose another model",
        )
