"""Streams: what comes out in pieces is the whole text, characters split over tokens included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer

import infer
from heads.draft import Draft
from heads.grow import Budget, Sampler
from infer.stream import TextPieces, decode
from tests.infer.fakes import FakeDrafter, Oracle
from tests.tiny import tiny_model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every token is a byte; 256 ends the text. 257 stands for "the " and 258 for "ab"."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    order = sorted(letters, key=lambda letter: decode_byte(letter))
    vocab = {letter: place for place, letter in enumerate(order)}
    vocab |= {"</s>": 256, "theĠ": 257, "ab": 258}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")


def decode_byte(letter: str) -> int:
    """Byte that a letter of the byte-level alphabet stands for."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    code = ord(letter)
    return code if code in visible else sorted(set(range(256)) - set(visible))[code - 256]


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's: pieces with a visible space, bytes as a fallback, the first space dropped."""
    vocab: dict[str, float] = {"<unk>": 0.0, "</s>": 0.0, "▁": -2.0, "▁a": -1.0, "b": -1.0, "▁the": -1.0, ".": -1.0}
    vocab |= {f"<0x{byte:02X}>": -9.0 for byte in range(256)}
    raw = Tokenizer(models.Unigram(list(vocab.items()), unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")


TOKENIZERS = {"bytes": byte_tokenizer(), "pieces": piece_tokenizer()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_of_any_tokens_add_up(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=20))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pieces = TextPieces(tokenizer)
    text = "".join(pieces.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True))
    assert text + pieces.rest() == decode(tokenizer, ids)


@pytest.mark.parametrize("text", ["é😀", "a é b 😀! 日本語", "🏳️‍🌈 ok", "\n \n"])
def test_no_broken_characters_on_the_way(text: str) -> None:
    """Bytes of one character come as several tokens; nothing is shown before it is whole."""
    tokenizer = TOKENIZERS["bytes"]
    pieces = TextPieces(tokenizer)
    parts = [pieces.push([byte]) for byte in text.encode()]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) + pieces.rest() == text


class Script(FakeDrafter):
    """Drafts what the script says."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(())
        self.script = script

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        return Draft.chain(self.script[len(self.text) :][: budget.depth])


def scripted(text: str) -> tuple[Any, Any, list[int], Any]:
    """A model that a logits processor makes say ``text`` and the end, with its tokenizer and prompt."""
    tokenizer = TOKENIZERS["bytes"]
    model = tiny_model("llama", vocab=300)
    script = [1, 2, *text.encode(), 256]

    def say(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, script[min(ids.shape[1], len(script) - 1)]] = 1e4
        return scores

    return model, tokenizer, script, say


@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_stream_and_texts_agree(lookahead: int) -> None:
    model, tokenizer, script, say = scripted("é😀 and so on")
    settings: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": 256, "logits_processor": [say]}
    settings |= {"draft": Script(script), "budget": Budget.chain(lookahead), "tokenizer": tokenizer, "do_sample": False}
    prompt = torch.tensor([[1, 2]])
    parts = list(infer.stream(model, prompt, **settings))
    called: list[str] = []
    out = infer.generate(model, prompt, stream=called.append, **settings)
    assert out.sequences[0].tolist() == script
    assert out.texts == ["é😀 and so on"]
    assert "".join(parts) == "".join(called) == out.texts[0]
    assert len(parts) > 1
    assert not any("\ufffd" in part for part in parts)


def test_streamers_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer, script, say = scripted("é😀 and so on")
    settings: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": 256, "do_sample": False}
    prompt = torch.tensor([[1, 2]])
    model.generate(prompt, streamer=TextStreamer(tokenizer, skip_prompt=True), logits_processor=[say], **settings)
    theirs = capsys.readouterr().out
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    infer.generate(model, prompt, Script(script), stream=streamer, logits_processor=[say], **settings)
    assert capsys.readouterr().out == theirs
    queue = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    infer.generate(model, prompt, Script(script), streamer=queue, logits_processor=[say], **settings)
    assert "".join(queue) == "é😀 and so on"
    with pytest.raises(ValueError, match="stream must be a function"):
        infer.generate(model, prompt, stream=3, **settings)
    with pytest.raises(ValueError, match="same thing"):
        infer.generate(model, prompt, stream=print, streamer=queue, **settings)


@pytest.mark.parametrize("stop", ["😀", " and", "so", ["zz", "n"]])
def test_stop_strings_end_the_text_inside_a_draft(stop: Any) -> None:
    model, tokenizer, script, say = scripted("é😀 and so on")
    settings: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "stop_strings": stop, "tokenizer": tokenizer}
    prompt = torch.tensor([[1, 2]])
    theirs = model.generate(prompt, logits_processor=[say], **settings)[0].tolist()
    assert 2 < len(theirs) < len(script)
    out = infer.generate(model, prompt, Script(script), logits_processor=[say], **settings)
    assert out.sequences[0].tolist() == theirs
    assert "".join(infer.stream(model, prompt, Script(script), logits_processor=[say], **settings)) == out.texts[0]  # type: ignore[index]


def test_a_stream_may_be_left_early() -> None:
    model, tokenizer, script, say = scripted("a long text that nobody reads to its end")
    model.train()
    pieces = infer.stream(
        model,
        torch.tensor([[1, 2]]),
        Oracle(script, ()),
        tokenizer=tokenizer,
        max_new_tokens=30,
        logits_processor=[say],
    )
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert all(part.training for part in model.modules())


def test_ids_the_tokenizer_does_not_know() -> None:
    """A vocabulary padded beyond the tokenizer's decodes to nothing there, and is counted."""
    model, tokenizer = tiny_model("llama", vocab=300), TOKENIZERS["bytes"]

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 290 if ids.shape[1] == 3 else 65] = 1e4
        return scores

    out = infer.generate(
        model, torch.tensor([[1, 2]]), tokenizer=tokenizer, max_new_tokens=4, logits_processor=[force], do_sample=False
    )
    assert out.sequences[0, 2:].tolist() == [65, 290, 65, 65]
    assert out.texts == ["AAA"]
    assert out.stats.tokens == 4
