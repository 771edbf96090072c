"""Tokenizers: characters, bytes, and those of the libraries tokenizers and tiktoken.

Standard library only, and fast to import: the launching command imports this module. The libraries are extras, which
are imported where they are used.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ddpexp.errors import RefusedError
from ddpexp.system.files import read_regular_text

TOKENIZER_FILE = "tokenizer.json"  # the copy in a cache
TIKTOKEN = ("gpt2", "r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony")


class Tokenizer(Protocol):
    """Turns text into numbers from 0 to below `vocab_size`, and back."""

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens."""
        ...

    @property
    def encoding(self) -> str:
        """Return the encoding by which bytes of a file become the text for `pack`."""
        ...

    @property
    def record(self) -> dict[str, Any]:
        """Return JSON from which `from_record` makes the tokenizer again."""
        ...

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """Encode texts, each to unsigned integers of `token_bytes(vocab_size)` bytes, little-endian."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a prompt. Raises: RefusedError, if it holds what the tokenizer does not know."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; what is no text is replaced."""
        ...

    def special(self, token: str) -> int | None:
        """Return the number of a special token such as `<|endoftext|>`; None if there is none."""
        ...


def token_bytes(vocab_size: int) -> int:
    """Return the number of bytes of a stored token: 1, 2 or 4."""
    if vocab_size <= 1 << 8:
        return 1
    return 2 if vocab_size <= 1 << 16 else 4


