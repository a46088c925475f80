"""A trace file as a stream of events: what is in memory is one block of the file, whatever its size.

A trace is one JSON object with a very long array "traceEvents". The array is cut into blocks in front of an event.
Where to cut is guessed from the bytes (a `}`, a comma, a `{`) and proved by decoding: JSON is read from left to right
in one way only, so a block that begins at an event and decodes as an array of events ends at an event. Where a guess
fails, and at the end of the array, the standard library's decoder walks from event to event.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from bench.errors import BadInput

BLOCK_BYTES = 4 << 20
MAX_EVENT_BYTES = 64 << 20
WHOLE = "a whole torch-profiler trace, JSON or gzipped JSON"
_EVENTS_KEY = "traceEvents"
_KEPT_KEYS = ("schemaVersion", "distributedInfo", "deviceProperties", "baseTimeNanoseconds", "traceName", "otherData")
_WALK = json.JSONDecoder(strict=False)
_SPACE = b" \t\r\n"
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")
_TEXT_NOT_SPACE = re.compile(r"[^ \t\r\n]")


class Args(msgspec.Struct, gc=False):
    """The details of an event that are read; all others are skipped."""

    correlation: Any = None
    device: Any = None
    stream: Any = None
    sequence: Any = msgspec.field(name="Sequence number", default=None)
    forward_thread: Any = msgspec.field(name="Fwd thread id", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    process_group: Any = msgspec.field(name="Process Group Name", default=None)


class Event(msgspec.Struct, gc=False):
    """One event of the Trace Event Format; `ts` and `dur` in microseconds."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


_DECODE = msgspec.json.Decoder(list[Event]).decode


