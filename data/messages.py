"""One message in any spelling → a turn, or a refusal that names what was wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data.roles import CALLERS, ROLES
from data.turns import Refusal, ToolCall, Turn

TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def without_nulls(value: Any) -> Any:
    """``value`` without the keys that are null: Arrow fills a struct's missing keys with them."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _chosen(message: Mapping[str, Any], keys: Sequence[str], what: str) -> Any:
    """The one value that stands under any of ``keys``; None when there is none."""
    found = [message[key] for key in keys if message.get(key) is not None]
    if any(other != found[0] for other in found[1:]):
        raise Refusal(f"two {what}s", f"a message has different values under {' and '.join(map(repr, keys))}: keep one")
    return found[0] if found else None


def text_of(content: Any) -> str:
    """A message's text: a string, or a list of text parts joined.

    Raises:
        Refusal: it is something else, or has a part that is no text.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    raise Refusal("content is not text", f"a message's content is {type(content).__name__}, expected text")


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") in TEXT_PARTS:
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise Refusal("content is not text", f"a message has a part of type {kind!r}; only text can be trained on")


def from_json(text: str, reason: str, what: str) -> Any:
    """Decode JSON that a row holds as a string."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise Refusal(reason, f"{what} is a string that is not JSON ({error})") from error


def _arguments(value: Any) -> dict[str, Any]:
    """Arguments as an object, as JSON text (also encoded twice), or absent in any spelling."""
    for _ in range(2):
        if isinstance(value, str) and value.strip():
            value = from_json(value, "tool call is broken", "a tool call's arguments")
        else:
            value = without_nulls(value)
    if value is None or value == "":
        return {}
    if not isinstance(value, Mapping):
        raise Refusal("tool call is broken", f"a tool call's arguments are {type(value).__name__}, expected an object")
    return {str(key): item for key, item in value.items()}


def _call(call: Any) -> ToolCall:
    if not isinstance(call, Mapping):
        raise Refusal("tool call is broken", f"a tool call is {type(call).__name__}, expected an object")
    function = call["function"] if isinstance(call.get("function"), Mapping) else call
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise Refusal("tool call is broken", f"a tool call has no name (its keys: {_keys(function)})")
    given = function.get("arguments") if function.get("arguments") is not None else function.get("parameters")
    return ToolCall(name, _arguments(given), str(call["id"]) if call.get("id") is not None else None)


def _calls(value: Any) -> tuple[ToolCall, ...]:
    """A list of calls, or one, or either as JSON text."""
    if isinstance(value, str):
        value = from_json(value, "tool call is broken", "a message's tool calls") if value.strip() else None
    if not value:
        return ()
    return tuple(map(_call, value if isinstance(value, list) else [value]))


def _keys(value: Mapping[str, Any]) -> list[str]:
    return sorted(map(str, value))


def _role(message: Mapping[str, Any], roles: Mapping[str, str]) -> str:
    role = _chosen(message, ("role", "from"), "role")
    if not isinstance(role, str):
        raise Refusal("message without role", f"a message has neither `role` nor `from` (its keys: {_keys(message)})")
    name = role.strip().lower()
    if name not in roles and name not in CALLERS:
        raise Refusal("unknown role", f"unknown role {role!r}: name what it is with --role {name}=ROLE")
    return name


def read_turn(message: Any, roles: Mapping[str, str] = ROLES) -> Turn:
    """A message in either spelling of its keys (role and content, from and value) → a turn.

    Raises:
        Refusal: it is no object, has no role or an unknown one, no content, or content that is not text.
    """
    if not isinstance(message, Mapping):
        raise Refusal("message is no object", f"a message is {type(message).__name__}, expected an object")
    name = _role(message, roles)
    content = _chosen(message, ("content", "value", "text"), "content")
    if name in CALLERS:
        return Turn("assistant", "", _calls(content))
    role = roles[name]
    if role == "assistant":
        return _assistant(message, content)
    if content is None:
        raise Refusal("content is missing", f"a message of role {name!r} has no content")
    if role == "tool":
        if isinstance(content, Mapping):
            content = json.dumps(without_nulls(content), ensure_ascii=False)
        tool, call = message.get("name"), message.get("tool_call_id")
        text = text_of(content)
        return Turn(role, text, name=None if tool is None else str(tool), call_id=None if call is None else str(call))
    return Turn(role, text_of(content))


def _assistant(message: Mapping[str, Any], content: Any) -> Turn:
    calls = _calls(message.get("tool_calls")) or _calls(message.get("function_call"))
    reasoning = _chosen(message, REASONING_KEYS, "reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise Refusal("content is not text", f"a message's reasoning is {type(reasoning).__name__}, expected text")
    if content is None:
        if not calls:
            raise Refusal("content is missing", "an assistant's message has neither content nor tool calls")
        content = ""
    return Turn("assistant", text_of(content), calls, (reasoning or "").strip())


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The functions that a row offers: a list of objects, or JSON text of it, or JSON text of each.

    Raises:
        Refusal: it is anything else.
    """
    if isinstance(value, str):
        value = from_json(value, "tools are no list", "`tools`") if value.strip() else None
    if not value:
        return ()
    tools = []
    for tool in value if isinstance(value, list) else [value]:
        if isinstance(tool, str):
            tool = from_json(tool, "tools are no list", "one of `tools`")
        if not isinstance(tool, Mapping):
            raise Refusal("tools are no list", f"one of `tools` is {type(tool).__name__}, expected an object")
        tool = without_nulls(tool)
        if not isinstance(tool.get("function", {}), Mapping):
            raise Refusal("tools are no list", "one of `tools` has a `function` that is no object")
        tools.append(tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool})
    return tuple(tools)
