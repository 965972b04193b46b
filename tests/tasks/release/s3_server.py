"""An S3-protocol server (moto's) in a process of its own, one request after the other.

S3 promises that of two conditional writes one wins. moto looks and then writes, so two requests at once
could both win; here there is one at a time.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

BUCKET = "gradeloom-test"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "for-tests",
    "AWS_SECRET_ACCESS_KEY": "for-tests-only",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass(frozen=True)
class Store:
    """The server, and a client of it that is none of ours.

    Attributes:
        environment: what `gradeloom` needs to know of it.
        log: a line a request, written before it is answered.
    """

    environment: dict[str, str]
    client: Any
    log: Path

    def keys(self, prefix: str = "") -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [one["Key"] for one in found.get("Contents", [])]

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def requests(self) -> list[str]:
        """`METHOD PATH` of every request so far but those of `client`."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.partition("\t")[0] for line in lines if "\tBoto3/" not in line]

    def clear(self) -> None:
        for key in self.keys():
            self.client.delete_object(Bucket=BUCKET, Key=key)


@contextmanager
def serving(folder: Path) -> Iterator[Store]:
    """Start it on a free port, make the bucket, stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "requests.log"
    with (folder / "server.log").open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, __file__, str(port), str(log)],
            env=os.environ | CREDENTIALS, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        _wait(server, port)
        client = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip
        client.create_bucket(Bucket=BUCKET)
        yield Store(CREDENTIALS | {"AWS_ENDPOINT_URL": url}, client, log)
    finally:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "the S3 server ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the S3 server does not answer")


def _serve(port: int, log: str) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    app = DomainDispatcherApplication(create_backend_app)
    with open(log, "a") as requests:  # noqa: PTH123

        def logged(environ: dict[str, Any], start_response: Any) -> Any:
            agent = environ.get("HTTP_USER_AGENT", "")
            requests.write(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}\t{agent}\n")
            requests.flush()
            return app(environ, start_response)

        run_simple("127.0.0.1", port, logged, threaded=False)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
