"""`--storage-option`: what a storage needs to know of a dataset's URL, for every command that takes one. No secrets.

Commands get the dataset as a store that has the options; neither reports nor errors get to see them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import click

from hsfmt.errors import UsageError
from hsfmt.storage import Store, open_store
from hsfmt.storage.redaction import PUBLIC_TOKENS, redacted

F = TypeVar("F", bound=Callable[..., Any])

NAME = "--storage-option"
_NAMES = (NAME, "--source-option", "--destination-option")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = frozenset({"auth", "authorization", "cookie", "cookies", "keys", "pass", "pwd", "sas", "tokens"})
_SECRET_ENDINGS = ("key", "token")
_SECRET_PIECES = ("accesskey", "connectionstring", "credential", "passphrase", "passw", "secret")
_ENVIRONMENT = (
    "set it in the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (s3), "
    "GOOGLE_APPLICATION_CREDENTIALS (gs), AZURE_STORAGE_CONNECTION_STRING (az), HF_TOKEN (hf), or FSSPEC_<SCHEME>_{}"
)
_HELP = (
    "An option of the storage, as endpoint_url=http://host:9000, anon=true, whole_objects=true or "
    "allow_redirects_to=cdn.example.com; may be repeated. Secrets go into the environment."
)


def parse_options(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> dict[str, Any]:  # noqa: ARG001  as click calls it
    """Return options given as KEY=VALUE: the callback of such options.

    A value is true, false, null, a number, or a JSON string, list or object; all else is text as it stands.

    Raises
    ------
    UsageError
        One is not of that form, or looks like a secret; its value is not shown.
    """
    where = param.opts[0]
    options: dict[str, Any] = {}
    for word in value:
        key, separator, text = word.partition("=")
        if not separator or not _KEY.fullmatch(key):
            raise UsageError.at(where, expected="KEY=VALUE, as anon=true", got="a word of another form")
        options[key] = _parsed(where, key, text)
        secret = next(_secrets_in(key, options[key]), None)
        if secret is not None:
            raise UsageError.at(
                f"{where} {key}",
                expected="no secret, since command lines are visible to everybody",
                got=secret,
                remedy=_ENVIRONMENT.format(key.upper()),
            )
    return options


def storage_option(function: F) -> F:
    """Add --storage-option, as `storage_options`."""
    return _option(NAME, "storage_options", _HELP)(function)


def side_options(function: F) -> F:
    """Add --storage-option, --source-option and --destination-option, for commands between two places."""
    function = _option("--destination-option", "destination_options", "The same for DST alone.")(function)
    function = _option("--source-option", "source_options", "The same for SRC alone.")(function)
    return storage_option(function)


def dataset_argument(function: F) -> F:
    """Add the argument URL: the command, which has `storage_option` too, is called with `store`, the dataset there."""

    @functools.wraps(function)
    def command(*args: Any, url: str, storage_options: Mapping[str, Any], **rest: Any) -> Any:
        return function(*args, store=open_place(url, storage_options), **rest)

    return click.argument("url")(command)  # type: ignore[return-value]  # click takes it for the same


def open_place(url: str, options: Mapping[str, Any], where: str = NAME) -> Store:
    """Return the store at `url`; nothing is read.

    Raises
    ------
    UsageError
        There are options, and it is a local path.
    """
    return open_places([url], options, where)[0]


def open_places(urls: Sequence[str], options: Mapping[str, Any], where: str = NAME) -> list[Store]:
    """Return the stores at `urls`; options are for those of them that are not local.

    Raises
    ------
    UsageError
        There are options, and all of them are local paths.
    """
    stores = [open_store(url) for url in urls]
    if not options:
        return stores
    if all(store.is_local for store in stores):
        remedy = f"leave {where} out: it is for URLs"
        raise UsageError.at(where, expected="none for a local path", got=", ".join(sorted(options)), remedy=remedy)
    return [store if store.is_local else open_store(url, options) for url, store in zip(urls, stores, strict=True)]


def open_sides(
    source: str,
    destination: str,
    shared: Mapping[str, Any],
    of_source: Mapping[str, Any],
    of_destination: Mapping[str, Any],
) -> tuple[Store, Store]:
    """Return the stores of a command that has `side_options`; nothing is read.

    Raises
    ------
    UsageError
        There are options for a local path alone.
    """
    stores = open_places([source, destination], shared)
    for number, url, own in ((0, source, of_source), (1, destination, of_destination)):
        if own:
            stores[number] = open_place(url, {**shared, **own}, _NAMES[1 + number])
    return stores[0], stores[1]


def shown_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line without storage options, and without what may be secret in URLs.

    >>> shown_command(["convert", "dump", "s3://bucket/states", "--storage-option", "anon=true", "--workers", "2"])
    ('convert', 'dump', 's3://bucket/states', '--workers', '2')
    """
    shown = []
    rest = iter(words)
    for word in rest:
        if word in _NAMES:
            next(rest, None)
        elif word.partition("=")[0] not in _NAMES:
            shown.append(redacted(word))
    return tuple(shown)


def _option(name: str, destination: str, text: str) -> Callable[[F], F]:
    return click.option(name, destination, multiple=True, metavar="KEY=VALUE", callback=parse_options, help=text)


def _parsed(where: str, key: str, text: str) -> Any:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError) as error:
        if text[:1] not in {"{", "[", '"'}:
            return text
        expected = "JSON, since it begins like that"
        raise UsageError.at(f"{where} {key}", expected=expected, got="no JSON document") from error


def _secrets_in(key: str, value: Any) -> Iterator[str]:
    """Yield what looks like a secret, in words that don't show it."""
    if _is_secret_key(key):
        if not (value is None or isinstance(value, bool) or (isinstance(value, str) and value in PUBLIC_TOKENS)):
            yield "a key that looks like one"
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secrets_in(name, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _secrets_in("", inner)
    elif isinstance(value, str) and redacted(value) != value:
        yield "a value with user info, a signature or a token in it"


def _is_secret_key(key: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(key)]
    if any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words):
        return True
    return any(piece in "".join(words) for piece in _SECRET_PIECES)
