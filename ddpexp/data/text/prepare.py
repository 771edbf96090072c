"""Text files to tokens: encoded once, before any worker starts, into a file that the workers map.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import bisect
import codecs
import hashlib
import mmap
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ddpexp.data.cache import Cache, cache_name, find_cache, make_cache
from ddpexp.data.named_files import Source, files_matching, source_of
from ddpexp.data.part_names import named_like_parts, overlap
from ddpexp.data.schema import Field, Schema
from ddpexp.data.text import tokenizer as tokenizers
from ddpexp.data.text.tokenizer import TOKENIZER_FILE, Chars, Library, Tokenizer, token_bytes
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.settings.data import CommonData
from ddpexp.settings.key import Key
from ddpexp.system.files import open_regular
from ddpexp.system.preparation import preparation
from ddpexp.system.text import counted, first_few

TOKENS, BORDERS = "tokens.bin", "borders.bin"
_VERSION = 2  # increase it when the content of caches changes: it is part of their names
_CHUNK = 1 << 20  # bytes that are read at a time; a text is encoded in pieces of about this size that end at a line end
_LONGEST_LINE = 1 << 24  # characters after which a piece ends in the middle of a line
_BATCH = 16 * _CHUNK  # characters that are encoded in one call


def prepare(
    path: str | tuple[str, ...] | None,
    block_size: Annotated[int, Key(at_least=1)],
    tokenizer: str = "char",
    eval_path: str | tuple[str, ...] | None = None,
    eval_fraction: Annotated[float, Key(at_least=0, below=1)] = 0.1,
    documents: Literal["file", "line"] | None = None,
    end_token: str | None = None,
    schema: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make sure that the tokens of the text are in a cache; return a description of the data.

    The result is JSON: name, folder (absolute), hash (of the tokens and how they are divided), num_train, num_test and
    their unit, note, schema, facts (with the record of the tokenizer), and the options that `load` needs. With the
    `schema` of a run the text is encoded by its vocabulary.

    Raises: RefusedError, if a file or an option is invalid, or the text does not fit the schema.
    """
    if end_token is not None and documents is None:
        raise RefusedError(
            "ends each document, but data.documents=null does not divide the text into documents",
            key="data.end_token",
            value=end_token,
            suggestion="Use data.documents=file or data.documents=line.",
        )
    train = _sources(path, "data.path")
    held_out = _sources(eval_path, "data.eval_path") if eval_path is not None else []
    vocabulary = Schema.read(schema).vocabulary if schema is not None else None
    cache = _cached(train, held_out, tokenizer, documents, end_token, vocabulary)
    record, total = cache.record, cache.record["num_tokens"]
    border = record["num_train"] if held_out else _border(total, eval_fraction)
    if documents is not None and not held_out:
        border = _at_a_document(cache.folder / BORDERS, border)
    _check_lengths(border, total, block_size, 0.0 if held_out else eval_fraction, bool(held_out))
    described = dict(record["tokenizer"])
    if described["kind"] == "tokenizers":
        described["folder"] = str(cache.folder)
    decided = Schema(
        (block_size,),
        (Field(None, "text"),),
        "int64",
        (Field(None, "text"),),
        vocab_size=record["vocab_size"],
        vocabulary=described,
    )
    return {
        "name": "text",
        "folder": str(cache.folder),
        "hash": _hash([record["sha256"], record["tokenizer"], border, block_size]),
        "num_train": border,
        "num_test": total - border,
        "unit": "tokens",
        "note": f"{_note(border, total - border, record, train, tokenizer)}{_overlap(train, held_out)}",
        "schema": decided.as_json(),
        "facts": {"vocab_size": record["vocab_size"], "block_size": block_size, "tokenizer": described},
        "block_size": block_size,
        "token_bytes": token_bytes(record["vocab_size"]),
        "documents": documents is not None,
    }


def _cached(
    train: Sequence[Source],
    held_out: Sequence[Source],
    tokenizer: str,
    documents: Literal["file", "line"] | None,
    end_token: str | None,
    vocabulary: Mapping[str, Any] | None,
) -> Cache:
    """Return the cache of texts, encoded by the vocabulary of a run if there is one."""
    bases = [Path(train[0].path).parent, user_cache()]
    identity = {
        "version": _VERSION,
        "train": [vars(source) for source in train],
        "eval": [vars(source) for source in held_out],
        "tokenizer": tokenizers.identity(tokenizer),
        "documents": documents,
        "end_token": end_token,
    }
    if vocabulary is not None:
        known = {key: value for key, value in vocabulary.items() if key != "folder"}
        found = find_cache(bases, cache_name("text", identity))
        if found is not None and found.record["tokenizer"] == known:
            return found
        identity["tokenizer"] = known

    def fill(folder: Path) -> Mapping[str, Any]:
        return _Encoding(folder, tokenizer, documents, end_token, vocabulary).encode(train, held_out)

    space = f"{4 * sum(source.size for source in (*train, *held_out)) / 1e6:,.0f} MB"
    files = [source.path for source in (*train, *held_out)]
    return make_cache(bases, cache_name("text", identity), fill, space, "encoding the same text", files)


