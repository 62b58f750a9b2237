"""The web application: its addresses, and what each of them answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from html import escape
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from annotated_transformer.engine.system import System, text_of
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.pretrained import RUNNING, Pretrained
from annotated_transformer.serving.batching import Batcher, Found, Job
from annotated_transformer.serving.requests import (
    Limits,
    Refusal,
    check_tokens,
    read_request,
    shutdown_refusal,
)

STATIC = files("annotated_transformer.serving") / "static"
TYPES = {".js": "text/javascript", ".css": "text/css"}
ABOUT = "Type a sentence to see its translation"
HEADS = ", and which tokens each head attended to"
DRAINED = 8  # bodies too large are read up to this many times the limit, so that the answer arrives
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Service:
    """Answers HTTP requests with the translations of a system.

    Args:
        system: A trained system in evaluation mode; nothing else may use it.
        limits: Limits on requests.
        name: Name of the system, for the page.
        pretrained: The package's model, if it is that one.
    """

    def __init__(
        self, system: System, limits: Limits, name: str = "", pretrained: Pretrained | None = None
    ) -> None:
        self.system, self.limits, self.pretrained = system, limits, pretrained
        self.batcher = Batcher(system, limits)
        self.static = {path.name: path.read_bytes() for path in STATIC.iterdir()}
        self.start_page = self._fill(self.static.pop("index.html").decode(), name)

    def app(self) -> Starlette:
        """Return the application."""
        posted = {"/translate": self.translate, "/attention": self.attention}
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/health", self.health),
                Route("/static/{name}", self.file),
                *(Route(path, self.answering(do), methods=["POST"]) for path, do in posted.items()),
            ],
            exception_handlers={HTTPException: http_error, Exception: server_error},
        )

    def answering(
        self, do: Callable[[bytes], Awaitable[bytes]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that reads a body of JSON, and answers in time or says why not."""

        async def endpoint(request: Request) -> Response:
            try:
                work = self._answer(request, do)
                return make_response(await asyncio.wait_for(work, self.limits.seconds))
            except (Refusal, asyncio.CancelledError) as error:
                # cancelled: the server ends, and the body is not all here
                refusal = error if isinstance(error, Refusal) else shutdown_refusal()
                return error_response(refusal.status, str(refusal), **refusal.headers)
            except (asyncio.TimeoutError, TimeoutError):  # two kinds until Python 3.11
                return error_response(
                    504, f"no answer within {self.limits.seconds:g} s; send less at once"
                )
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:  # a bug, or no memory; what was asked is not told
                return error_response(500, f"the server failed: {type(error).__name__}")

        return endpoint

    async def _answer(self, request: Request, do: Callable[[bytes], Awaitable[bytes]]) -> bytes:
        kind = request.headers.get("content-type", "").lower()
        if kind.split(";")[0].strip() != "application/json":
            raise Refusal(415, "content-type: must be application/json")
        body = await read_body(request, self.limits.body)
        return await unless_gone(request, do(body))

    async def translate(self, body: bytes) -> bytes:
        """Translate sentences: translations, their tokens, and their log-probabilities."""
        theirs = self.system.tokenizers[1]
        sentences, beam, alpha = read_request(body, self.limits, len(theirs))
        jobs = {
            i: Job(self._encode(f"sentences[{i}]", sentence), beam, alpha)
            for i, sentence in enumerate(sentences)
            if sentence.strip()
        }
        found = dict(zip(jobs, await self._results(list(jobs.values())), strict=True))
        best = [found[i][0] if i in found else None for i in range(len(sentences))]
        data = {
            "translations": [text_of(self.system, one.tokens) if one else "" for one in best],
            "tokens": [theirs.tokens(one.tokens) if one else [] for one in best],
            "scores": [one.log_probability if one else None for one in best],
        }
        return json.dumps(data, ensure_ascii=False, allow_nan=False).encode()

    async def attention(self, body: bytes) -> bytes:
        """Translate a sentence, and return its attention weights; see ``attention_json``."""
        most_beam = len(self.system.tokenizers[1])
        (sentence,), beam, alpha = read_request(body, self.limits, most_beam, single=True)
        if not sentence.strip():
            raise Refusal(422, "sentence: is blank; type some words")
        tokens = self._encode("sentence", sentence)
        check_tokens("sentence", len(tokens), self.limits.shown)
        job = Job(tokens, beam, alpha, shown=True)
        ((_, weights),) = await self._results([job])
        unknown = self.pretrained.unknown(sentence) if self.pretrained else []
        note = f"The model does not know {', '.join(unknown[:5])}." if unknown else ""
        more = {"languages": self._languages(sentence), "note": note}
        return json.dumps(more, ensure_ascii=False)[:-1].encode() + b"," + weights[1:]

    def _encode(self, name: str, sentence: str) -> list[int]:
        tokens = self.system.tokenizers[0].encode(sentence)
        check_tokens(name, len(tokens), self.system.config.max_len - 1)
        return tokens

    async def _results(self, jobs: list[Job]) -> list[Found]:
        """Wait for all results; where the request is given up, what is left is cancelled."""
        try:
            self.batcher.submit(jobs)
            return list(await asyncio.gather(*(asyncio.wrap_future(job.found) for job in jobs)))
        finally:
            for job in jobs:
                job.found.cancel()

    def _languages(self, sentence: str) -> list[str]:
        """Return the languages of a sentence and its translation."""
        first, second = self.system.languages
        if self.pretrained is None:
            return [first, second]
        words = [word.strip(".,?!") for word in sentence.split()]
        known = [self.pretrained.words[language] for language in (first, second)]
        counts = [sum(word in one or word.lower() in one for word in words) for one in known]
        return [first, second] if counts[0] >= counts[1] else [second, first]

    async def health(self, request: Request) -> Response:
        """Say that the model's thread is alive, and how many sentences wait for it."""
        alive = self.batcher.thread.is_alive()
        state = {"status": "ok" if alive else "broken", "waiting": len(self.batcher.queue)}
        return make_response(json.dumps(state).encode(), 200 if alive else 503)

    async def page(self, request: Request) -> Response:
        """Return the page."""
        here = escape(request.url.netloc, quote=True)
        return make_response(self.start_page.replace("@HERE@", here).encode(), kind="text/html")

    async def file(self, request: Request) -> Response:
        """Return a script or a style sheet of the page."""
        name = request.path_params["name"]
        if name not in self.static:
            raise HTTPException(404)
        return make_response(self.static[name], kind=TYPES["." + name.rpartition(".")[2]])

    def _fill(self, page: str, name: str) -> str:
        """Fill the page with what it says of this system."""
        first, second = self.system.languages
        heads = HEADS * isinstance(self.system.config, ModelConfig)
        values = {
            "NAME": name,
            "PAIR": "German and English" if self.pretrained else f"{first} to {second}",
            "ABOUT": f"{ABOUT}{heads}.",
            "SENTENCE": RUNNING.text("de") if self.pretrained else "",
            "LABEL": "" if self.pretrained else f'data-label="A sentence ({escape(first)})"',
        }
        for key, value in values.items():
            page = page.replace(f"@{key}@", value if key == "LABEL" else escape(value, quote=True))
        return page


async def read_body(request: Request, most: int) -> bytes:
    """Read the body of a request.

    Raises:
        Refusal: It is larger than ``most`` bytes.
    """
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most:
            body += chunk
        elif size > DRAINED * most:
            break
    if size > most:
        raise Refusal(413, f"body: more than {most} bytes; send fewer sentences at once")
    return bytes(body)


async def unless_gone(request: Request, work: Awaitable[bytes]) -> bytes:
    """Return the result of some work, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: The client went away.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # after the body, it waits for the end
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()


def make_response(content: bytes, status: int = 200, *, kind: str = "application/json") -> Response:
    """Return a response with the headers that all have."""
    return Response(content, status, HEADERS, media_type=kind)


def error_response(status: int, message: str, **headers: str) -> Response:
    """Return an error in one line of JSON."""
    response = make_response(json.dumps({"error": message}, ensure_ascii=False).encode(), status)
    response.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
    return response


async def http_error(request: Request, error: Exception) -> Response:
    """Answer a request for an address that does not exist, or by a wrong method."""
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, **error.headers or {})


async def server_error(request: Request, error: Exception) -> Response:
    """Answer where the server itself is at fault."""
    return error_response(500, f"the server failed: {type(error).__name__}")
