"""What users pass to ``infer.generate``, read strictly: every argument is honoured or refused by name.

Arguments mean what they mean to ``model.generate``; what cannot be kept lossless, or is not supported in this
version, raises instead of being ignored, also when it comes from the model's own generation config.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from heads import embedded
from heads.base import DraftHeads
from heads.config import nearest
from heads.target import Target
from infer.seq2seq import Seq2SeqTarget

# arguments taken by generate and stream themselves, beside the generation settings
OF_TEXT = ("model", "prompt", "draft", "tokenizer", "generation_config", "seed", "stream")
OF_DRAFTING = ("budget", "rule", "control", "prefix_cache", "stable", "compile")
OWN = (*OF_TEXT, *OF_DRAFTING)
TAKEN = ("attention_mask", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")

# arguments of model.generate that have no meaning here, and why
NOT_TAKEN: dict[str, str] = {
    "assistant_model": "a draft model is named by draft='model:NAME'",
    "assistant_tokenizer": "a draft model speaks the target's own tokens",
    "cache": "the target's cache is made anew by each call",
    "custom_generate": "the loop is Headstart's own",
    "decoder_input_ids": "a decoder starts with its model's own start token",
    "encoder_outputs": "the encoder reads the prompt in each call",
    "input_ids": "the prompt is the second argument",
    "inputs": "the prompt is the second argument",
    "inputs_embeds": "prompts are text, messages or token ids",
    "negative_prompt_attention_mask": "classifier-free guidance is not supported",
    "negative_prompt_ids": "classifier-free guidance is not supported",
    "past_key_values": "the target's cache is made anew by each call",
    "position_ids": "positions follow from the prompt and its attention mask",
    "synced_gpus": "decoding over several processes is not supported in this version",
    "token_type_ids": "targets take token ids only",
}

# generation settings → the values under which they change nothing here, and why others are refused
_BEAMS = "beam search keeps no single text that a draft could continue"
_MODE = "it decodes by another rule than greedy or sampling"
_DRAFTS = "drafts come from draft="
_CACHE = "the target's cache is Headstart's own"
SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), _BEAMS),
    "num_beam_groups": ((None, 1), _BEAMS),
    "diversity_penalty": ((None, 0.0), _BEAMS),
    "constraints": ((None,), _BEAMS),
    "force_words_ids": ((None,), _BEAMS),
    "penalty_alpha": ((None, 0.0), _MODE),
    "dola_layers": ((None,), _MODE),
    "low_memory": ((None, False), _MODE),
    "guidance_scale": ((None, 1.0), "classifier-free guidance is not supported"),
    "token_healing": ((None, False), "the prompt is kept as it is"),
    "prompt_lookup_num_tokens": ((None,), _DRAFTS),
    "assistant_early_exit": ((None,), _DRAFTS),
    "speculation_type": ((None,), _DRAFTS),
    "use_mtp": ((None, False), _DRAFTS),
    "is_assistant": ((None, False), _DRAFTS),
    "cache_implementation": ((None, "dynamic", "static"), _CACHE),
    "cache_config": ((None,), _CACHE),
    "use_cache": ((None, True), _CACHE),
    "prefill_chunk_size": ((None,), "the prompt is read in one pass"),
    "output_attentions": ((None, False), "attentions are not returned"),
    "output_hidden_states": ((None, False), "hidden states are not returned"),
    "continuous_batching_config": ((None,), "texts of one call are decoded together, no others join them"),
}


def take(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into those of ``TAKEN`` and generation settings.

    Raises:
        ValueError: one of ``NOT_TAKEN`` was given.
    """
    for name, why in NOT_TAKEN.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported: {why}")
    taken = {name: kwargs.get(name) for name in TAKEN}
    return taken, {name: value for name, value in kwargs.items() if name not in (*TAKEN, *NOT_TAKEN)}