def check(data: CommonData) -> None:
    """Check the keys of every kind of data.

    Raises:
        RefusedError: single samples would be held out.
    """
    if data.validation_fraction:
        raise RefusedError(
            "holds out single samples, but the windows of a text begin elsewhere in each epoch",
            key="data.validation_fraction",
            value=data.validation_fraction,
            suggestion="Use data.eval_fraction, which holds out the end of the text.",
        )


def _check_lengths(border: int, total: int, block_size: int, eval_fraction: float, own_files: bool) -> None:
    """Check that the texts to train and to evaluate on have a window each; `own_files`: of those to evaluate on."""
    share = f", the first {1 - eval_fraction:.0%} of {total:,}" if eval_fraction else ""
    _check_length(border, block_size, f"the text to train on has {counted(border, 'token')}{share}")
    if own_files or total > border:
        share = "" if own_files else f", the last {eval_fraction:.0%} of {total:,}"
        _check_length(total - border, block_size, f"the text to evaluate has {counted(total - border, 'token')}{share}")


def _check_length(num_tokens: int, block_size: int, text: str) -> None:
    """Check that a part of the text has a window, and the token after it."""
    if num_tokens <= block_size:
        most = f"Use at most data.block_size={num_tokens - 1}, or a longer text."
        raise RefusedError(
            f"is too long, as {text}",
            key="data.block_size",
            value=block_size,
            suggestion=most if num_tokens > 1 else "Use more text.",
        )


def _border(total: int, eval_fraction: float) -> int:
    """Return the number of tokens to train on: as nanoGPT divides, by position."""
    return int(total * (1 - eval_fraction))


