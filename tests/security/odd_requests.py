"""Requests that no client should send, drawn by hypothesis: each odd in one place, its body, query, headers, path,
media type or method, or in how its bytes stand on the wire; some in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from tests.security.odd_json import NUMBERS, WORDS, Draw, changed, rendered, spoiled, text


@dataclass(frozen=True)
class Operation:
    """A route of the description: the names that its path, query, headers and body have."""

    method: str
    template: str
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    media: str | None = None  # of its body; None: it takes none
    body: Any = None  # one that it takes; a list is lines of JSON

    def __str__(self) -> str:
        return f"{self.method} {self.template}"


@dataclass(frozen=True)
class Odd:
    """One request. `pieces` are its bytes; `whole` tells whether a server can know where it ends."""

    operation: Operation
    key: str
    pieces: tuple[bytes, ...]
    method: str
    whole: bool = True
    note: str = ""

    def __repr__(self) -> str:
        return f"{self.operation} as {self.key} {self.note}: {b''.join(self.pieces)[:4000]!r}"


def operations(description: Mapping[str, Any], bodies: Mapping[tuple[str, str], Any]) -> list[Operation]:
    found = []
    for path, methods in description["paths"].items():
        for method, told in methods.items():
            where = {"query": [], "header": [], "path": []}  # type: ignore[var-annotated]
            for parameter in told.get("parameters", ()):
                where[parameter["in"]].append(parameter["name"])
            content = told.get("requestBody", {}).get("content", {})
            fields = [name for shape in content.values() for name in shape["schema"].get("properties", ())]
            found.append(
                Operation(
                    method.upper(),
                    path,
                    tuple(where["query"]),
                    tuple(where["header"]),
                    tuple(fields),
                    next(iter(content), None),
                    bodies.get((method.upper(), path)),
                )
            )
    return found


TYPES = (
    "application/json", "application/json; charset=utf-8", "application/json;charset=utf-16", "text/plain",
    "application/xml", "",
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/x-ndjson",
    "application/problem+json",
    "application/json; charset=\"", "x" * 300, "application/json, text/plain", "/", ";", "*/*",
    "application/json;charset",
)  # fmt: skip
HEADERS: dict[str, tuple[str, ...]] = {
    "content-encoding": ("identity", "gzip", "br", "deflate, gzip", "zstd", "x", ""),
    "accept": ("*/*", "text/event-stream", "application/xml", "x", ""),
    "accept-encoding": ("gzip", "br, gzip;q=0.1", "*"),
    "expect": ("100-continue", "x"),
    "connection": ("close", "keep-alive", "upgrade", "x-session-id"),
    "upgrade": ("h2c", "websocket"),
    "x-forwarded-for": ("127.0.0.1", "a"),
    "x-forwarded-host": ("evil.example",),
    "x-http-method-override": ("DELETE",),
    "cookie": ("a=b; session=1",),
    "range": ("bytes=0-0", "bytes=" + "0-0," * 1000),
    "te": ("trailers",),
    "x-turnkeep-history": ("off", "match", "append", "replace", "auto", "none", ""),
    "x-turnkeep-on-disconnect": ("cancel", "finish", "x", ""),
    "x-session-id": ("base", "other", "a b", "a" * 257, "%00", ""),
    "if-match": ("*", '"1"', "1", "W/\"1\"", '"x"', ""),
    "last-event-id": ("0", "1", "-1", "9" * 400, "x", ""),
    "idempotency-key": ("a", "b" * 300, ""),
    "origin": ("https://example.org", "null", ""),
    "x-api-key": ("tk-x", ""),
    "authorization": ("Bearer", "Bearer ", "Basic dGs6dGs=", "bearer tk-x", "Bearer tk-' OR 1=1 --", "\xe9"),
    "host": ("127.0.0.1", "localhost:80", "x/?", "a@b", "example.org", "", "[::1"),
    "anthropic-version": ("2023-06-01", "x"),
    "x-request-id": ("mine", "a" * 500),
    "traceparent": ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "x"),
}  # fmt: skip
BYTES_OF_HEADERS = (
    b"", b" ", b"a\rb", b"a\nx-evil: 1", b"a\r\nx-evil: 1", b"a\x00b", b"\xff\xfe", b"\xc3\xa9", b"\xed\xa0\x80",
    b"a" * 9000,
    b"%0d%0ax-evil:%201", b"\x7f", b"\t", b"\"", b"1" * 400, b"-1", b"1e999", b"true", b"../..",
    b"'; DROP TABLE turns; --",
)  # fmt: skip
header_bytes = st.one_of(st.sampled_from(BYTES_OF_HEADERS), st.binary(max_size=30))
ESCAPES = (
    "%00",
    "%ff",
    "%ed%a0%80",
    "%0d%0ax-evil:1",
    "%",
    "%zz",
    "%2e%2e%2f",
    "%2f",
    "+",
    "&",
    "=",
    "#",
    ";",
    "[0]",
    "[a][b]",
)


def query_of(draw: Draw, operation: Operation) -> str:
    """Mostly names that the route knows, values that it may not."""
    pairs = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(operation.query) if operation.query and draw(st.integers(0, 5)) else text)
        value = draw(
            st.one_of(
                st.sampled_from(WORDS),
                st.sampled_from(NUMBERS).map(str),
                text,
                st.sampled_from(("asc", "desc", "day", "model,day", "csv", "json", "true", "items", "running")),
            )
        )
        told = quote(name, safe="[]", errors="surrogatepass") + draw(st.sampled_from(("", "", "", "[a]", "[]")))
        pairs.append(f"{told}={quote(value, safe='', errors='surrogatepass')}" + draw(_sometimes(ESCAPES)))
    return "?" + "&".join(pairs)


def headers_of(draw: Draw, operation: Operation) -> list[tuple[bytes, bytes]]:
    known = [name.lower() for name in operation.headers]
    found = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*known, *known, *HEADERS]))
        listed = HEADERS.get(name, ("", "x"))
        value = draw(st.sampled_from(listed).map(lambda one: one.encode("latin-1")) | header_bytes)
        found.append((name.encode(), value))
    if draw(st.integers(0, 9)) == 0:
        found.append((draw(st.sampled_from((b"", b"a b", b"a:", b"\xff", b"x\x00", b"(", b"x-y"))), draw(header_bytes)))
    return found


def _sometimes(values: Sequence[str]) -> st.SearchStrategy[str]:
    return st.integers(0, 9).flatmap(lambda n: st.sampled_from(values) if n == 0 else st.just(""))


LENGTHS = (b"-1", b"0x10", b"1e3", b"", b" ", b"9" * 30, b"+5", b"5, 5", b"\xb2")
CODINGS = (b"xchunked", b"gzip, chunked", b"chunked, identity", b"identity", b"chunked, chunked", b"\x0bchunked", b"")
WHERE = ("body",) * 9 + ("nowhere",) * 4 + ("query", "headers", "headers", "path", "framing", "media", "method", "all")
WHERE_BODYLESS = (
    ("query",) * 5 + ("nowhere",) * 4 + ("headers",) * 3 + ("path",) * 2 + ("framing", "body", "method", "all")
)
METHODS = ("HEAD", "OPTIONS", "TRACE", "PATCH", "PUT", "DELETE", "get", "PROPFIND", "CONNECT", "X" * 30)


def framed(
    draw: Draw, line: bytes, headers: list[tuple[bytes, bytes]], body: bytes, *, odd: bool
) -> tuple[tuple[bytes, ...], bool]:
    """(the pieces to send, whether a server can know where the request ends)."""
    way = (
        draw(st.sampled_from(("plain", "chunked", "strange", "strange", "short", "chunks", "version")))
        if odd
        else "plain"
    )
    head = [line, *(name + b": " + value for name, value in headers)]

    def sent(*more: bytes, body: bytes = body) -> tuple[bytes, ...]:
        return (b"\r\n".join([*head, *more]) + b"\r\n\r\n", body)

    length = b"content-length: %d" % len(body)
    if way == "chunked":
        cut = draw(st.integers(0, len(body)))
        chunks = [piece for piece in (body[:cut], body[cut:]) if piece]
        told = b"".join(b"%x%s\r\n%s\r\n" % (len(c), draw(st.sampled_from((b"", b";a=b"))), c) for c in chunks)
        trailer = draw(st.sampled_from((b"", b"", b"x-late: 1\r\n", b"content-length: 3\r\n")))
        return sent(b"transfer-encoding: chunked", body=told + b"0\r\n" + trailer + b"\r\n"), True
    if way == "strange":
        more = draw(
            st.one_of(
                st.sampled_from(LENGTHS).map(lambda one: [b"content-length: " + one]),
                st.sampled_from(CODINGS).map(lambda one: [b"transfer-encoding: " + one]),
                st.just([length, b"content-length: 1"]),
                st.just([length, length]),
                st.just([length, b"transfer-encoding: chunked"]),
                st.just([b"transfer-encoding: chunked", length]),
                st.just([b"content-length : %d" % len(body)]),
            )
        )
        return sent(*more), False
    if way == "short":
        return sent(b"content-length: %d" % (len(body) + draw(st.integers(1, 5000)))), False
    if way == "chunks":
        bad = draw(
            st.sampled_from(
                (b"zz\r\n", b"-1\r\n", b"f" * 20 + b"\r\n", b"5\r\nab", b"1\na\n0\n\n", b"5;" + b"a" * 9000)
            )
        )
        return sent(b"transfer-encoding: chunked", body=bad), False
    if way == "version":
        other = draw(
            st.sampled_from((b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1 x", b"HTTQ/1.1", b"http/1.1", b""))
        )
        head[0] = line.rpartition(b" ")[0] + b" " + other
        return sent(length), other == b"HTTP/1.0"
    return sent(length), True


@st.composite
def requests(
    draw: Draw, operation: Operation, *, keys: Mapping[str, Mapping[str, str]], named: Callable[[str], str]
) -> Odd:
    """`keys`: kind -> header; `named`: a text with what exists in its places."""
    key = draw(st.sampled_from(("admin",) * 4 + ("user",) * 3 + ("read", "none")))
    where = draw(st.sampled_from(WHERE if operation.media is not None else WHERE_BODYLESS))
    everywhere = where == "all"
    path = _odd_path(draw, operation.template, named) if everywhere or where == "path" else named(operation.template)
    target = path + (query_of(draw, operation) if everywhere or where == "query" else "")
    extra = headers_of(draw, operation) if everywhere or where == "headers" else []
    media, method = operation.media or "application/json", operation.method
    if where == "media":
        media = draw(st.sampled_from(TYPES))
    if where == "method":
        method = draw(st.sampled_from(METHODS))
    body = b""
    if operation.media is not None or everywhere or where == "body":
        body = _body(
            draw, operation, named, changes=1 + draw(st.integers(0, 2)) if everywhere or where == "body" else 0
        )
    names = {name for name, _ in extra}
    headers = [] if b"host" in names and draw(st.booleans()) else [(b"host", b"127.0.0.1")]
    headers += [
        (n.encode(), v.encode()) for n, v in keys[key].items() if n.encode() not in names or draw(st.booleans())
    ]
    if operation.method == "PATCH" and b"if-match" not in names:
        headers.append((b"if-match", b"*"))
    if body or everywhere:
        headers.append((b"content-type", media.encode("latin-1")))
    line = f"{method} {target} HTTP/1.1".encode("utf-8", "surrogatepass")
    pieces, whole = framed(draw, line, headers + extra, body, odd=everywhere or where == "framing")
    return Odd(operation, key, pieces, method, whole and _plain(line, headers + extra))


def _plain(line: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether headers can be told from what follows them, so that an answer must come."""
    told = [line, *(part for header in headers for part in header)]
    return not any(set(part) & set(b"\r\n\x00") for part in told) and not any(n == b"expect" for n, _ in headers)


def _odd_path(draw: Draw, template: str, named: Callable[[str], str]) -> str:
    path = named(template)
    if "{" in template and draw(st.booleans()):
        value = draw(st.one_of(st.sampled_from((*WORDS, *ESCAPES)), text))
        begin, _, rest = template.partition("{")
        path = begin + quote(value, safe="%", errors="surrogatepass") + named(rest.partition("}")[2])
    return path + draw(st.sampled_from(("", "", "/", "//", "/..", "%00", "?", "/%2e%2e", ";a=b", "\\")))


def _body(draw: Draw, operation: Operation, named: Callable[[str], str], changes: int) -> bytes:
    lines = list(operation.body) if isinstance(operation.body, list) else [operation.body or {}]
    for _ in range(changes):
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = changed(draw, lines[at], operation.fields)
    told = named("\n".join(map(rendered, lines)))
    body = told.encode("utf-8", "surrogatepass")
    return spoiled(draw, body) if changes and draw(st.integers(0, 11)) == 7 else body
