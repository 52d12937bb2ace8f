"""Names of roles as people write them: one table, and nothing else in the package knows them."""

from __future__ import annotations

from collections.abc import Mapping

ROLES: dict[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("claude", "gemini", "gpt-3.5", "gpt-4", "gpt4", "llama", "mistral", "qwen"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "function_response", "tool_response"), "tool"),
}
"""Every role's name in use → the four that chat templates know."""
CALLERS = ("function_call", "tool_call")
"""Roles of an assistant's turn whose content is the call itself, as JSON."""


def checked_roles(more: Mapping[str, str]) -> dict[str, str]:
    """:data:`ROLES` with further names.

    Raises:
        ValueError: one of them is to be something that chat templates do not know.
    """
    known = sorted(set(ROLES.values()))
    for name, role in more.items():
        if role not in known:
            raise ValueError(f"role {name!r} cannot be {role!r}: name one of {', '.join(known)}")
    return ROLES | {name.strip().lower(): role for name, role in more.items()}
