"""Draft → verify → commit: decoding with heads, measuring it, and showing that nothing changed.

out = infer.generate("runs/quickstart/heads", "Why is the sky blue?", max_new_tokens=64)
for piece in infer.stream(model, messages, draft=heads): print(piece, end="")
"""

from infer.custom import custom_generate
from infer.generate import Generation, generate, stream
from infer.prefix import PrefixCache

__all__ = ["Generation", "PrefixCache", "custom_generate", "generate", "stream"]
