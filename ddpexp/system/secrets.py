"""Secrets in environment variables: masked in everything printed or written, and turned back into references."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ddpexp.compat.python import variables_of
from ddpexp.errors import RefusedError

LISTED = "DDPEXP_SECRETS"
"""The variable that lists further names, such as `MY_DSN,CORP_*`."""

# Words that mark a secret as a whole part of a name, between separators, and those that mark one anywhere in it
# (PGPASSWORD, AUTHTOKEN). They are the ones that scanners of source code look for (detect-secrets, gitleaks,
# trufflehog).
_BEFORE_KEY = (
    "API|APP|ACCESS|ACCOUNT|ADMIN|AES|AUTH|CLIENT|CONSUMER|CRYPT|DEPLOY|ENC|ENCRYPTION|GPG|HMAC|LICENSE|MASTER|PGP|PRIVATE|PRIV|RSA|"
    "SECRET|SERVICE|SHARED|SIGNING|SSH|STORAGE|SUBSCRIPTION|USER"
)
_BEFORE_PASS = (
    "ADMIN|DB|FTP|HTTP|IMAP|KEY|LDAP|MAIL|"
    "MONGO|MQ|MSSQL|MY|MYSQL|ORACLE|PG|POSTGRES|PROXY|REDIS|ROOT|SMTP|SQL|SSH|STORE|SUDO|USER"
)
_WORDS = (
    rf"(?:{_BEFORE_KEY})?KEYS?|(?:{_BEFORE_PASS})?(?:PASS|PASSWDS?|PW)|(?:{_BEFORE_PASS})PWD|PASSCODE|PASSKEY|CREDS?|O?AUTH|AUTHORIZATION|"
    r"BEARER|COOKIES?|DSN|CONN(?:ECTION)?_?STR(?:ING)?|JWT|OTP|TOTP|SALT|PEPPER|WEBHOOK|PEM|SAS"
)
_ANYWHERE = r"PASSWORD(?!LESS)|PASSWD|PASSPHRASE|SECRET(?!AR)|TOKEN(?!I[SZ])|CREDENTIAL|APIKEY|PRIVATEKEY"
_NAMES = re.compile(
    rf"(?:^|[_.-])(?:{_WORDS})S?\d*(?:[_.-]|$)|{_ANYWHERE}|[_.-](?:PWD|PAT)\d*(?:[_.-]|$)",  # PWD alone is a folder
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# The formats of well-known services: a secret under any name.
_SHAPES = re.compile(
    r"gh[a-z]_\w{30,}|github_pat_\w{20,}|gl[a-z]{2,5}-[\w.-]{20,}|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}|hf_[A-Za-z0-9]{30,}|"
    r"sk-[\w-]{20,}|[srp]k_(?:live|test|prod)_\w{16,}|xox[a-z](?:\.[a-z]+)?-[\w-]{10,}|xapp-[\w-]{10,}|npm_\w{30,}|pypi-[\w-]{50,}|"
    r"do[a-z]_v1_[0-9a-f]{60,}|AIza[\w-]{35}|ya29\.[\w.-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|SG\.[\w-]{16,}\.[\w-]{16,}|"
    r"shp[a-z]{2}_[0-9a-fA-F]{32}|dapi[0-9a-f]{32}(?:-\d+)?|hv[sbr]\.[\w-]{24,}|r8_\w{30,}|nvapi-[\w-]{40,}|lsv2_[a-z]{2}_\w{30,}|"
    r"wandb_v\d_\w{30,}|https://(?:hooks\.slack\.com/(?:services|workflows|triggers)|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com)/\S+|"
    r"AGE-SECRET-KEY-1\w{50,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*|"
    r"(?:[\s\S]*;)?(?:AccountKey|SharedAccessKey|SharedAccessSignature|Password|Pwd)=[^;]{8,}[\s\S]*"
)
_HEXADECIMAL = re.compile(r"[0-9a-f]{40}")  # a wandb key, unless the variable's name is that of a hash
_OF_HASHES = re.compile(
    r"SHA|COMMIT|REV|HASH|DIGEST|CHECKSUM|HEAD|TREE|REF|GIT|BUILD|VERSION|(?:^|_)ID(?:_|$)", re.IGNORECASE
)
_OF_URL = re.compile(
    r"[A-Za-z][\w+.-]*://[^/\s:@?#]*:([^/\s]+)@[^\s]+|[A-Za-z][\w+.-]*://\S*[?&](?:sig|X-Amz-Signature|[\w-]*token)=\S+"
)
_MIN_LENGTH = 8  # characters; a shorter value may be an ordinary word
_MIN_LISTED_LENGTH = 4  # for variables that the user has listed
_NUMBER = re.compile(r"[+-]?[\d.,:_]+(?:[eE][+-]?\d+)?")
_NO_SECRETS = {"anonymous", "disabled", "kerberos", "negotiate", "optional", "required", "undefined"}
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*=")
_PATTERN = re.compile(r"(?=.*\w)[\w.*?-]+")
_REFERENCE = re.compile(r"\$\{(?:oc\.env:)?([^\s{}:]+)\}")
_IN_URL = re.compile(  # a password, or what signs the URL
    r"((?:://[^/\s:@?#\"']*:(?=[^/\s@\"']+@)|[?&](?:sig|X-Amz-Signature|[\w-]*token)=))(?!\$\{|\*\*\*)[^/\s@\"'&#]+"
)
_SECRET_IN_URL = "a password in a URL"
_SHORT = 128  # characters of a text that is masked once
_MIN_LINE = 16  # characters of a line of a secret that has several, such as a private key


def unusable(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return what is wrong with the names that the user has listed, or None."""
    for pattern in _listed(environ):
        if not _PATTERN.fullmatch(pattern):
            return (
                f"{LISTED}={environ[LISTED]}: {pattern!r} is not a variable name. Write names separated by commas, "
                f"with * for any characters, such as {LISTED}=MY_DSN,CORP_*."
            )
        if 0 < len(environ.get(pattern, "")) < _MIN_LISTED_LENGTH:
            return (
                f"{LISTED}={environ[LISTED]}: the value of {pattern} has fewer than {_MIN_LISTED_LENGTH} characters, "
                f"and masking those would make every text unreadable. Leave {pattern} out, or give it another value."
            )
    return None


