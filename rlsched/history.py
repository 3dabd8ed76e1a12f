"""The history file: append-only JSON Lines, zstd when its name ends so; the manifest is the first line.

Writing is crash-safe: every flush leaves whole lines, in a zstd frame that can be read up to there,
so a killed run's history is readable up to its last whole event. A history without ``End`` is open.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec
import zstandard

from .commands import AnyCommand, Command
from .errors import BusyError, InputError
from .facts import AnyFact, End, Fact
from .manifest import SCHEMA, Manifest
from .notes import AnyNote, Note

Event = AnyFact | AnyCommand | AnyNote
Line = Fact | Command | Note

_MOST = 1 << 28
"""Bytes of a line beyond which a file is no history."""


class Writer:
    """Writes a history, alone: a second writer of the file is refused, and what stood in it is replaced.

    ``flush_every`` events are at risk when the process is killed.
    """

    def __init__(self, path: Path | str, flush_every: int = 256) -> None:
        self.path = Path(path)
        self.events = 0
        self._every = flush_every
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        try:
            self._file: BinaryIO = self.path.open("ab")
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BusyError(f"{path}: another run is writing it; name another file") from None
        self._file.truncate(0)
        self._zstd = zstandard.ZstdCompressor().compressobj() if ".zst" in self.path.suffixes else None

    def begin(self, manifest: Manifest) -> None:
        """Write the first line."""
        self._line(manifest)
        self.flush()

    def write(self, event: Line) -> None:
        """Append one event."""
        self._line(event)
        self.events += 1
        if self.events % self._every == 0:
            self.flush()

    def flush(self) -> None:
        """Make everything written so far readable by others."""
        data = bytes(self._buffer)
        self._buffer.clear()
        if self._zstd is not None:
            data = self._zstd.compress(data) + self._zstd.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        """Flush, end the frame, and see it onto the disk."""
        if self._file.closed:
            return
        self.flush()
        if self._zstd is not None:
            self._file.write(self._zstd.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _line(self, event: Line | Manifest) -> None:
        self._encoder.encode_into(event, self._buffer, len(self._buffer))
        self._buffer += b"\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


@contextmanager
def whole(path: Path | str) -> Iterator[Path]:
    """A path to write to that becomes ``path`` when the block ends well, and is removed when it fails."""
    path, part = Path(path), Path(f"{path}.part")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not a regular file; name another one")
    try:
        yield part
    except BusyError:
        raise  # the part is the other run's
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)


class Reader:
    """Reads a history in one pass: ``manifest`` first, then ``events()``.

    ``open`` is True until an ``End`` was read. A file that ends within a line was cut by something
    other than the end of its run, and is refused; ``salvage`` reads it up to its last whole event.
    """

    def __init__(self, path: Path | str, salvage: bool = False) -> None:
        self.path = Path(path)
        self.open = True
        self.line = 1
        self._lines = _lines(self.path, salvage)
        first = next(self._lines, None)
        if first is None:
            raise InputError(f"{path}: empty; a history begins with its manifest")
        self.manifest = self._manifest(first)

    def events(self) -> Iterator[Event]:
        """The events in order. Raises InputError at a line that is no known event."""
        decode = msgspec.json.Decoder(Event).decode
        for raw in self._lines:
            self.line += 1
            try:
                event = decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InputError(f"{self.path}, line {self.line}: {error}") from None
            if not self.open:
                raise InputError(f"{self.path}, line {self.line}: an event after the end; cut the file there")
            self.open = not isinstance(event, End)
            yield event

    def _manifest(self, raw: bytes) -> Manifest:
        try:
            head: Any = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{self.path}, line 1: not a manifest: {error}") from None
        if not isinstance(head, dict) or head.get("ev") != "manifest":
            raise InputError(f"{self.path}, line 1: not a manifest; a history begins with one")
        schema = head.get("schema")
        if not isinstance(schema, int) or schema > SCHEMA or schema < 1:
            raise InputError(
                f"{self.path}, line 1, schema: {schema!r} can't be read, only up to {SCHEMA}; use a newer rlsched"
            )
        try:
            return msgspec.json.decode(raw, type=Manifest)
        except msgspec.ValidationError as error:
            raise InputError(f"{self.path}, line 1: {error}") from None


def _lines(path: Path, salvage: bool) -> Iterator[bytes]:
    """The lines of a file."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    with file:
        source: Any = file
        if file.peek(4)[:4] == zstandard.FRAME_HEADER:
            source = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        rest, count = b"", 0
        while True:
            try:
                chunk = source.read(1 << 18)
            except zstandard.ZstdError as error:
                raise InputError(f"{path}: not zstd, or damaged: {error}") from None
            if not chunk:
                break
            *whole, rest = (rest + chunk).split(b"\n")
            count += len(whole)
            if len(rest) > _MOST:
                raise InputError(f"{path}: a line of over {_MOST} bytes; this is no history")
            yield from whole
        if rest and not salvage:
            raise InputError(f"{path}: cut within line {count + 1}; --salvage reads the {count} whole lines before it")


def schema() -> dict[str, Any]:
    """JSON Schema of a history's lines: the manifest, then events."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"rlsched history, schema {SCHEMA}: one JSON value a line, the manifest first",
        **msgspec.json.schema(Manifest | Event),
    }


__all__ = ["Event", "Reader", "Writer", "schema"]
