"""The client of every engine that speaks the OpenAI HTTP API, on aiohttp (PITFALLS: 10-20 times faster).

A response is one of four things: a model outcome (`Completion`), a transport fault (`TransportFault`:
the same attempt is sent again), or a reason to stop at once: the configuration is wrong (`InputError`).
What a server says is data: quoted at most 200 characters, printable, with our key masked.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import aiohttp
import orjson
from yarl import URL

from gradeloom.schemas.config import OpenAIEngine
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.engine.types import Asked, Completion, Request, TransportFault

QUOTED = 200
"""Characters of what a server said that an error or a refusal shows at most."""

MASK = "[key]"
SHORTEST_SECRET = 8
"""Characters. Servers without keys are given words (`EMPTY`, `1`): to mask those would change answers."""

_NO_OUTCOME = frozenset({408, 409, 425, 429})
_REFUSALS = frozenset({400, 413, 422})
_TOO_LONG = re.compile(
    r"context[ _](length|window)|max(imum)?[ _]model[ _]len|(prompt|input) is too long|too many tokens",
    re.IGNORECASE,
)
_COOLING = (1.0, 30.0)


class RetryLater(TransportFault):
    """A transport fault whose server said how many seconds to wait."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class HttpBackend:
    """One or many endpoints; each request goes to the one with the fewest requests outstanding.

    An endpoint that just failed is passed over for 1 s, doubling to 30 s, as long as another is
    there: a dead one answers with an error so quickly that it would otherwise draw every request.

    Args:
        endpoints: base URLs such as `http://10.0.0.7:8000/v1`, or `unix:/path/to.sock` (path `/v1`).
        model: the model's name as the endpoints serve it.
        identity: what the model is; enters cache keys and fingerprints.
        request_timeout: seconds until a request counts as lost.
        api_key_env: the name of the environment variable that holds the key, read at start.
        api_key: a key made up for a server of our own; the other way to give one.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        model: str,
        identity: str,
        request_timeout: float,
        api_key_env: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self.identity = identity
        self.restarts = 0
        self.flags: tuple[str, ...] = ()
        self._model = model
        self._timeout = request_timeout
        self._key_env = api_key_env
        self._key = _Secret(api_key)
        self._endpoints = [_Endpoint(url) for url in endpoints]
        self._started = False

    @classmethod
    def of(cls, config: OpenAIEngine) -> HttpBackend:
        """The backend of a configured `openai` engine."""
        return cls(
            config.endpoints,
            model=config.model,
            identity=f"openai:{config.model}@{config.revision or ''}",
            request_timeout=config.request_timeout,
            api_key_env=config.api_key_env,
        )

    async def start(self) -> None:
        """Open one session an endpoint.

        Raises:
            InputError: the environment variable of the key is not set or holds no usable key, or an
                endpoint is no URL.
        """
        if self._started:
            return
        if self._key_env is not None:
            self._key = _Secret(_key_from(self._key_env))
        headers = {"Content-Type": "application/json", **self._key.header()}
        for endpoint in self._endpoints:
            endpoint.open(headers, self._timeout)
        self._started = True

    async def stop(self) -> None:
        """Close the sessions."""
        self._started = False
        for endpoint in self._endpoints:
            await endpoint.close()

    async def send(self, asked: Asked, request: Request) -> Completion:
        """Send one request, once.

        Raises:
            TransportFault: no outcome came back.
            InputError: the endpoint, the model's name or the key is wrong: no request would succeed.
        """
        endpoint = min(self._endpoints, key=_Endpoint.load)
        endpoint.outstanding += 1
        try:
            status, retry_after, body = await endpoint.post(orjson.dumps(self._body(request)))
            completion = self._read(endpoint, request, status, retry_after, body)
        except TransportFault:
            endpoint.failed()
            raise
        finally:
            endpoint.outstanding -= 1
        endpoint.answered()
        return completion

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "messages": request.messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.frequency_penalty:
            body["frequency_penalty"] = sampling.frequency_penalty
        if sampling.top_logprobs > 0:
            body["logprobs"] = True
            body["top_logprobs"] = sampling.top_logprobs
        if request.schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": request.schema, "strict": True},
            }
        return body

    # --- reading what came back -------------------------------------------------------------

    def _read(
        self, endpoint: _Endpoint, request: Request, status: int, retry_after: float | None, body: bytes
    ) -> Completion:
        if status == 200:
            return self._completion(endpoint, request, body)
        said = self._quote(_message(body))
        if status >= 500 or status in _NO_OUTCOME:
            fault = f"{endpoint.url}: HTTP {status}{said}"
            raise TransportFault(fault) if retry_after is None else RetryLater(fault, retry_after)
        if status in _REFUSALS:
            if _TOO_LONG.search(_message(body)):
                return Completion("prompt_too_long", text=said.removeprefix(": "))
            return Completion("refused", text=said.removeprefix(": ") or f"HTTP {status}")
        self._misconfigured(endpoint, status, said)

    def _misconfigured(self, endpoint: _Endpoint, status: int, said: str) -> NoReturn:
        """The server will say the same to every request, so that going on would record nonsense."""
        if status in (401, 403):
            advice = (
                f"check the key in the environment variable {self._key_env}"
                if self._key_env
                else "set engine.api_key_env to the name of the environment variable that holds the key"
            )
        elif 300 <= status < 400:
            advice = "a redirect is never followed; configure the address it leads to"
        else:
            advice = f"check the endpoint's path and that it serves the model {self._model!r}"
        raise InputError(f"{endpoint.url}: HTTP {status}{said}; {advice}", field="engine.endpoints")

    def _completion(self, endpoint: _Endpoint, request: Request, body: bytes) -> Completion:
        try:
            return self._parsed(endpoint, request, orjson.loads(body))
        except orjson.JSONDecodeError:
            problem = "with a body that is not JSON"
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            said = _message(body) if b'"error"' in body else f"{type(error).__name__}: {error}"
            problem = f"without the fields of a completion{self._quote(said)}"
        # Raised out here, so that nothing unmasked hangs on the error as its context.
        raise TransportFault(f"{endpoint.url}: HTTP 200 {problem}")

    def _parsed(self, endpoint: _Endpoint, request: Request, answer: Any) -> Completion:
        choice = answer["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        text = message["content"] or ""
        if not isinstance(text, str):
            raise TypeError(f"content is {type(text).__name__}, not a string")
        prompt_tokens = int(answer["usage"]["prompt_tokens"])
        completion_tokens = int(answer["usage"]["completion_tokens"])
        if finish == "length" and request.sampling.max_tokens == 1:
            finish = "stop"  # one token was all that was asked for; servers call that cut off
        refusal = message.get("refusal")
        if refusal or finish == "content_filter":
            said = self._quote(str(refusal or finish)).removeprefix(": ")
            return Completion("refused", said, prompt_tokens, completion_tokens)
        if finish not in ("stop", "length"):
            raise TransportFault(f"{endpoint.url}: finish_reason{self._quote(str(finish))}")
        logprobs = self._first_token(choice) if request.sampling.top_logprobs > 0 else None
        return Completion(finish, self._key.mask(text), prompt_tokens, completion_tokens, logprobs)

    def _first_token(self, choice: Any) -> tuple[tuple[str, float], ...] | None:
        """(token, log-probability) of the first token's alternatives, most likely first.

        None when the endpoint gives no log-probabilities; empty when the model wrote nothing at all.
        """
        content = (choice.get("logprobs") or {}).get("content")
        if not content:
            return () if content == [] and not choice["message"]["content"] else None
        pairs = [
            (self._key.mask(str(top["token"])), float(top["logprob"])) for top in content[0]["top_logprobs"]
        ]
        return tuple(sorted(pairs, key=lambda pair: -pair[1])) or None

    def _quote(self, said: str) -> str:
        """What a server said, after a colon, fit to be shown; empty when it said nothing."""
        printable = "".join(c if c.isprintable() else " " for c in self._key.mask(said))
        short = " ".join(printable.split())
        if len(short) > QUOTED:
            short = short[: QUOTED - 1] + "…"
        return f": {short}" if short else ""


class _Secret:
    """A key that shows itself only in the header it is for."""

    __slots__ = ("_forms", "_value")

    def __init__(self, value: str | None) -> None:
        self._value = value
        as_json = orjson.dumps(value).decode()[1:-1] if value else ""
        self._forms = [
            form for form in dict.fromkeys((value, as_json)) if form and len(form) >= SHORTEST_SECRET
        ]

    def __repr__(self) -> str:
        return MASK

    def header(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def mask(self, text: str) -> str:
        for form in self._forms:
            if form in text:
                text = text.replace(form, MASK)
        return text


def _key_from(name: str) -> str:
    key = os.environ.get(name, "").strip()
    if not key:
        raise InputError(
            f"the environment variable {name} is not set; it must hold the API key of the endpoint",
            field="engine.api_key_env",
        )
    if not (key.isascii() and key.isprintable()):
        raise InputError(
            f"the environment variable {name} holds characters that no API key has (line breaks, non-ASCII)",
            field="engine.api_key_env",
        )
    return key


class _Endpoint:
    """One base URL, its session, and how it has been doing."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.outstanding = 0
        self._session: aiohttp.ClientSession | None = None
        self._failures = 0
        self._cool_until = 0.0
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        base = "http://localhost/v1" if self._socket else url.rstrip("/")
        try:
            self._target = URL(f"{base}/chat/completions")
        except ValueError as error:
            raise InputError(f"{url!r} is not a URL ({error})", field="engine.endpoints") from None

    def open(self, headers: dict[str, str], timeout: float) -> None:
        # No limits: the engine's window bounds what is outstanding.
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(self._socket, limit=0) if self._socket else aiohttp.TCPConnector(limit=0)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 30.0)),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def load(self) -> tuple[bool, int, float]:
        """What the next request's choice goes by: not cooling, few outstanding, cool soonest."""
        return self._cool_until > time.monotonic(), self.outstanding, self._cool_until

    def answered(self) -> None:
        self._failures, self._cool_until = 0, 0.0

    def failed(self) -> None:
        first, longest = _COOLING
        self._cool_until = time.monotonic() + min(longest, first * 2.0 ** min(self._failures, 10))
        self._failures += 1

    async def post(self, body: bytes) -> tuple[int, float | None, bytes]:
        """Status, seconds of Retry-After if given, and body.

        Raises:
            TransportFault: there was no whole response. aiohttp's own error does not hang on it: it may
                hold the request's headers, and so the key.
        """
        assert self._session is not None, "send before start"
        try:
            async with self._session.post(self._target, data=body, allow_redirects=False) as response:
                return response.status, _seconds(response.headers.get("Retry-After")), await response.read()
        except TimeoutError:
            problem = "no answer in time"
        except (aiohttp.ClientError, OSError) as error:
            problem = _short(error)
        raise TransportFault(f"{self.url}: {problem}")


def _short(error: Exception) -> str:
    """What went wrong with a connection, without anything that a request or a response held."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is left to our own schedule."""
    try:
        return max(0.0, float(retry_after)) if retry_after is not None else None
    except ValueError:
        return None


def _message(body: bytes) -> str:
    """The message of an error body, or the whole body as text."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[: 20 * QUOTED].decode(errors="replace")
    if isinstance(answer, dict):
        said = answer.get("error", answer.get("message", answer.get("detail", answer)))
        if isinstance(said, dict):
            said = said.get("message", said)
        return said if isinstance(said, str) else orjson.dumps(said).decode()
    return str(answer)