def secret_variables(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Return (value, name) of the variables that hold secrets, the longest value first.

    These are the variables listed in DDPEXP_SECRETS; those whose names look secret, unless the value is a path, a
    number or short; and those whose values have the format of a well-known service, or are a URL with a password.
    """
    listed = _listed(environ)
    secrets = [
        (value, name)
        for name, value in environ.items()
        if (len(value) >= _MIN_LISTED_LENGTH and _is_listed(name, listed))
        or (len(value) >= _MIN_LENGTH and _is_secret(name, value))
    ]
    return sorted(secrets, key=lambda secret: (-len(secret[0]), secret[1]))


class Masked(str):
    """A text without secrets: it is not masked again, which a number in JSON would not survive."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return itself, so that `print` hands it on as it is."""
        return self


def masked(text: str, environ: Mapping[str, str] = os.environ) -> Masked:
    """Replace values of secret variables by `${NAME}`, whether plain or as Python, JSON, YAML, shells or URLs have it.

    The password of any URL, and what signs one, becomes `***`. References to variables stay as they are.
    """
    return text if isinstance(text, Masked) else Masked(masker(environ)(text))


def masker(environ: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """Return a function that masks texts by the present environment, which is searched again once it has changed."""
    return _masker_of(environ).text


def masked_tree(tree: Any, mask: Callable[[str], str] | None = None) -> Any:
    """Mask every string of a nested structure, including the keys."""
    if isinstance(tree, float | int):
        return tree
    mask = mask or masker()
    if isinstance(tree, str):
        return mask(tree)
    if isinstance(tree, Mapping):
        return {
            mask(key) if isinstance(key, str) else key: value if type(value) is float else masked_tree(value, mask)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [value if type(value) is float else masked_tree(value, mask) for value in tree]
    return tree


def held_in(text: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return what a text holds that is secret, such as `the value of TOKEN`; None if it holds nothing of that kind."""
    shown = masked(text, environ)
    if shown == text:
        return None
    before = set(_REFERENCE.findall(text))
    names = [name for name in _REFERENCE.findall(shown) if name not in before]
    return f"the value of {names[0]}" if names else _SECRET_IN_URL


def with_references(tree: Any, environ: Mapping[str, str] = os.environ, key: str = "") -> Any:
    """Put `${oc.env:NAME}` in place of each secret in the strings of a configuration, which resolves to it again.

    Raises:
        RefusedError: there is a secret that no reference can stand for: in a name, or a part of a variable's value.
    """
    if isinstance(tree, Mapping):
        for name in tree:
            if isinstance(name, str) and (what := held_in(name, environ)) is not None:
                raise RefusedError(
                    f"The key {masked(f'{key}.{name}' if key else name, environ)} holds {what}, and "
                    "config.yaml and the records would show it",
                    suggestion="Choose another name, or give the variable another value.",
                )
        return {
            name: with_references(value, environ, f"{key}.{name}" if key else str(name)) for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [with_references(value, environ, f"{key}[{index}]") for index, value in enumerate(tree)]
    if not isinstance(tree, str):
        return tree
    text = _masker_of(environ).referenced(tree)
    what = held_in(text, environ)
    if what is None:
        return text
    raise RefusedError(
        f"holds {what}, which would stand in config.yaml",
        key=key,
        value=masked(tree, environ),
        suggestion="Put all of the value into a variable of the environment, such as MY_SECRET, and type "
        f"{key}='${{oc.env:MY_SECRET}}'.",
    )


def resolved_references(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Undo `with_references` in a text of this command's own: not in one that a run directory brings along."""
    for value, name in _masker_of(environ).secrets:
        text = text.replace(f"${{oc.env:{name}}}", value)
    return text


def referenced(overrides: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Undo the shell's expansion of `key=$TOKEN`.

    Return the overrides with `${oc.env:TOKEN}` in place of the value, and a note for the user on each replacement.
    """
    masker = _masker_of(environ)
    changed = []
    notes = []
    for override in overrides:
        start = _OVERRIDE.match(override)
        value = override[start.end() :] if start else ""
        for secret, name in masker.secrets:
            if secret in value:
                value = value.replace(secret, f"${{oc.env:{name}}}")
                notes.append(f"{override[: start.end() - 1].lstrip('+~')} is written as ${{oc.env:{name}}}")  # type: ignore[union-attr]
        changed.append(override[: start.end()] + value if start else override)
    return changed, notes


def _listed(environ: Mapping[str, str]) -> list[str]:
    return [pattern.strip() for pattern in environ.get(LISTED, "").split(",") if pattern.strip()]


def _is_listed(name: str, patterns: Sequence[str]) -> bool:
    return name != LISTED and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_secret(name: str, value: str) -> bool:
    """Return whether an unlisted variable looks like a secret, by its name and the format of its value."""
    if _SHAPES.fullmatch(value) or _OF_URL.fullmatch(value):
        return True
    if _HEXADECIMAL.fullmatch(value) and not _OF_HASHES.search(name):
        return True
    if not _NAMES.search(_CAMEL.sub("_", name)) or _NUMBER.fullmatch(value) or value.lower() in _NO_SECRETS:
        return False
    return not _is_path(value)


class _Environment:
    """The variables of an environment at some time; equal ones have the same secrets."""

    def __init__(self, variables: Mapping[Any, Any]) -> None:
        self._variables = dict(variables)

    def __hash__(self) -> int:
        return len(self._variables)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Environment) and self._variables == other._variables

    def strings(self) -> dict[str, str]:
        return {os.fsdecode(name): os.fsdecode(value) for name, value in self._variables.items()}


class _Masker:
    """Replaces the secrets of one environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.secrets = secrets = secret_variables(environ)
        replacements = {
            form: f"${{{name}}}" for whole, name in reversed(secrets) for part in _parts(whole) for form in _forms(part)
        }
        self._replacements = sorted(replacements.items(), key=lambda replacement: -len(replacement[0]))
        self._names = {name for _, name in secrets}
        self._short = lru_cache(1024)(self._masked)  # names of metrics, which come with every record

    def text(self, text: str) -> str:
        if isinstance(text, Masked):
            return text[:]  # as a plain string, which YAML and others insist on
        return self._short(text) if len(text) <= _SHORT else self._masked(text)

    def _masked(self, text: str) -> str:
        for form, reference in self._replacements:
            if form in text:
                text = self._replaced(text, form, reference)
        return _IN_URL.sub(r"\1***", text) if "://" in text else text

    def referenced(self, text: str) -> str:
        """Put references to the environment in place of the whole values."""
        for value, name in self.secrets:
            if value in text:
                text = self._replaced(text, value, f"${{oc.env:{name}}}")
        return text

    def _replaced(self, text: str, form: str, reference: str) -> str:
        """Replace a secret, but not in the names of references, which may be the secret's own text."""
        parts, end = [], 0
        for found in _REFERENCE.finditer(text):
            if found[1] in self._names:
                parts += [_put(text[end : found.start()], form, reference), found[0]]
                end = found.end()
        return "".join([*parts, _put(text[end:], form, reference)])


def _put(text: str, form: str, reference: str) -> str:
    *before, last = text.split(form)
    if reference.startswith("${oc.env:"):  # OmegaConf takes one behind a backslash for a text
        before = [re.sub(r"\\+$", r"\g<0>\g<0>", part) for part in before]
    return reference.join([*before, last])


def _masker_of(environ: Mapping[str, str]) -> _Masker:
    return _masker(_Environment(variables_of(environ)))


@lru_cache(4)
def _masker(environment: _Environment) -> _Masker:
    return _Masker(environment.strings())


def _parts(value: str) -> Iterator[str]:
    """Yield a secret and what of it stands alone: the password of a URL, which libraries print, and each long line."""
    yield value
    url = _OF_URL.fullmatch(value)
    if url is not None and url[1] is not None and len(url[1]) >= _MIN_LENGTH and not _NUMBER.fullmatch(url[1]):
        yield url[1]
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (line for line in lines if len(line) >= _MIN_LINE and not line.startswith("-----"))


def _forms(value: str) -> set[str]:
    """Return a secret as it is, and as Python, JSON, YAML, shells, HTML and URLs quote it."""
    forms = {
        value,
        repr(value)[1:-1],
        value.replace("\\", "\\\\").replace('"', '\\"'),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
    }
    if not re.fullmatch(r"[\w.~-]*", value, re.ASCII):
        from html import escape
        from urllib.parse import quote, quote_plus

        bytes_ = value.encode("utf-8", "surrogateescape")
        forms |= {value.replace("'", "''"), value.replace("'", "'\"'\"'"), escape(value), escape(value, quote=False)}
        forms |= {quote(bytes_), quote(bytes_, safe=""), quote_plus(bytes_)}
    return forms


def _is_path(value: str) -> bool:
    """Return whether a value is a path that exists, or could be created.

    A secret may begin with a slash too, but then there is no such directory.
    """
    path = os.path.expanduser(value)
    if "\0" in path or os.sep not in path:
        return False
    parent = os.path.dirname(path.rstrip(os.sep))
    try:
        return os.path.exists(path) or (parent not in ("", os.sep) and os.path.exists(parent))
    except (OSError, ValueError):
        return False