class Document:
    """One file. Iterate over `blocks()` to the end; `header` is complete only then.

    Raises BadInput, from the constructor or while iterating, where the file cannot be read, is cut off, is not JSON, or
    has no events: no part of a broken file is passed off as the whole.
    """

    def __init__(self, path: Path | str, block_bytes: int = BLOCK_BYTES) -> None:
        self.path = Path(path)
        self.header: dict[str, Any] = {}
        self._block_bytes = block_bytes
        self._data = b""
        self._at = 0
        self._passed = 0  # bytes of the unpacked file before self._data
        self._ended = False
        self._stream: BinaryIO | gzip.GzipFile

    def blocks(self) -> Iterator[list[Event]]:
        try:
            with open(self.path, "rb") as raw:
                self._stream = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
                yield from self._document()
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self._broken(f"damaged gzip: {error}") from None
        except EOFError:
            raise self._broken("the gzip file is cut off") from None
        except OSError as error:
            raise BadInput("trace", str(self.path), f"a readable file ({error.strerror})") from None
        except RecursionError:
            raise self._broken("nested too deeply") from None

    def _broken(self, what: str) -> BadInput:
        return BadInput("trace", self.path.name, f"{WHOLE}; {what} near byte {self._passed + self._at:,}")

    def _document(self) -> Iterator[list[Event]]:
        first = self._next_byte()
        if first is None:
            raise BadInput("trace", self.path.name, f"{WHOLE}; the file is empty")
        self._at += 1
        if first == b"[":
            yield from self._array()
        elif first == b"{":
            yield from self._object()
        else:
            raise self._broken("not JSON")
        if self._next_byte() is not None:
            raise self._broken("more text after the end of the trace")

    def _object(self) -> Iterator[list[Event]]:
        seen = False
        if self._next_byte() == b"}":
            self._at += 1
        else:
            while True:
                key = self._value()
                if not isinstance(key, str):
                    raise self._broken("not JSON")
                self._expect(b":")
                if key == _EVENTS_KEY:
                    self._expect(b"[")
                    seen = True
                    yield from self._array()
                else:
                    value = self._value()
                    if key in _KEPT_KEYS:
                        self.header[key] = value
                if self._expect(b",}") == b"}":
                    break
        if not seen:
            raise BadInput("trace", self.path.name, f"{WHOLE}; this is JSON without {_EVENTS_KEY}")

    def _array(self) -> Iterator[list[Event]]:
        """Events up to the array's end, from just behind its bracket."""
        if self._next_byte() == b"]":
            self._at += 1
            return
        while True:
            while len(self._data) - self._at < self._block_bytes and self._read():
                pass
            cut = _last_cut(self._data, self._at)
            if cut is not None:
                events = _decoded(self._data[self._at : cut])
                if events is not None:
                    self._at = cut + 1
                    yield events
                    continue
            cut, closed = self._walk()
            text = self._data[self._at : cut]
            events = _decoded(text)
            yield self._from_objects(text) if events is None else events
            self._at = cut + 1
            if closed:
                return

    def _walk(self) -> tuple[int, bool]:
        """Where the events that are wholly in the window end (at a comma or bracket), and whether the array ends."""
        while True:
            # Structure is ASCII, so Latin-1 keeps positions and loses nothing.
            text = self._data[self._at :].decode("latin-1")
            at, cut = 0, None
            try:
                while True:
                    _, at = _WALK.raw_decode(text, _skip_space(text, at))
                    at = _skip_space(text, at)
                    mark = text[at : at + 1]
                    if mark not in ("", ",", "]"):
                        raise self._broken_at(at, "not JSON")
                    if mark == "]":
                        return self._at + at, True
                    if mark == "":
                        break
                    cut, at = at, at + 1
            except ValueError as error:  # also where a number has more digits than Python reads
                at, what = getattr(error, "pos", at), getattr(error, "msg", str(error))
            else:
                what = "no end"
            if cut is not None:
                return self._at + cut, False
            if len(text) > MAX_EVENT_BYTES:
                raise self._broken_at(at, f"not JSON ({what})")
            if not self._read():
                raise self._broken_at(at, f"cut off or not JSON ({what})")

    def _from_objects(self, events: bytes) -> list[Event]:
        """The same by the standard library, which takes NaN and bare control characters as profilers write them."""
        fields = [field for field in Event.__struct_fields__ if field != "args"]
        details = dict(zip(Args.__struct_fields__, Args.__struct_encode_fields__, strict=True))
        found = []
        for entry in _WALK.decode(f"[{events.decode('utf-8', 'replace')}]"):
            if not isinstance(entry, dict):
                raise self._broken(f"an event is {entry!r:.20}, no object,")
            event = Event(**{field: entry.get(field) for field in fields})
            if isinstance(args := entry.get("args"), dict):
                event.args = Args(**{ours: args.get(theirs) for ours, theirs in details.items()})
            found.append(event)
        return found

    def _value(self) -> Any:
        """The next JSON value or key, which may be larger than a block."""
        self._next_byte()
        while True:
            text = self._data[self._at :].decode("latin-1")
            try:
                _, end = _WALK.raw_decode(text)
            except json.JSONDecodeError as error:
                if len(text) > MAX_EVENT_BYTES or not self._read():
                    raise self._broken_at(error.pos, f"cut off or not JSON ({error.msg})") from None
                continue
            # A number at the window's end may go on.
            if end == len(text) and self._read():
                continue
            value = self._data[self._at : self._at + end].decode("utf-8", "replace")
            self._at += end
            return _WALK.decode(value)

    def _broken_at(self, offset: int, what: str) -> BadInput:
        self._at += offset
        return self._broken(what)

    def _expect(self, allowed: bytes) -> bytes:
        found = self._next_byte()
        if found is None:
            raise self._broken("cut off")
        if found not in allowed:
            raise self._broken("not JSON")
        self._at += 1
        return found

    def _next_byte(self) -> bytes | None:
        """The next byte that is no white space, where the window then stands; None at the file's end."""
        while True:
            found = _NOT_SPACE.search(self._data, self._at)
            if found:
                self._at = found.start()
                return found.group()
            self._at = len(self._data)
            if not self._read():
                return None

    def _read(self) -> bool:
        """Moves the window on by a block; False at the file's end."""
        if self._ended:
            return False
        more = self._stream.read(self._block_bytes)
        if not more:
            self._ended = True
            return False
        self._passed += self._at
        self._data = self._data[self._at :] + more
        self._at = 0
        return True


def _last_cut(data: bytes, start: int) -> int | None:
    """Position of the last comma that looks as if it stood between two events."""
    brace = len(data)
    while (brace := data.rfind(b"{", start, brace)) > start:
        comma = _before(data, brace)
        if comma > start and data[comma] == 0x2C:
            close = _before(data, comma)
            if close > start and data[close] == 0x7D:
                return comma
    return None


def _before(data: bytes, at: int) -> int:
    at -= 1
    while at > 0 and data[at] in _SPACE:
        at -= 1
    return at


def _skip_space(text: str, at: int) -> int:
    found = _TEXT_NOT_SPACE.search(text, at)
    return found.start() if found else len(text)


def _decoded(events: bytes) -> list[Event] | None:
    """The events of a stretch of the array; None where it is none, or is JSON of a kind that msgspec refuses."""
    try:
        return _DECODE(b"[" + events + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