def _at_a_document(path: Path, border: int) -> int:
    """Return the last end of a document up to a token, of documents whose ends are in a file."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as raw,
        raw.cast("q") as ends,
    ):
        place = bisect.bisect_right(ends, border)
        return ends[place - 1] if place else 0


def _sources(paths: str | tuple[str, ...] | None, key: str) -> list[Source]:
    """Return the files that a path, a folder or a pattern names, in the order of their names.

    Raises: RefusedError, if there is none, or one is empty.
    """
    suggestion = "Name a text file, a folder of .txt files, or a pattern such as 'a/*.txt'."
    if not paths:
        raise RefusedError("is not set", key=key, suggestion=suggestion)
    found: list[str] = []
    for path in (paths,) if isinstance(paths, str) else paths:
        path = os.path.abspath(os.path.expanduser(path))
        files, is_folder = files_matching(path, ".txt"), os.path.isdir(path)
        if is_folder:
            _check_one_part(key, Path(path), files)
        if not files:
            problem = "holds no .txt file" if is_folder else "matches no file"
            raise RefusedError(problem, key=key, value=path, suggestion=suggestion)
        found += files
    return [source_of(key, path) for path in found]


def _check_one_part(key: str, folder: Path, files: Sequence[str]) -> None:
    """Check that the files and folders in a folder of texts are not those of several parts."""
    inside = sorted({Path(file).relative_to(folder).parts[0] for file in files})
    parts = named_like_parts(name.removesuffix(".txt") for name in inside)
    if len(set(parts.values())) > 1:
        raise RefusedError(
            f"holds texts that are named like parts ({first_few(list(parts))}), and all of them would be trained on",
            key=key,
            value=folder,
            suggestion="Name the files or folders to train on as data.path, and those to evaluate on as "
            "data.eval_path.",
        )


@dataclass(frozen=True)
class _Encoding:
    """The encoding of files into a folder."""

    folder: Path
    name: str  # of the tokenizer
    documents: str | None
    end_token: str | None
    vocabulary: Mapping[str, Any] | None  # of a run; None: that of the tokenizer, or of the texts

    def encode(self, train: Sequence[Source], held_out: Sequence[Source]) -> dict[str, Any]:
        """Write the files of the cache; return its record. Raises: OSError."""
        for name in (TOKENS, BORDERS, TOKENIZER_FILE):
            (self.folder / name).unlink(missing_ok=True)
        tokenizer = self._tokenizer([*train, *held_out])
        end = self._end(tokenizer)
        if isinstance(tokenizer, Library):
            (self.folder / TOKENIZER_FILE).write_text(tokenizer.content)
        size = token_bytes(tokenizer.vocab_size)
        digest = hashlib.sha256()
        borders = array("q")
        num_tokens = num_train = 0
        size_of_all = sum(source.size for source in (*train, *held_out))
        with (
            open(self.folder / TOKENS, "wb") as file,
            preparation(size_of_all, "encoding the text", "bytes") as advance,
        ):
            for part in (train, held_out):
                for packed, is_end in _packed(part, tokenizer, self.documents, advance):
                    ended = packed + end if is_end else packed
                    digest.update(ended)
                    file.write(ended)
                    num_tokens += len(ended) // size
                    if is_end:
                        borders.append(num_tokens)
                num_train = num_train or num_tokens
            file.flush()
            os.fsync(file.fileno())
        if self.documents is not None:
            (self.folder / BORDERS).write_bytes(borders.tobytes())
        return {
            "sha256": _hash([digest.hexdigest(), hashlib.sha256(borders.tobytes()).hexdigest()]),
            "num_tokens": num_tokens,
            "num_train": num_train,
            "num_documents": len(borders),
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.record,
        }

    def _tokenizer(self, sources: Sequence[Source]) -> Tokenizer:
        known = self.vocabulary
        tokenizer = tokenizers.configured(self.name) if known is None else tokenizers.from_record(known)
        if isinstance(tokenizer, Chars):
            _check_characters(sources, tokenizer.table)
        if tokenizer is not None:
            return tokenizer
        table: set[str] = set()
        for text, _ in _pieces(sources, "utf-8", None):
            table.update(text)
        return Chars("".join(sorted(table)))

    def _end(self, tokenizer: Tokenizer) -> bytes:
        if self.end_token is None:
            return b""
        number = tokenizer.special(self.end_token)
        if number is None:
            raise RefusedError(
                f"is not a token of data.tokenizer={self.name}",
                key="data.end_token",
                value=self.end_token,
                suggestion="Use one of its special tokens, or null.",
            )
        return number.to_bytes(token_bytes(tokenizer.vocab_size), "little")


def _check_characters(sources: Sequence[Source], table: str) -> None:
    """Raise RefusedError if a text holds a character that is not in the table of a run."""
    for source in sources:
        line = 1
        for text, _ in _pieces([source], "utf-8", None):
            unknown = set(text) - set(table)
            if unknown:
                place = min(text.index(character) for character in unknown)
                number = line + text.count("\n", 0, place)
                raise RefusedError(
                    f"holds {text[place]!r} in line {number:,}, which is not among the {len(table):,} characters that "
                    "the model was trained on",
                    suggestion="Leave it out, or train with data.tokenizer=bytes, which encodes every character.",
                    place=source.path,
                )
            line += text.count("\n")


def _packed(
    sources: Sequence[Source], tokenizer: Tokenizer, documents: str | None, on_read: Callable[[int], None]
) -> Iterator[tuple[bytes, bool]]:
    """Yield encoded pieces and whether a document ends there; several are encoded in one call."""
    waiting: list[tuple[str, bool]] = []
    size = 0
    for piece in _pieces(sources, tokenizer.encoding, documents, on_read):
        waiting.append(piece)
        size += len(piece[0])
        if size >= _BATCH:
            yield from _batch(waiting, tokenizer)
            waiting, size = [], 0
    yield from _batch(waiting, tokenizer)


def _batch(pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> Iterator[tuple[bytes, bool]]:
    packed = tokenizer.pack([text for text, _ in pieces])
    yield from zip(packed, (is_end for _, is_end in pieces), strict=True)


def _pieces(
    sources: Sequence[Source], encoding: str, documents: str | None, on_read: Callable[[int], None] = lambda size: None
) -> Iterator[tuple[str, bool]]:
    """Yield the text of files in pieces, and whether a document ends with the piece; `on_read` gets the bytes read.

    Raises: RefusedError, if a file is not in the encoding.
    """
    for source in sources:
        decoder = codecs.getincrementaldecoder(encoding)()
        rest = ""
        read = 0
        with open_regular(source.path) as file:
            while chunk := file.read(_CHUNK):
                on_read(len(chunk))
                try:
                    rest += decoder.decode(chunk)
                except UnicodeDecodeError as error:
                    raise _not_utf8(source.path, read + error.start) from None
                if not read and encoding == "utf-8":
                    rest = rest.removeprefix("\ufeff")  # a byte order mark is no part of the text
                read += len(chunk)
                if documents == "file":
                    continue
                cut = rest.rfind("\n") + 1
                if documents == "line":
                    yield from ((f"{line}\n", True) for line in rest[:cut].split("\n") if line.strip("\r"))
                else:
                    cut = cut or (len(rest) if len(rest) > _LONGEST_LINE else 0)
                    yield rest[:cut], False
                rest = rest[cut:]
            try:
                rest += decoder.decode(b"", final=True)
            except UnicodeDecodeError as error:
                raise _not_utf8(source.path, read + error.start) from None
        if rest:
            yield rest, documents is not None


def _not_utf8(path: str, offset: int) -> RefusedError:
    reason = f"is not text in UTF-8 (at byte {offset:,})"
    return RefusedError(reason, suggestion="Convert it, or use data.tokenizer=bytes.", place=path)


def _note(num_train: int, num_test: int, record: Mapping[str, Any], sources: Sequence[Source], tokenizer: str) -> str:
    files = os.path.basename(sources[0].path) if len(sources) == 1 else f"{len(sources):,} files"
    return (
        f"{num_train:,} + {num_test:,} tokens of {files}, "
        f"data.tokenizer={tokenizer} with {record['vocab_size']:,} different ones"
    )


def _overlap(train: Sequence[Source], held_out: Sequence[Source]) -> str:
    return overlap((source.path for source in train), (source.path for source in held_out))


def _hash(values: Sequence[object]) -> str:
    return hashlib.sha256("\n".join(map(str, values)).encode()).hexdigest()
