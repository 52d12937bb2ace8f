"""Toy tokenizers and chat templates: one token a byte, and a few special tokens, so that ids can be counted by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<s>", "</s>", "<pad>", "[S]", "[U]", "[A]", "[E]")

_HEADER = "{% set h = {'system': '[S]', 'user': '[U]', 'assistant': '[A]'} %}"
_PROMPT = "{% if add_generation_prompt %}[A]{% endif %}"
_PLAIN = "{% for m in messages %}{{ h[m['role']] + m['content'] + '[E]' }}{% endfor %}"

NOGEN = _HEADER + _PLAIN + _PROMPT
"""Header, content, end of turn; no generation marks."""

PROMPTLESS = _HEADER + _PLAIN
"""The same, without a generation prompt."""

TAGGED = (
    _HEADER + "{% for m in messages %}{{ h[m['role']] }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '[E]' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '[E]' }}{% endif %}{% endfor %}" + _PROMPT
)
"""NOGEN with generation marks."""

BARE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ '[U]' + m['content'] }}{% endif %}{% endfor %}"
)
"""Generation marks, and neither a header nor an end of turn around an answer."""

BOS = "<s>" + NOGEN
LINES = (
    _HEADER
    + "{% for m in messages %}{{ h[m['role']] + '\n' + m['content'] + '[E]\n' }}{% endfor %}"
    + ("{% if add_generation_prompt %}[A]\n{% endif %}")
)
"""Line breaks behind headers and behind ends of turn, as ChatML has them."""

STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + NOGEN
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}" + NOGEN
)
"""Refuses two turns of one role behind each other, and a conversation that the assistant begins."""
FORGETFUL = (
    _HEADER + "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}[A][E]"
    "{% else %}{{ h[m['role']] + m['content'] + '[E]' }}{% endif %}{% endfor %}" + _PROMPT
)
"""Empties every answer but a last one."""
_SPLIT = (
    "{% set said = m['content'].split('</think>')[-1] %}{% set thought = m['reasoning_content'] or "
    "(m['content'].split('</think>')[0].split('<think>')[-1] if '</think>' in m['content'] else '') %}"
)
THINKING = (
    _HEADER + "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    + _SPLIT
    + "[A]{% if loop.index0 > ns.last %}{{ '<think>' + thought + '</think>' }}{% endif %}{{ said + '[E]' }}"
    "{% else %}{{ h[m['role']] + m['content'] + '[E]' }}{% endif %}{% endfor %}" + _PROMPT
)
"""Thoughts only behind the last question, an empty block of them where an answer has none; takes both spellings."""
OPENED = (
    _HEADER + "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '[A]' + m['content'].split('</think>')[-1] + '[E]' }}"
    "{% else %}{{ h[m['role']] + m['content'] + '[E]' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[A]<think>{% endif %}"
)
"""Takes the thoughts of every answer away, also of a last one, and begins one in its generation prompt."""
_TOOL_HEADER = (
    _HEADER.replace("'[U]',", "'[U]', 'tool': '[U]tool:',") + "{% if tools %}[S]{{ tools | tojson }}[E]{% endif %}"
)
_TOOL_TURNS = (
    "{% for m in messages %}{{ h[m['role']] + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}CALL{% endfor %}[E]{% endfor %}" + _PROMPT
)
TOOLS = _TOOL_HEADER + _TOOL_TURNS.replace(
    "CALL", "{{ c['function']['name'] }}({{ c['function']['arguments'] | tojson }})"
)
"""Shows tools, calls with their arguments as an object, and what tools answer."""
TOOLS_JOINED = _TOOL_HEADER + _TOOL_TURNS.replace(
    "CALL", "{{ c['function']['name'] + '(' + c['function']['arguments'] + ')' }}"
)
"""The same, with arguments that must be text."""
TOOLS_PRINTED = _TOOL_HEADER + _TOOL_TURNS.replace(
    "CALL", "{{ c['function']['name'] }}({{ c['function']['arguments'] }})"
)
"""The same, printing arguments whatever they are."""
DATED = "[S]{{ strftime_now('%d %b %Y') }}[E]" + NOGEN
UNSEEN_SYSTEM = _HEADER + "{% for m in messages if m['role'] != 'system' %}" + _PLAIN.split("%}", 1)[1] + _PROMPT
"""Leaves the system's turn out."""


def tokenizer(template: str | None = NOGEN, *, merges: Sequence[tuple[str, str]] = (), bos: bool = False) -> Any:
    """A byte-level tokenizer: bytes are ids 0–255 (in the byte-level alphabet's order), specials follow, then merges.

    ``merges`` are pairs in the byte-level alphabet ("Ċ" is a line break); ``bos`` makes it add ``<s>`` by itself.
    """
    vocab = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for one, other in merges:
        vocab[one + other] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", backend.token_to_id("<s>"))])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIALS[3:]),
    )
    if template is not None:
        made.chat_template = template
    return made


def chat(*contents: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def learned(tokenizer: Any, rendered: Any) -> str:
    """The sequence's text, with what its mask covers between ``{`` and ``}``."""
    text, inside = "", False
    for id, bit in [*zip(rendered.ids, rendered.mask, strict=True), (None, False)]:
        if bit != inside:
            text += "{" if bit else "}"
            inside = bit
        if id is not None:
            text += tokenizer.decode([id])
    return text


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    """One row a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
