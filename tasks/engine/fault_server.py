"""A deterministic stand-in for a language model server, in a process of its own. Not a model.

`python -m gradeloom.tasks.engine.fault_server SOCKET` with the settings (`FaultEngine`, JSON) in the
environment variable GRADELOOM_FAULT. Nothing depends on arrival order:

- what the model says, whole or spoiled, is a function of (seed, request digest);
- how the transport fails is a function of (seed, request digest, occurrence): the n-th sending of a
  request. The request log, if there is one, carries occurrences over a restart.

A request with a schema gets compact JSON: for every property a passage of random words, as long as a
"between X and Y words" in its prompt asks for, that ends with a mark such as `Ref tier-2.` of the grade
that the property's name ends with, or else of the last level that the prompt names. A request for one
token reads these marks in its last message and answers with a grade, or, where it sees two of them,
with the letter of the better passage. Any other request gets one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from gradeloom.schemas.config import FaultEngine

SETTINGS = "GRADELOOM_FAULT"
BACKLOG = 4096
"""Connections that may wait to be accepted: on a Unix socket one more fails at once."""
OTHER_TOKENS = ("The", "Grade", " ", "\n", "**", "I", "Score", "#")
LATE = 0.03
"""Probability that even a clear answer leaves to tokens outside the scale."""

_LENGTH = re.compile(r"(\d+) (?:and|to) (\d+) words")
_LEVEL = re.compile(r"level\D{1,20}(\d)", re.IGNORECASE)
_MARK = re.compile(r"tier-(\d)")
_SCALE = re.compile(r"^\W*(\d)\s*[:=.)–—-]", re.MULTILINE)
_SYLLABLES = ("ba", "co", "di", "fe", "gu", "ha", "lo", "mi", "ne", "po", "ra", "si", "ta", "vu", "we", "zy")
WORDS = tuple(one + two for one in _SYLLABLES for two in _SYLLABLES)
"""256 words, so that a random byte names one."""


class FaultServer:
    """What is answered. `log` lines: {"digest", "occurrence", "what", "outstanding"}, one a request."""

    def __init__(self, config: FaultEngine) -> None:
        self.config = config
        self._key = config.seed.to_bytes(8, "big", signed=True)
        self._transport = _thresholds(config.transport.model_dump())
        self._spoiled = _thresholds(
            {"truncate": config.truncate, "bad_json": config.bad_json, "duplicate": config.duplicate}
        )
        self._log = None if config.log is None else _open_log(Path(config.log))
        # Counted only where somebody looks at it: a benchmark's memory stays flat.
        self._counts = bool(self._transport) or self._log is not None
        self._seen: Counter[bytes] = Counter() if config.log is None else _occurrences(Path(config.log))
        self._outstanding = 0

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self._outstanding += 1
        try:
            return await self._answer(request, body)
        finally:
            self._outstanding -= 1

    async def _answer(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        key = hashlib.blake2b(body, digest_size=16, key=self._key).digest()
        occurrence = self._seen[key]
        if self._counts:
            self._seen[key] = occurrence + 1
        fault = self._fault(key, occurrence)
        what, answer = (fault, b"") if fault else self._completion(key, body)
        self._write_log(key, occurrence, what)
        if self.config.latency:
            await asyncio.sleep(self.config.latency)
        if fault:
            return await self._break(request, fault)
        status = 400 if what in ("bad_request", "prompt_too_long") else 200
        return web.Response(body=answer, status=status, content_type="application/json")

    def _write_log(self, key: bytes, occurrence: int, what: str) -> None:
        if self._log is not None:
            line = {
                "digest": key.hex(), "occurrence": occurrence, "what": what, "outstanding": self._outstanding,
            }  # fmt: skip
            os.write(self._log, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    # --- transport --------------------------------------------------------------------------

    def _fault(self, key: bytes, occurrence: int) -> str | None:
        if not self._transport:
            return None
        drawn = hashlib.blake2b(key + occurrence.to_bytes(4, "big"), digest_size=8, key=self._key).digest()
        return _pick(self._transport, int.from_bytes(drawn, "big") / 2**64)

    async def _break(self, request: web.BaseRequest, fault: str) -> web.StreamResponse:
        if fault == "rate_limited":
            return _error(429, "slow down")
        if fault == "server_error":
            return _error(500, "out of order")
        if fault == "bad_body":
            return web.Response(body=b'{"choices": [{"mess', content_type="application/json")
        transport = request.transport
        if fault == "stall":
            await asyncio.sleep(self.config.stall_seconds)
        elif transport is not None:
            transport.write(
                b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"choi'
            )
        if transport is not None:
            transport.close()
        return web.Response()  # goes nowhere: the connection is closed

    # --- the "model" ------------------------------------------------------------------------

    def _completion(self, key: bytes, body: bytes) -> tuple[str, bytes]:
        """What happens, for the log, and the response body."""
        try:
            asked = orjson.loads(body)
            messages: list[dict[str, str]] = asked["messages"]
            prompt_tokens = _tokens(message["content"] for message in messages)
            limit = int(asked["max_tokens"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            return "bad_request", orjson.dumps({"error": {"message": "not a chat completion request"}})
        most = self.config.max_model_len
        if most is not None and prompt_tokens + limit > most:
            said = f"This model's maximum context length is {most} tokens, but {prompt_tokens} were given."
            return "prompt_too_long", orjson.dumps({"error": {"message": said}})
        dice = _Dice(key)
        logprobs = None
        what = finish = "stop"
        schema = asked.get("response_format")
        if schema is not None:
            properties = schema["json_schema"]["schema"]["properties"]
            what, text = self._list(dice, messages, list(properties))
            if what == "truncate":
                finish = "length"
        elif asked.get("top_logprobs") or limit <= 4:
            alternatives = _grade_token(dice, messages)
            text = alternatives[0][0]
            if asked.get("top_logprobs"):
                logprobs = _as_logprobs(alternatives[: asked["top_logprobs"]])
            else:
                text = _draw(alternatives, dice.fraction())
            finish = "length" if limit == 1 else "stop"  # as real servers say it
        else:
            text = _sentences(dice, 12)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        used = _tokens([text])
        usage = {
            "prompt_tokens": prompt_tokens, "completion_tokens": used, "total_tokens": prompt_tokens + used,
        }  # fmt: skip
        return what, orjson.dumps({"object": "chat.completion", "choices": [choice], "usage": usage})

    def _list(self, dice: _Dice, messages: list[dict[str, str]], properties: list[str]) -> tuple[str, str]:
        """An answer to a schema, and how it was spoiled, if it was."""
        spoiled = _pick(self._spoiled, dice.fraction()) or "stop"
        if spoiled == "duplicate":
            # One of four lists that never change, so that the second to use it repeats the first.
            dice = _Dice(bytes([dice.below(4)]) * 16)
        low, high = _wanted_length(messages)
        last_level = ([0, *_LEVEL.findall(messages[-1]["content"])])[-1]
        passages = {}
        for name in properties:
            words = low + dice.below(high - low + 1)
            grade = name[-1] if name[-1:].isdecimal() else last_level
            passages[name] = f"{_sentences(dice, max(1, words - 2))} Ref tier-{grade}."
        text = orjson.dumps(passages).decode()
        if spoiled == "truncate":
            text = text[: len(text) // 2]
        elif spoiled == "bad_json":
            text = text[:-1] + ',"'
        return spoiled, text


class _Dice:
    """Random numbers out of one digest, and nothing else."""

    __slots__ = ("_bytes", "_position")

    def __init__(self, key: bytes) -> None:
        self._bytes = hashlib.shake_128(key).digest(2048)
        self._position = 0

    def bytes(self, n: int) -> bytes:
        while self._position + n > len(self._bytes):
            self._bytes += hashlib.shake_128(self._bytes).digest(4096)
        self._position += n
        return self._bytes[self._position - n : self._position]

    def below(self, n: int) -> int:
        return int.from_bytes(self.bytes(4), "big") % n

    def fraction(self) -> float:
        return int.from_bytes(self.bytes(4), "big") / 2**32


def _sentences(dice: _Dice, words: int) -> str:
    """Exactly so many random words, in sentences of a dozen."""
    chosen = [WORDS[byte] for byte in dice.bytes(words)]
    return " ".join(" ".join(chosen[i : i + 12]).capitalize() + "." for i in range(0, words, 12))


def _wanted_length(messages: list[dict[str, str]]) -> tuple[int, int]:
    for message in reversed(messages):
        found = _LENGTH.findall(message["content"])
        if found:
            low, high = map(int, found[-1])
            if 1 <= low <= high <= 10_000:
                return low, high
    return 40, 40


def _grade_token(dice: _Dice, messages: list[dict[str, str]]) -> list[tuple[str, float]]:
    """(token, probability) of a judge's answer, most likely first."""
    marks = [int(mark) for mark in _MARK.findall(messages[-1]["content"])]
    if len(marks) >= 2:
        labels = ["A", "B"]
        best = 0 if marks[-2] >= marks[-1] else 1
    else:
        visible = {int(digit) for message in messages for digit in _SCALE.findall(message["content"])}
        scale = range(max({3, *visible, *marks}) + 1)
        labels = [str(grade) for grade in scale]
        best = marks[0] if marks else dice.below(len(labels))
    if dice.fraction() < 0.06:
        best = max(0, best - 1)  # a judge that is stricter than the writer
    mass = 0.3 if dice.fraction() < 0.03 else 1 - LATE
    rest = _shares(dice, len(labels) - 1, 0.15 - LATE)
    shares = [*rest[:best], 0.85, *rest[best:]]
    pairs = [(label, share / (1 - LATE) * mass) for label, share in zip(labels, shares, strict=True)]
    pairs += zip(OTHER_TOKENS, _shares(dice, len(OTHER_TOKENS), 1 - mass), strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])


