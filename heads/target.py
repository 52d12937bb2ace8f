"""The frozen target: the only place that knows how a transformers model is built.

Everything comes from the model's public methods and its configuration. No modelling file is forked; what a
configuration cannot say by itself stands in ``LOGIT_TRANSFORMS``. A model that turns out to be built otherwise
is refused, because :meth:`Target.self_check` recomputes its logits from its own last hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from heads import compat, loading
from heads.forward import run
from heads.identify import identify
from heads.identity import TargetIdentity, TargetMismatch, hash_all, is_plain

if TYPE_CHECKING:
    from heads.partial import Partial

# configuration field → how it turns the output matrix's product into logits
LOGIT_TRANSFORMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "final_logit_softcapping": lambda logits, cap: torch.tanh(logits / cap) * cap,
    "logit_scale": lambda logits, scale: logits * scale,
    "logits_scaling": lambda logits, scale: logits / scale,
}


class Target:
    """A frozen language model, seen as heads need it.

    Args:
        model: a causal language model of transformers, possibly PEFT-wrapped. It is put into eval mode.
        name: what to record as its name; the model's own by default.
        adapter: name and revision of the adapter that is on it, to record.

    Raises:
        ValueError: the model has no input embedding, output matrix or layer list that can be found.
    """

    kind: ClassVar[Any] = AutoModelForCausalLM  # of transformers' classes that load models
    _read_tokenizer: Callable[[], Any] | None = None  # from where the target was loaded

    def __init__(
        self, model: PreTrainedModel, *, name: str | None = None, adapter: tuple[str, str | None] | None = None
    ) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(model).__name__} is an encoder-decoder, for which heads are not supported: infer.generate "
                "decodes it with a smaller encoder-decoder as the draft"
            )
        if (mixing := compat.mixes_rows(model)) is not None:
            raise ValueError(
                f"{mixing} of {type(model).__name__} is quantized with activations scaled over the whole pass, so what "
                "a row gives depends on the rows beside it and no draft can be verified: quantize weights only"
            )
        self.model = model.eval()
        self.call: Callable[..., Any] = model  # what a pass calls: the model, or the same model compiled
        self.name = name or str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        self.adapter = adapter
        self.config: Any = compat.text_config(model.config)
        self.embedding: nn.Embedding = self._need("get_input_embeddings", "an input embedding")
        self.output: nn.Linear = self._need("get_output_embeddings", "an output matrix")
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.output.out_features  # may be padded beyond the tokenizer's
        self.layers = self._layer_list()
        self.sliding_window: int | None = getattr(self.config, "sliding_window", None)
        usual = "sliding_attention" if self.sliding_window else "full_attention"
        self.layer_types = tuple(getattr(self.config, "layer_types", None) or [usual] * self.num_layers)
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.rotary_border = compat.rotary_border(self.config)  # no text may grow across it
        self._tokenizer: Any = None
        self._identity: TargetIdentity | None = None

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: torch.dtype | Literal["auto"] = torch.bfloat16,
        device: torch.device | str = "cpu",
        source: str | None = None,
        **options: Any,
    ) -> Self:
        """Load a target by the embedded one's name, a folder, or a Hub id; dtype "auto" is the one it is stored in.

        ``source`` is where it lies, if not under its name; ``options`` are those of :func:`heads.loading.load_model`.
        """
        place = source or str(name)
        target = cls(loading.load_model(cls.kind, place, dtype=dtype, **options).to(device), name=str(name))
        target._read_tokenizer = partial(loading.load_tokenizer, place, **options)
        return target

    def _need(self, method: str, what: str) -> Any:
        found = getattr(self.model, method)()
        if found is None:
            raise ValueError(f"{type(self.model).__name__} lacks {what} ({method} gives None): it cannot be a target")
        return found

    def _layer_list(self) -> nn.ModuleList:
        """The decoder's layers: the one module list as long as the configuration says and nested in no other such."""
        found = self.model.named_modules()
        lists = {name: m for name, m in found if isinstance(m, nn.ModuleList) and len(m) == self.num_layers}
        outer = [m for name, m in lists.items() if not any(name.startswith(other + ".") for other in lists)]
        if len(outer) != 1:
            raise ValueError(
                f"{type(self.model).__name__} has {len(outer)} lists of {self.num_layers} layers where one is "
                "expected: which are the decoder's cannot be told"
            )
        return outer[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the output matrix, in which passes run; of the embedding where a quantizer holds that matrix."""
        weight = self.output.weight
        plain = isinstance(weight, Tensor) and weight.is_floating_point()
        return weight.dtype if plain else self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.embedding.weight.device

    def tokenizer(self) -> Any:
        """The tokenizer that belongs to the target's name."""
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer() if self._read_tokenizer else loading.load_tokenizer(self.name)
        return self._tokenizer

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings (…, H) of token ids (…)."""
        return self.embedding(ids)

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) of post-norm hidden states (…, H), soft-cap and scale included."""
        return self.transform(self.output(hidden))

    def project_rows(self, hidden: Tensor, ids: Tensor | None) -> Tensor:
        """Logits (…, len(ids)) of some vocabulary entries only; all of them for None."""
        if ids is None:
            return self.project(hidden)
        # an adapter on it, or a quantizer: its rows are not all it does
        if type(self.output) is not nn.Linear or not is_plain(self.output.weight):
            return self.project(hidden)[..., ids]
        bias = getattr(self.output, "bias", None)
        rows = self.output.weight[ids], None if bias is None else bias[ids]
        return self.transform(nn.functional.linear(hidden, *rows))

    def transform(self, logits: Tensor) -> Tensor:
        """The target's soft-cap or scale on raw products of its output matrix."""
        for field, function in LOGIT_TRANSFORMS.items():
            if (value := getattr(self.config, field, None)) is not None:
                logits = function(logits, value)
        return logits

    forward = torch.no_grad()(run)

    def partial(self, layers: Sequence[int]) -> Partial:
        """A pass through some of the model's own layers; see :class:`heads.partial.Partial`."""
        from heads.partial import Partial

        return Partial(self, layers)

    @cached_property
    def plain(self) -> Any:
        """Class of the model itself, without an adapter's wrapper around it."""
        unwrap = getattr(self.model, "get_base_model", None)
        return type(unwrap() if unwrap else self.model)

    @cached_property
    def by_place(self) -> str | None:
        """What of the model goes by places in the cache, so that a pass is one text in order; None for nothing.

        Siblings of a tree, and texts of different lengths, have the same positions at different places.
        """
        return compat.by_place(self.config) or (None if compat.takes(self.plain, "position_ids") else "positions")

    @torch.no_grad()
    def self_check(self) -> None:
        """Recompute logits from the last hidden state and compare.

        Raises:
            ValueError: the model does something between its final norm and its logits that is not known here.
        """
        out = self.forward(torch.arange(2, device=self.device)[None] % self.vocab_size, hidden=True)
        assert out.hidden is not None
        ours = self.project(out.hidden).float()
        theirs = out.logits.float()
        bound = max(1e-4, torch.finfo(self.dtype).eps)  # a wide soft-cap moves logits by parts in a thousand
        if not torch.allclose(ours, theirs, rtol=bound, atol=bound * float(theirs.abs().max())):
            raise ValueError(
                f"the logits of {type(self.model).__name__} do not follow from its last hidden state and output matrix "
                f"(largest difference {float((ours - theirs).abs().max()):.3g}): it is not supported as a target"
            )

    def identity(self) -> TargetIdentity:
        """What heads record of this target."""
        if self._identity is None:
            self._identity = identify(self)
        return self._identity

    def check(self, wanted: TargetIdentity, *, allow_mismatch: bool = False) -> None:
        """Compare with what heads recorded.

        Raises:
            TargetMismatch: it is another model, unless ``allow_mismatch``.
        """
        pieces = wanted.differences(self.identity())
        if pieces and not allow_mismatch:
            raise TargetMismatch(
                f"these heads were trained on {wanted.name}, not on {self.name}: {'; '.join(pieces)}. "
                "Load the target they name, or pass allow_mismatch=True to try all the same"
            )

    def weights_hash(self) -> str:
        """SHA-256 over all parameters and buffers as stored: equal before and after training."""
        return hash_all(compat.stored(self.model).items())
