"""Just enough HTTP for one server on the loopback: JSON posted, JSON answered, one connection a request."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from ..commands import Json


class HttpError(Exception):
    """The server answered with something else than success."""

    def __init__(self, path: str, status: int, body: bytes) -> None:
        super().__init__(f"{path} answered {status}: {body[:500].decode(errors='replace')}")
        self.status = status


class Silent(Exception):  # noqa: N818
    """Nobody answered in time."""


async def ask(port: int, method: str, path: str, body: Json | None = None, patience_s: float | None = None) -> Any:
    """The decoded answer, None if it is empty or no JSON. Raises HttpError, `Silent` after `patience_s` (None: never),
    or OSError where nobody listens."""
    try:
        async with asyncio.timeout(patience_s):
            status, answer = await _exchange(port, method, path, body)
    except TimeoutError:
        raise Silent(f"{path} has not been answered for {patience_s:.0f} s") from None
    if not 200 <= status < 300:
        raise HttpError(path, status, answer)
    try:
        return msgspec.json.decode(answer) if answer else None
    except msgspec.DecodeError:
        return None


async def _exchange(port: int, method: str, path: str, body: Json | None) -> tuple[int, bytes]:
    """Status and body of the answer."""
    content = b"" if body is None else msgspec.json.encode(body)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + content)
        status_line = await reader.readline()
        words = status_line.split()
        if len(words) < 2:
            raise ConnectionResetError(f"{path}: the server closed the connection")
        status = int(words[1])
        chunked = False
        while (line := (await reader.readline()).strip().lower()) != b"":
            chunked = chunked or line == b"transfer-encoding: chunked"
        answer = await _chunks(reader) if chunked else await reader.read()
    finally:
        writer.close()
    return status, answer


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while (size := int(await reader.readline(), 16)) > 0:
        parts.append(await reader.readexactly(size))
        await reader.readline()
    return b"".join(parts)
