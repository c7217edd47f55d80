"""A configuration as it may be written and shown: texts that can be secrets become ``***``.

A key that is declared so (``Key.secret``) hides every text in it. In the options of any key, an
entry whose name says so (``api_key``, ``headers``) is hidden. In a text of any key, the name, the
password and the query of an address are, and what follows ``Bearer`` or ``--api-key``. A value that
refers to the environment (``${oc.env:NAME}``) is written as that text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ctrl_megatron.config.keys import Key, value_at_key
from ctrl_megatron.config.schema import KEYS, Config

HIDDEN = "***"
_ENTRY = re.compile(
    r"(?:.*_)?(?:key|token|pwds?|auth|authorization|bearer|cookies?|headers?|env|environ(?:ment)?"
    r"|env_vars|jwt|dsn|connection_string)"
    # Written as one word, or of several.
    r"|.*(?:secret|password|passwd|passphrase|passcode|credential)s?"
    r"|.*(?:api|access|secret|private|auth|bearer|refresh|hf|signing)_?"
    r"(?:key|token)(?:s|_ids?)?"
)
_NO_SECRET = re.compile(
    r"(?:prompt|sort|group|cache|primary)_key"
    r"|(?:stop|eos|bos|pad|mask|unk|sep|cls|end|begin|start|image|special|think)_token"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_CREDENTIALS = re.compile(
    r"(?<=://)((?:(?!,\s*\w+://)\S)*)(?=@)"
    # A proxy's address, or one whose scheme was forgotten, as a whole text.
    r"|^([^\s/@:]+:[^\s/@]+)(?=@[\w.-]+(?::\d+)?(?:/\S*)?$)"
)
_QUERY = re.compile(r"(://[^\s?#]*\?)([^\s#]+)")
_WRITTEN = re.compile(
    r"(\b[Bb]earer |--(?:[\w-]+-)?(?:api-?key|password|secret)[= ]"
    r"|--(?:(?:api|hf|auth|access)-)?token[= ])(\*{3}|(?=\S*\d)[^\s'\"]{8,})"
)
"""The value of a header, and an argument of a command, as texts have them."""
_FORMS = (_QUERY, _WRITTEN)
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\w+\}")


def values_without_secrets(config: Config) -> dict[str, Any]:
    """Dotted name -> value of every key, as it may be written and sent to others."""
    return {name: hide_secrets(KEYS[name], _unresolved(config, name)) for name in KEYS}


def hide_secrets(key: Key, value: Any, found: Callable[[str], None] = lambda text: None) -> Any:
    """The value of a key without what can be a secret, of which each text is given to ``found``."""
    return _mapped(value, key.secret is not None and key.secret.whole, found)


def secrets_in_value(key: Key, value: Any) -> list[str]:
    """The texts that ``hide_secrets`` takes out of the value of a key."""
    found = list[str]()
    hide_secrets(key, value, found.append)
    return found


def secrets_in_tree(tree: Any) -> list[str]:
    """The texts that ``hide_secrets_in_tree`` takes out of a configuration's tree."""
    found = list[str]()
    hide_secrets_in_tree(tree, found.append)
    return found


def hide_secrets_in_tree(tree: Any, found: Callable[[str], None] = lambda text: None) -> Any:
    """A configuration's tree without what can be a secret, also at keys that do not exist, such as
    an older version's; each text of these is given to ``found``."""

    def below(prefix: str, inner: Any) -> Any:
        if prefix in KEYS:
            return hide_secrets(KEYS[prefix], inner, found)
        if isinstance(inner, Mapping):
            return {n: below(f"{prefix}.{n}" if prefix else str(n), v) for n, v in inner.items()}
        named = any(map(_says_secret, prefix.split(".")))
        return _mapped(inner, False, found, named)

    return below("", tree)


def hidden_key_names(key: Key, value: Any) -> Iterator[str]:
    """The dotted names, from the key's own, of the parts that are hidden in ``value``, which was
    read from a file that a run has written."""
    yield from (name for name, text in _leaves(key.name, value) if HIDDEN in _parts(text))


def hide_credentials_in_text(text: str) -> str:
    """A text without the names, passwords and queries of its addresses, and without the values
    behind ``Bearer`` and ``--token``-like arguments. A secret elsewhere in the text stays."""
    return _hide_addresses(text, lambda part: None)


def hide_credentials_in_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a command, by name, without passwords of addresses."""
    return {
        name: hide_credentials_in_text(v) if isinstance(v, str) else v for name, v in values.items()
    }


def secret_storage_advice(key: Key) -> str:
    """Advice to a user in place of writing a secret into a file."""
    own = f"{key.secret.instead}, or " if key.secret is not None and key.secret.instead else ""
    return f"{own}write ${{oc.env:NAME}} for the variable NAME"


def _unresolved(config: Config, name: str) -> Any:
    """The value of a key; where it refers to the environment, as it was written."""
    value = value_at_key(config, name)
    resolved, text = config.unresolved.get(name, (None, None))
    return text if name in config.unresolved and value == resolved else value


def _mapped(value: Any, secret: bool, found: Callable[[str], None], named: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _mapped(inner, secret, found, named or _says_secret(str(name)))
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_mapped(inner, secret, found, named) for inner in value)
    if isinstance(value, str) and not (secret or named):
        return _hide_addresses(value, found)
    number = named and isinstance(value, int | float) and not isinstance(value, bool)
    if number or (isinstance(value, str) and value and not _FROM_ENVIRONMENT.fullmatch(value)):
        found(str(value))
        return HIDDEN
    return value


def _hide_addresses(text: str, found: Callable[[str], None]) -> str:
    def hidden(part: str) -> str:
        if not part or _FROM_ENVIRONMENT.fullmatch(part):
            return part
        found(part)
        if part.partition(":")[2]:
            found(part.partition(":")[2])
        return HIDDEN

    text = _CREDENTIALS.sub(lambda match: hidden(match[0]), text)
    for form in _FORMS:
        text = form.sub(lambda match: match[1] + hidden(match[2]), text)
    return text


def _says_secret(name: str) -> bool:
    words = _CAMEL.sub("_", name).replace("-", "_").lower()
    return bool(_ENTRY.fullmatch(words)) and not _NO_SECRET.fullmatch(words)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for below, inner in value.items():
            yield from _leaves(f"{name}.{below}", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(name, inner)
    elif isinstance(value, str):
        yield name, value


def _parts(text: str) -> list[str]:
    """The text, and what of the addresses in it could be hidden."""
    texts = (match[2] for form in _FORMS for match in form.finditer(text))
    users = (match[0] for match in _CREDENTIALS.finditer(text))
    return [text, *users, *texts]
