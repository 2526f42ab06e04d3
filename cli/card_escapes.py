"""Texts of others in a card: what a dataset's header says must not become markup, settings, or somebody's secret."""

from __future__ import annotations

import re
import string

from hsfmt.storage.redaction import redacted

_LONGEST = 200
_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
_HUB_CACHE = re.compile(r"(?:^|[/\\])(?:models|datasets|spaces)--([^/\\]+?)--([^/\\]+)(?:[/\\]|$)")
_NAME_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_HOST = re.compile(r"://|@|:[0-9]+/|^[0-9]{1,3}(\.[0-9]{1,3}){3}\b")
_KEY = re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bsk-[A-Za-z0-9_-]{16,}|\bgh[a-z]_[A-Za-z0-9]{16,}")
_NOT_SHOWN = "not shown: it is a path or an address"


def public_text(text: str) -> str:
    """Return a name, revision or digest as it may be published: no folders, hosts, user names or tokens.

    >>> public_text("/mnt/ann/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0a1b")
    'Qwen/Qwen3-8B'
    >>> public_text("/data/ann/checkpoints/step-400"), public_text("/mnt/ann"), public_text("https://ann@host/model")
    ('step-400', 'not shown: it is a path or an address', 'not shown: it is a path or an address')
    """
    text = redacted(text).strip()
    cached = _HUB_CACHE.search(text)
    if cached:
        text = f"{cached[1]}/{cached[2]}"
    if _HOST.search(text) or _KEY.search(text):
        return _NOT_SHOWN
    segments = [segment for segment in re.split(r"[/\\]", text) if segment]
    is_path = text[:1] in {"/", "\\", "~", "."} or "\\" in text or re.match(r"[A-Za-z]:[/\\]?", text) is not None
    if is_path or len(segments) > 2:
        # The last of few may be the name of a user or of a machine.
        if len(segments) < 4 or not _NAME_ON_THE_HUB.fullmatch(segments[-1]):
            return _NOT_SHOWN
        text = segments[-1]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def markdown(text: str) -> str:
    r"""Return a text that Markdown and HTML show as it is: no markup, no link, no line break.

    >>> print(markdown("a|b [x](http://y)\n# <b>"))
    a\|b \[x\]\(http\:\/\/y\) \# &lt;b&gt;
    """
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    escaped = _PUNCTUATION.sub(r"\\\1", plain)
    # What HTML reads before Markdown's escapes are looked at, as entities.
    return escaped.replace(r"\&", "&amp;").replace(r"\<", "&lt;").replace(r"\>", "&gt;")


def yaml_string(text: str) -> str:
    r"""Return a text as a double-quoted YAML scalar on one line, which holds nothing but that text.

    >>> print(yaml_string('a"b\n---'))
    "a\"b\x0A---"
    """
    return '"' + "".join(map(_yaml_character, text)) + '"'


def _yaml_character(character: str) -> str:
    code = ord(character)
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable() and not 0xD800 <= code <= 0xDFFF:
        return character
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