@dataclass(frozen=True)
class Chars:
    """Unicode characters; `table` holds those of the training text, sorted."""

    table: str
    encoding: str = "utf-8"

    @property
    def vocab_size(self) -> int:
        """Return the number of different characters."""
        return len(self.table)

    @property
    def record(self) -> dict[str, Any]:
        """Return the table, in ASCII and without what YAML or a configuration would take for something else."""
        return {"kind": "char", "table": self.table.encode("unicode_escape").decode().replace("$", r"\x24")}

    @cached_property
    def _numbers(self) -> dict[int, str]:
        return {ord(character): chr(number) for number, character in enumerate(self.table)}

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """Encode texts whose characters are in the table."""
        # As the characters that have these numbers: Python encodes them in one pass.
        target = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[token_bytes(len(self.table))]
        return [text.translate(self._numbers).encode(target, "surrogatepass") for text in texts]

    def encode(self, text: str) -> list[int]:
        """Encode a prompt."""
        unknown = sorted(set(text) - set(self.table))
        if unknown:
            raise RefusedError(
                f"the text holds {unknown[0]!r}, which is not among the {len(self.table)} characters that the "
                "model was trained on",
                suggestion="Leave it out.",
            )
        return [ord(self._numbers[ord(character)]) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the characters; numbers beyond the table, which a larger model may draw, are replaced."""
        return "".join(
            self.table[token] if token < len(self.table) else "\N{REPLACEMENT CHARACTER}" for token in tokens
        )

    def special(self, token: str) -> int | None:
        """Return None: there are none."""
        return None


@dataclass(frozen=True)
class Bytes:
    """The 256 bytes, of text or of anything else."""

    vocab_size: int = 256
    encoding: str = "latin-1"  # so that each character stands for a byte

    @property
    def record(self) -> dict[str, Any]:
        """Return the kind alone."""
        return {"kind": "bytes"}

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """Return the bytes that the characters stand for."""
        return [text.encode(self.encoding) for text in texts]

    def encode(self, text: str) -> list[int]:
        """Encode a prompt as UTF-8."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Read bytes as UTF-8."""
        return bytes(token for token in tokens if token < self.vocab_size).decode(errors="replace")

    def special(self, token: str) -> int | None:
        """Return None: there are none."""
        return None


@dataclass(frozen=True)
class Library:
    """A tokenizer of the library tokenizers: the content of its file."""

    content: str
    name: str  # as configured
    encoding: str = "utf-8"

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizers = _imported("tokenizers", self.name)
        try:
            return tokenizers.Tokenizer.from_str(self.content)
        except Exception as error:  # the library raises nothing more specific
            raise RefusedError(
                f"is not a file of the library tokenizers ({error})",
                key="data.tokenizer",
                value=self.name,
                suggestion="Name a tokenizer.json.",
            ) from None

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, added ones too."""
        size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        return size

    @property
    def record(self) -> dict[str, Any]:
        """Return the name and the hash of the content, which is in the cache."""
        return {"kind": "tokenizers", "name": self.name, "sha256": hashlib.sha256(self.content.encode()).hexdigest()}

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """Encode texts in parallel, without special tokens."""
        kind = _CODES[token_bytes(self.vocab_size)]
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [array(kind, one.ids).tobytes() for one in encoded]

    def encode(self, text: str) -> list[int]:
        """Encode a prompt, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def special(self, token: str) -> int | None:
        """Return the number of a token by its text."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number


@dataclass(frozen=True)
class Tiktoken:
    """An encoding of tiktoken, which downloads its table once."""

    name: str
    encoding: str = "utf-8"

    @cached_property
    def _encoding(self) -> Any:
        tiktoken = _imported("tiktoken", self.name)
        try:
            return tiktoken.get_encoding(self.name)
        except Exception as error:  # whatever its download raises
            raise RefusedError(
                f"Tiktoken could not load its table ({type(error).__name__}: {error})",
                key="data.tokenizer",
                value=self.name,
                suggestion="Check the network, or use a file of the library tokenizers.",
            ) from None

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, special ones too."""
        size: int = self._encoding.n_vocab
        return size

    @property
    def record(self) -> dict[str, Any]:
        """Return the name."""
        return {"kind": "tiktoken", "name": self.name}

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """Encode texts in parallel, without special tokens."""
        kind = _CODES[token_bytes(self.vocab_size)]
        return [array(kind, ids).tobytes() for ids in self._encoding.encode_ordinary_batch(list(texts))]

    def encode(self, text: str) -> list[int]:
        """Encode a prompt, without special tokens."""
        return list(self._encoding.encode_ordinary(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._encoding.decode([token for token in tokens if token < self.vocab_size])
        return text

    def special(self, token: str) -> int | None:
        """Return the number of a special token by its text."""
        try:
            number: int = self._encoding.encode_single_token(token)
        except KeyError:
            return None
        return number


_CODES = {1: "B", 2: "H", 4: "I"}  # of the module `array`


def identity(name: str) -> list[str]:
    """Return what identifies the tokenizer that `data.tokenizer` names, without importing its library.

    Raises: RefusedError, if it is none.
    """
    if name in ("char", "bytes"):
        return [name]
    if name in TIKTOKEN:
        return ["tiktoken", name]
    if is_on_hub(name):
        return ["hub", name]
    path = Path(os.path.expanduser(name))
    if path.suffix == ".json" or path.is_file():
        return ["file", hashlib.sha256(_read(path, name).encode()).hexdigest()]
    raise RefusedError(
        "is not a tokenizer",
        key="data.tokenizer",
        value=name,
        suggestion="Use char, bytes, a tokenizer.json of the library tokenizers, the name of a model on the "
        f"hub such as openai-community/gpt2, or one of tiktoken's: {', '.join(TIKTOKEN)}.",
    )


def is_on_hub(name: str) -> bool:
    """Return whether `data.tokenizer` names a model on the hub."""
    path = Path(os.path.expanduser(name))
    return "/" in name and path.suffix != ".json" and not path.is_file()


def configured(name: str) -> Tokenizer | None:
    """Return the tokenizer that `data.tokenizer` names; None for `char`, whose table comes from the text.

    Raises: RefusedError, if there is no such tokenizer.
    """
    kind = identity(name)[0]
    if kind == "char":
        return None
    if kind == "bytes":
        return Bytes()
    if kind == "tiktoken":
        return Tiktoken(name)
    return Library(_read(Path(os.path.expanduser(name)), name), name) if kind == "file" else _from_hub(name)


def _read(path: Path, name: str) -> str:
    try:
        return read_regular_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text"
        raise RefusedError(
            f"cannot be read ({reason})",
            key="data.tokenizer",
            value=name,
            suggestion="Name a tokenizer.json of the library tokenizers.",
        ) from None


def from_record(record: Mapping[str, Any]) -> Tokenizer:
    """Make the tokenizer of a run again; `folder` in the record is the cache that the run was trained from.

    Raises: RefusedError, if its file has gone, or is another one.
    """
    if record["kind"] == "char":
        return Chars(str(record["table"]).encode().decode("unicode_escape"))
    if record["kind"] == "bytes":
        return Bytes()
    name = str(record["name"])
    if record["kind"] == "tiktoken":
        return Tiktoken(name)
    folder = Path(record["folder"])
    changed = False
    for path in (folder / TOKENIZER_FILE, Path(os.path.expanduser(name))):
        try:
            tokenizer = Library(read_regular_text(path), name)
        except (OSError, UnicodeDecodeError):
            continue
        if tokenizer.record["sha256"] == record["sha256"]:
            return tokenizer
        changed = True
    if changed:
        raise RefusedError("is not the tokenizer of the run", suggestion="Restore its file.", place=name)
    raise RefusedError(f"the tokenizer of the run is neither in {folder} nor at {name}", suggestion="Restore its file.")


def prompt_of(tokenizer: Tokenizer, text: str | None) -> list[int]:
    """Return the tokens of a prompt; without one a new line, or the first token where that is unknown.

    Raises: RefusedError, if the prompt holds what the tokenizer does not know.
    """
    if text:
        return tokenizer.encode(text)
    try:
        return tokenizer.encode("\n") or [0]
    except RefusedError:
        return [0]


def _from_hub(name: str) -> Tokenizer:
    tokenizers = _imported("tokenizers", name)
    try:
        return Library(tokenizers.Tokenizer.from_pretrained(name).to_str(), name)
    except Exception as error:  # whatever the hub's client raises
        raise RefusedError(
            f"could not be loaded from the hub ({type(error).__name__})",
            key="data.tokenizer",
            value=name,
            suggestion="Check the name and the network, or name a tokenizer.json.",
        ) from None


def _imported(library: str, tokenizer: str) -> Any:
    try:
        return __import__(library)
    except ModuleNotFoundError:
        raise RefusedError(
            f"needs the library {library}",
            key="data.tokenizer",
            value=tokenizer,
            suggestion="Install it: pip install 'ddpexp[text]'.",
        ) from None
