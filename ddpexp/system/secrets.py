"""Secrets in environment variables: masked in everything printed or written, and turned back into references."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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


def masked(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace values of secret variables by `${NAME}`, whether plain or as Python and JSON quote them."""
    return masker(environ)(text)


def masker(environ: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """Return a function that masks texts; it reads the environment only once."""
    replacements = [
        (form, f"${{{name}}}")
        for whole, name in secret_variables(environ)
        for value in _parts(whole)
        for form in {value, repr(value)[1:-1], value.replace("\\", "\\\\").replace('"', '\\"')}
    ]
    replacements.sort(key=lambda replacement: -len(replacement[0]))

    def mask(text: str) -> str:
        for form, reference in replacements:
            text = text.replace(form, reference)
        return text

    return mask


def masked_tree(tree: Any, mask: Callable[[str], str] | None = None) -> Any:
    """Mask every string of a nested structure, including the keys."""
    mask = mask or masker()
    if isinstance(tree, str):
        return mask(tree)
    if isinstance(tree, Mapping):
        return {mask(key) if isinstance(key, str) else key: masked_tree(value, mask) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked_tree(value, mask) for value in tree]
    return tree


def referenced(overrides: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Undo the shell's expansion of `key=$TOKEN`.

    Return the overrides with `${oc.env:TOKEN}` in place of the value, and a note for the user on each replacement.
    """
    secrets, changed, notes = secret_variables(environ), [], []
    for override in overrides:
        start = _OVERRIDE.match(override)
        value = override[start.end() :] if start else ""
        for secret, name in secrets:
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


def _parts(value: str) -> Iterator[str]:
    """Yield a secret and, if it is a URL, the password in it: libraries print that separately."""
    yield value
    url = _OF_URL.fullmatch(value)
    if url is not None and url[1] is not None and len(url[1]) >= _MIN_LENGTH and not _NUMBER.fullmatch(url[1]):
        yield url[1]


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