def _shares(dice: _Dice, n: int, total: float) -> list[float]:
    weights = [1 + byte for byte in dice.bytes(n)]
    return [total * weight / sum(weights) for weight in weights]


def _draw(alternatives: Sequence[tuple[str, float]], at: float) -> str:
    for token, probability in alternatives:
        at -= probability
        if at < 0:
            return token
    return alternatives[-1][0]


def _as_logprobs(alternatives: Sequence[tuple[str, float]]) -> dict[str, Any]:
    top = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in alternatives]
    return {"content": [{**top[0], "top_logprobs": top}]}


def _tokens(texts: Any) -> int:
    return int(1.3 * sum(text.count(" ") + 1 for text in texts))


def _thresholds(rates: dict[str, float]) -> list[tuple[float, str]]:
    """Upper bounds of each kind's stretch of [0, 1)."""
    bounds, total = [], 0.0
    for kind, rate in rates.items():
        if rate > 0:
            total += rate
            bounds.append((total, kind))
    return bounds


def _pick(bounds: Sequence[tuple[float, str]], at: float) -> str | None:
    return next((kind for bound, kind in bounds if at < bound), None)


def _error(status: int, message: str) -> web.Response:
    body = orjson.dumps({"error": {"message": message, "code": status}})
    return web.Response(body=body, status=status, content_type="application/json")


# --- the log ----------------------------------------------------------------------------------


def _open_log(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _occurrences(path: Path) -> Counter[bytes]:
    """How often each request was sent before this server was started; a torn last line is skipped."""
    seen: Counter[bytes] = Counter()
    with path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(orjson.JSONDecodeError, KeyError):
                seen[bytes.fromhex(orjson.loads(line)["digest"])] += 1
    return seen


# --- the process ------------------------------------------------------------------------------


async def serve(config: FaultEngine, socket: Path) -> None:
    """Serve on a Unix socket until TERM or INT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.ServerRunner(web.Server(FaultServer(config), access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, socket, backlog=BACKLOG).start()
    try:
        await stop.wait()
    finally:
        await runner.cleanup()


def main() -> int:
    config = FaultEngine.model_validate_json(os.environ[SETTINGS])
    asyncio.run(serve(config, Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
