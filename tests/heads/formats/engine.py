"""EAGLE, DFlash and Medusa folders read as an engine reads them: plain torch on the stored tensors, nothing of ours.

Written from the formats' description alone, row by row and without a cache, so that what is exported is checked by
something that shares no code and no shortcut with what made it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

OFFSET = {"vllm": 0, "sglang": 1}  # an engine's layer id to transformers' hidden state


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors."""
    (weights,) = folder.glob("*.safetensors")
    return json.loads((folder / "config.json").read_text()), load_file(weights)


class Reader:
    """A folder's tensors beside its target, and the parts of a layer that both kinds have."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.config, self.tensors = stored(folder)
        self.model = model
        self.layer = self.config.get("transformer_layer_config", self.config)

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x * x).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]
        return x / scale.sqrt() * self.tensors[name]

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """(n, heads, D) rotated, the first half of each head against the second."""
        dim = x.shape[-1]
        rates = torch.tensor([self.layer["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)], dtype=x.dtype)
        angles = (positions[:, None].to(x.dtype) * rates)[:, None]
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(heads·D,) what a query (heads, D) reads of keys and values (n, kv_heads, D)."""
        group = q.shape[0] // k.shape[1]
        mixed = [(k[:, h // group] @ q[h] / q.shape[1] ** 0.5).softmax(0) @ v[:, h // group] for h in range(q.shape[0])]
        return torch.cat(mixed)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.layer["head_dim"])

    def feed_forward(self, hidden: Tensor, prefix: str) -> Tensor:
        y = self.norm(hidden, f"{prefix}.post_attention_layernorm.weight")
        gate, up = (y @ self.tensors[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return hidden + (silu(gate) * up) @ self.tensors[f"{prefix}.mlp.down_proj.weight"].T

    def over_target(self, logits: Tensor) -> Tensor:
        """Draft logits at their target ids, by the offsets."""
        assert logits.shape[0] == self.config["draft_vocab_size"]
        full = logits.new_full((self.layer["vocab_size"],), float("-inf"))
        offsets = self.tensors.get("d2t", torch.zeros(len(logits), dtype=torch.int64))
        full[torch.arange(len(logits)) + offsets] = logits
        if "t2d" in self.tensors:
            assert torch.equal(full.isfinite(), self.tensors["t2d"])
        return full


class Eagle3(Reader):
    """An EAGLE-3 folder in one engine."""

    def __init__(self, folder: Path, model: Any, engine: str) -> None:
        super().__init__(folder, model)
        self.prefix = "layers.0" if "layers.0.hidden_norm.weight" in self.tensors else "midlayer"
        n = model.config.num_hidden_layers
        key = "eagle_aux_hidden_state_layer_ids"
        ids = self.config.get(key) or self.config.get("eagle_config", {}).get(key)
        self.taps = [i + OFFSET[engine] for i in ids] if ids else [2, n // 2, n - 3]
        assert self.config.get("norm_before_residual") is False

    def in_layer(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}.{name}.weight"]

    def fused(self, text: Tensor) -> Tensor:
        """(n, H) for a text of n tokens."""
        states = self.model(text[None], output_hidden_states=True).hidden_states
        taps = [states[i][0] for i in self.taps]
        if self.config.get("fc_norm"):
            taps = [self.norm(tap, f"fc_norm.{i}.weight") for i, tap in enumerate(taps)]
        return torch.cat(taps, -1) @ self.tensors["fc.weight"].T

    def outputs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(n, H) before the final norm: row i reads a state and the token after it, and sees rows up to its own."""
        embedding = self.tensors.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        read = [self.norm(embedding[tokens], f"{self.prefix}.input_layernorm.weight")]
        x = torch.cat([*read, self.norm(hidden, f"{self.prefix}.hidden_norm.weight")], -1)
        q, k, v = (self.split(x @ self.in_layer(f"self_attn.{name}_proj").T) for name in "qkv")
        assert (q.shape[1], k.shape[1]) == (self.layer["num_attention_heads"], self.layer["num_key_value_heads"])
        places = torch.arange(len(tokens))
        q, k = self.turned(q, places), self.turned(k, places)
        rows = torch.stack([self.read(q[i], k[: i + 1], v[: i + 1]) for i in range(len(tokens))])
        return self.feed_forward(hidden + rows @ self.in_layer("self_attn.o_proj").T, self.prefix)

    @torch.no_grad()
    def draft(self, text: Tensor, root: int, tokens: Sequence[int]) -> list[Tensor]:
        """Logits (V,) over the target's vocabulary of every token behind the root, along a draft of such tokens."""
        states, follow, found = self.fused(text), torch.cat([text[1:], torch.tensor([root])]), []
        for token in [*tokens, None]:
            out = self.outputs(states, follow)[-1]
            normed = self.norm(out, "norm.weight")
            found.append(self.over_target(self.tensors["lm_head.weight"] @ normed))
            if token is not None:
                back = normed if self.config.get("norm_output") else out
                states, follow = torch.cat([states, back[None]]), torch.cat([follow, torch.tensor([token])])
        return found


class Eagle1(Reader):
    """An EAGLE-1 folder: states foretold one after another, spoken by the target's own output matrix."""

    @torch.no_grad()
    def draft(self, text: Tensor, root: int, tokens: Sequence[int]) -> list[Tensor]:
        """Logits (V,) of every token behind the root, along a draft of such tokens."""
        states = self.model.model(text[None]).last_hidden_state[0]
        follow, found = torch.cat([text[1:], torch.tensor([root])]), []
        for token in [*tokens, None]:
            out = self.outputs(states, follow)[-1]
            found.append(self.model.get_output_embeddings().weight @ out)
            if token is not None:
                states, follow = torch.cat([states, out[None]]), torch.cat([follow, torch.tensor([token])])
        return found

    def outputs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(n, H): row i fuses a state with the token after it, and sees rows up to its own."""
        x = torch.cat([self.model.get_input_embeddings().weight[tokens], hidden], -1) @ self.tensors["fc.weight"].T
        x = x + self.tensors.get("fc.bias", torch.zeros_like(x[0]))
        assert ("fc.bias" in self.tensors) == self.config["bias"]
        q, k, v = (self.split(x @ self.tensors[f"layers.0.self_attn.{name}_proj.weight"].T) for name in "qkv")
        places = torch.arange(len(tokens))
        q, k = self.turned(q, places), self.turned(k, places)
        rows = torch.stack([self.read(q[i], k[: i + 1], v[: i + 1]) for i in range(len(tokens))])
        return self.feed_forward(x + rows @ self.tensors["layers.0.self_attn.o_proj.weight"].T, "layers.0")


class DFlash(Reader):
    """A DFlash folder: the text as keys and values of every layer, and a block of masks that sees itself."""

    def draft(self, text: Tensor, tokens: Sequence[int]) -> list[Tensor]:
        """Logits (V,) of the tokens behind the root, the first of ``tokens``; the others do not matter."""
        output = self.model.get_output_embeddings().weight
        return list(self.slots(text, tokens[0])[1:] @ output.T)  # a slot speaks of its own place: not the root's

    @torch.no_grad()
    def slots(self, text: Tensor, root: int) -> Tensor:
        """(slots, H) behind the final norm."""
        states = self.model(text[None], output_hidden_states=True).hidden_states
        own = self.config["dflash_config"]
        taps = torch.cat([states[i + 1][0] for i in own["target_layer_ids"]], -1)
        context = self.norm(taps @ self.tensors["fc.weight"].T, "hidden_norm.weight")
        block = torch.tensor([root] + [own["mask_token_id"]] * (self.config["block_size"] - 1))
        hidden = self.model.get_input_embeddings().weight[block]
        places = torch.arange(len(text) + len(block))
        for i in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{i}"
            q, k, v, o = (self.tensors[f"{prefix}.self_attn.{name}_proj.weight"].T for name in "qkvo")
            x = self.norm(hidden, f"{prefix}.input_layernorm.weight")
            queries = self.norm(self.split(x @ q), f"{prefix}.self_attn.q_norm.weight")
            seen = torch.cat([context, x])
            keys = self.turned(self.norm(self.split(seen @ k), f"{prefix}.self_attn.k_norm.weight"), places)
            queries, values = self.turned(queries, places[len(text) :]), self.split(seen @ v)
            hidden = hidden + torch.stack([self.read(query, keys, values) for query in queries]) @ o
            hidden = self.feed_forward(hidden, prefix)
        return self.norm(hidden, "norm.weight")


class DSpark(DFlash):
    """A DSpark folder: every slot speaks of the place behind it, and knows the token before that."""

    @torch.no_grad()
    def draft(self, text: Tensor, tokens: Sequence[int]) -> list[Tensor]:
        """Logits (V,) behind each of ``tokens``, of which the first is the root."""
        output = self.tensors.get("lm_head.weight", self.model.get_output_embeddings().weight)
        w1, w2 = (self.tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        slots = self.slots(text, tokens[0])
        assert w1.shape[1] == self.config["markov_rank"] and len(slots) == len(tokens)
        return [self.over_target(output @ h + w2 @ w1[token]) for h, token in zip(slots, tokens, strict=True)]


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


@torch.no_grad()
def medusa_project(folder: Path, model: Any, last: Tensor) -> list[Tensor]:
    """Logits (V,) a head, from the Medusa project's tensors and the target's last state (H,) after its norm."""
    config, tensors = stored(folder)
    found, layers = [], config["medusa_num_layers"]
    for head in range(config["medusa_num_heads"]):
        x = last
        for layer in range(layers):
            x = x + silu(tensors[f"{head}.{layer}.linear.weight"] @ x + tensors[f"{head}.{layer}.linear.bias"])
        found.append(tensors.get(f"{head}.{layers}.weight", model.get_output_embeddings().weight) @ x)
    return found


@torch.no_grad()
def medusa_vllm(folder: Path, model: Any, last: Tensor) -> list[Tensor]:
    """The same from the tensors that vLLM names."""
    config, tensors = stored(folder)
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    found = []
    for head in range(config["num_heads"]):
        x = last
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{head}.layers.{layer}"
            x = x + silu(tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"])
        logits = tensors[f"lm_heads.{head}.weight"] @ x
        full = logits.new_full((config["vocab_size"],), float("-inf"))
        assert logits.shape[0] == config["truncated_vocab_size"]
        full[tensors.get("token_map", torch.arange(len(logits)))] = logits
        found.append(full)
    return found


MEDUSA: dict[str | None, Callable[[Path, Any, Tensor], list[Tensor]]] = {None: medusa_project, "vllm": medusa_vllm}
BLOCKS: dict[str, type[DFlash]] = {"dflash": DFlash, "dspark": DSpark}