def check(config: GenerationConfig, rest: dict[str, Any]) -> None:
    """Refuse settings that cannot be honoured (``SETTINGS``) and names nobody knows.

    Args:
        config: complete generation config, the model's defaults included.
        rest: arguments that are no generation settings.
    """
    for name in rest:
        known = {*vars(GenerationConfig()), *OWN, *TAKEN, *NOT_TAKEN}
        raise ValueError(f"unknown argument {name!r}{nearest(name, known)}")
    for name, (allowed, why) in SETTINGS.items():
        value = getattr(config, name, None)
        if not any(value is a or (a is not None and type(value) is not bool and value == a) for a in allowed):
            raise ValueError(f"{name}={value!r} is not supported: {why}")


def read_model(model: Any) -> tuple[Target, DraftHeads | None]:
    """The target, and the heads if ``model`` is a heads repository (path or Hub id)."""
    if isinstance(model, str | os.PathLike):
        heads = DraftHeads.from_pretrained(model if isinstance(model, str) else Path(model))
        return heads.target, heads
    if isinstance(model, Target):
        return model, None
    if isinstance(model, nn.Module) and hasattr(model, "generate"):
        wrapped = Seq2SeqTarget if getattr(model.config, "is_encoder_decoder", False) else Target
        return wrapped(model), None  # type: ignore[arg-type]
    raise ValueError(f"model must be a transformers model, a Target or a heads repository, not {type(model).__name__}")


def target_of(model: PreTrainedModel, draft: Any) -> Target:
    """The heads' own target where ``draft`` is heads on this very model, a new one otherwise."""
    if isinstance(draft, DraftHeads) and draft.target.model is model:
        return draft.target
    return Target(model)


def known_tokenizer(target: Target) -> Any:
    """The target's tokenizer when its name leads to one without guessing, else None."""
    named = target.name == embedded.NAME or "/" in target.name or Path(target.name).is_dir()
    if not named:
        return None
    try:
        return target.tokenizer()
    except (OSError, ValueError):
        return None


def read_prompts(prompt: Any, tokenizer: Callable[[], Any]) -> list[Tensor]:
    """Token ids (1, n) of each prompt.

    Args:
        prompt: text (tokenized as it is), chat messages (through the chat template, ready for the answer), a list of
            either, or ids (B, n), whose rows keep their padding.
        tokenizer: asked only when there is text.

    Raises:
        ValueError: no prompt, or something else.
    """
    if isinstance(prompt, Tensor) and prompt.dim() == 2 and not prompt.is_floating_point():
        rows = [prompt[at : at + 1] for at in range(prompt.shape[0])]
    elif _is_row(prompt):
        rows = [_tokenized(prompt, tokenizer())]
    elif isinstance(prompt, Sequence) and len(prompt) > 0 and all(_is_row(row) for row in prompt):
        rows = [_tokenized(row, tokenizer()) for row in prompt]
    else:
        raise ValueError(
            "prompt must be a string, a list of chat messages with role and content, a list of either, or a LongTensor "
            f"(B, n), not {_described(prompt)}"
        )
    if not rows or any(row.numel() == 0 for row in rows):
        raise ValueError("the prompt has no tokens")
    return rows


def _tokenized(prompt: Any, tokenizer: Any) -> Tensor:
    """(1, n) ids of text or of chat messages."""
    if isinstance(prompt, str):
        return torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.long)
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], dtype=torch.long)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(m, dict) and "role" in m for m in value)
    )


def _is_row(value: Any) -> bool:
    return isinstance(value, str) or _is_chat(value)


def _described(value: Any) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )


def unpadded(ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The prompt without its left padding, (1, m).

    Raises:
        ValueError: the mask hides tokens that are not padding on the left.
    """
    seen = attention_mask[0].bool()
    first = int(seen.int().argmax())
    if not bool(seen[first:].all()):
        raise ValueError("attention_mask may hide padding on the left only; this one hides other tokens")
    return ids[:, first:]


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Run with these modules in eval mode and leave each of their parts in the mode it was in."""
    training = [part for module in modules for part in module.modules() if part.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
