"""Secrets of the environment.

Kept out of what is written and shown, and put back as references where they were typed.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

LISTED = "DDPEXP_SECRETS"
"""The variable with further names, such as `MY_DSN,CORP_*`."""

# Words that stand for themselves between the separators of a name, and those that stand for a secret wherever they
# occur in one: PGPASSWORD, AUTHTOKEN. They are what scanners of source code look for (detect-secrets, gitleaks,
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
# How well-known services write theirs: a secret under any name.
_SHAPES = re.compile(
    r"gh[a-z]_\w{30,}|github_pat_\w{20,}|gl[a-z]{2,5}-[\w.-]{20,}|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}|hf_[A-Za-z0-9]{30,}|"
    r"sk-[\w-]{20,}|[srp]k_(?:live|test|prod)_\w{16,}|xox[a-z](?:\.[a-z]+)?-[\w-]{10,}|xapp-[\w-]{10,}|npm_\w{30,}|pypi-[\w-]{50,}|"
    r"do[a-z]_v1_[0-9a-f]{60,}|AIza[\w-]{35}|ya29\.[\w.-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|SG\.[\w-]{16,}\.[\w-]{16,}|"
    r"shp[a-z]{2}_[0-9a-fA-F]{32}|dapi[0-9a-f]{32}(?:-\d+)?|hv[sbr]\.[\w-]{24,}|r8_\w{30,}|nvapi-[\w-]{40,}|lsv2_[a-z]{2}_\w{30,}|"
    r"wandb_v\d_\w{30,}|AGE-SECRET-KEY-1\w{50,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*|"
    r"(?:[\s\S]*;)?(?:AccountKey|SharedAccessKey|SharedAccessSignature|Password|Pwd)=[^;]{8,}[\s\S]*"
)
_HEXADECIMAL = re.compile(r"[0-9a-f]{40}")  # a key of wandb, unless its name says that it is a hash
_OF_HASHES = re.compile(
    r"SHA|COMMIT|REV|HASH|DIGEST|CHECKSUM|HEAD|TREE|REF|GIT|BUILD|VERSION|(?:^|_)ID(?:_|$)", re.IGNORECASE
)
_OF_URL = re.compile(
    r"[A-Za-z][\w+.-]*://[^/\s:@?#]*:([^/\s]+)@[^\s]+|[A-Za-z][\w+.-]*://\S*[?&](?:sig|X-Amz-Signature|[\w-]*token)=\S+"
)
_LEAST = 8  # characters; a shorter value may be any word
_LEAST_LISTED = 4  # of a variable that the user has named
_NUMBER = re.compile(r"[+-]?[\d.,:_]+(?:[eE][+-]?\d+)?")
_NO_SECRETS = {"anonymous", "disabled", "kerberos", "negotiate", "optional", "required", "undefined"}
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*=")
_PATTERN = re.compile(r"(?=.*\w)[\w.*?-]+")


def unusable(environ: Mapping[str, str] = os.environ) -> str | None:
    """Say what is wrong with the names that the user has added; None where they can be used."""
    for pattern in _listed(environ):
        if not _PATTERN.fullmatch(pattern):
            return (
                f"{LISTED}={environ[LISTED]}: {pattern!r} is no name of a variable. Write names separated by commas, "
                "with * for "
                f"any characters, such as {LISTED}=MY_DSN,CORP_*."
            )
        if 0 < len(environ.get(pattern, "")) < _LEAST_LISTED:
            return (
                f"{LISTED}={environ[LISTED]}: the value of {pattern} has fewer than {_LEAST_LISTED} characters, and "
                "hiding those "
                f"would make every text unreadable. Leave {pattern} out, or give it another value."
            )
    return None


def found(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Return (value, name) of the variables that hold secrets, the longest value first.

    Those are the ones that the user has listed in DDPEXP_SECRETS; those whose names look secret, unless the value is a
    path, a number or short; and those whose values look like one of a well-known service, or are a URL with a password.
    """
    listed = _listed(environ)
    known = [
        (value, name)
        for name, value in environ.items()
        if (len(value) >= _LEAST_LISTED and _is_listed(name, listed))
        or (len(value) >= _LEAST and _is_secret(name, value))
    ]
    return sorted(known, key=lambda one: (-len(one[0]), one[1]))


def masked(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Write `${NAME}` where a text has the value of a secret variable, as it is or as Python and JSON quote it."""
    return masker(environ)(text)


def masker(environ: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """Look at the environment once, for many texts."""
    known = [
        (form, f"${{{name}}}")
        for whole, name in found(environ)
        for value in _parts(whole)
        for form in {value, repr(value)[1:-1], value.replace("\\", "\\\\").replace('"', '\\"')}
    ]
    known.sort(key=lambda one: -len(one[0]))

    def mask(text: str) -> str:
        for form, shown in known:
            text = text.replace(form, shown)
        return text

    return mask


def masked_tree(tree: Any, mask: Callable[[str], str] | None = None) -> Any:
    """Mask every text of a tree, its keys too."""
    mask = mask or masker()
    if isinstance(tree, str):
        return mask(tree)
    if isinstance(tree, Mapping):
        return {mask(key) if isinstance(key, str) else key: masked_tree(value, mask) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked_tree(value, mask) for value in tree]
    return tree


def referenced(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Undo what the shell does to `key=$TOKEN`.

    Return the words with `${oc.env:TOKEN}` for the value, and what to say of that.
    """
    known, changed, said = found(environ), [], []
    for word in words:
        start = _OVERRIDE.match(word)
        value = word[start.end() :] if start else ""
        for secret, name in known:
            if secret in value:
                value = value.replace(secret, f"${{oc.env:{name}}}")
                said.append(f"{word[: start.end() - 1].lstrip('+~')} is written as ${{oc.env:{name}}}")  # type: ignore[union-attr]
        changed.append(word[: start.end()] + value if start else word)
    return changed, said


def _listed(environ: Mapping[str, str]) -> list[str]:
    return [pattern.strip() for pattern in environ.get(LISTED, "").split(",") if pattern.strip()]


def _is_listed(name: str, patterns: Sequence[str]) -> bool:
    return name != LISTED and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_secret(name: str, value: str) -> bool:
    """Tell whether a variable that nobody has listed holds one, by its name and by what its value looks like."""
    if _SHAPES.fullmatch(value) or _OF_URL.fullmatch(value):
        return True
    if _HEXADECIMAL.fullmatch(value) and not _OF_HASHES.search(name):
        return True
    if not _NAMES.search(_CAMEL.sub("_", name)) or _NUMBER.fullmatch(value) or value.lower() in _NO_SECRETS:
        return False
    return not _is_path(value)


def _parts(value: str) -> Iterator[str]:
    """Yield a secret, and the password in it where it is a URL: libraries show that apart."""
    yield value
    url = _OF_URL.fullmatch(value)
    if url is not None and url[1] is not None and len(url[1]) >= _LEAST and not _NUMBER.fullmatch(url[1]):
        yield url[1]


def _is_path(value: str) -> bool:
    """Tell whether a value names a place on the disk.

    A secret may begin with a slash too, but then nothing is there.
    """
    place = os.path.expanduser(value)
    if "\0" in place or os.sep not in place:
        return False
    parent = os.path.dirname(place.rstrip(os.sep))
    try:
        return os.path.exists(place) or (parent not in ("", os.sep) and os.path.exists(parent))
    except (OSError, ValueError):
        return False
