"""The local Prefect server behind `gradeloom ui`: start, find, stop. One process, on loopback only."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradeloom.schemas.errors import GradeloomError, InputError
from gradeloom.tasks.engine.models import home

if TYPE_CHECKING:
    import psutil

HOST = "127.0.0.1"
PORT = 4200
_LAST_LINES = 15


@dataclass(frozen=True)
class LocalServer:
    """A server that was started here; `created` (Unix time) tells its process from a later one of its pid."""

    pid: int
    created: float
    port: int

    @property
    def url(self) -> str:
        """Where people look."""
        return f"http://{HOST}:{self.port}"

    @property
    def api_url(self) -> str:
        return f"{self.url}/api"

    def process(self) -> psutil.Process | None:
        """Its live process, or None."""
        import psutil

        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 1.0
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def healthy(self) -> bool:
        """Whether it answers."""
        return answers(self.api_url)


def answers(api_url: str) -> bool:
    """Whether a Prefect API answers within two seconds, if only by asking who we are.

    On loopback it is asked without any proxy.
    """
    local = re.match(r"https?://(127\.|localhost|\[::1\])", api_url)
    proxies = urllib.request.ProxyHandler({} if local else None)
    try:
        with urllib.request.build_opener(proxies).open(
            f"{api_url.rstrip('/')}/health", timeout=2.0
        ) as answer:
            return bool(answer.headers.get_content_type() == "application/json")
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def without_password(url: str) -> str:
    """A URL that may be shown."""
    return re.sub(r"//[^/@]*@", "//", url)


def prefect_home() -> Path:
    """The store of the local server: $GRADELOOM_HOME/prefect, default `.gradeloom/prefect`."""
    return home().absolute() / "prefect"


def _state_file() -> Path:
    return prefect_home() / "server.json"


def log_file() -> Path:
    return prefect_home() / "server.log"


def running() -> LocalServer | None:
    """The local server of this home, if its process lives."""
    try:
        found = LocalServer(**json.loads(_state_file().read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.process() is not None else None


def running_api_url() -> str | None:
    """The API of the local server, if it lives and answers."""
    found = running()
    return found.api_url if found is not None and found.healthy() else None


def settle_environment(api_url: str) -> None:
    """Make Prefect, not imported yet, quiet, private and unable to start a server of its own."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if api_url == running_api_url():
        os.environ.setdefault("PREFECT_HOME", str(prefect_home()))
        for name in ("NO_PROXY", "no_proxy"):
            if HOST not in os.environ.get(name, "").split(","):
                os.environ[name] = ",".join(filter(None, [os.environ.get(name), HOST]))
    os.environ["PREFECT_API_URL"] = api_url


_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


# --- start and stop -------------------------------------------------------------------------


def start(port: int = PORT, *, timeout: float = 120.0) -> LocalServer:
    """Start the server and wait until it answers. It outlives this process; `stop` ends it.

    Args:
        port: on 127.0.0.1.
        timeout: seconds until it must answer.

    Raises:
        InputError: the port is taken, or the store's folder cannot be written.
        GradeloomError: it did not come up; its last lines are in the message.
    """
    _refuse_taken(port)
    log = log_file()
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        lines = log.open("w")
    except OSError as error:
        raise InputError(f"cannot write the server's log: {error.strerror}", file=log) from error
    with lines:
        child = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app",
             "--host", HOST, "--port", str(port), "--timeout-graceful-shutdown", "3",
             "--log-level", "warning"],
            stdin=subprocess.DEVNULL, stdout=lines, stderr=lines, start_new_session=True,
            env=_server_environment(port), cwd=log.parent,
        )  # fmt: skip
    import psutil

    started = LocalServer(child.pid, psutil.Process(child.pid).create_time(), port)
    try:
        _state_file().write_text(json.dumps(asdict(started)))
        _wait_until_healthy(started, child, timeout)
    except BaseException:
        stop(started)
        child.wait()
        raise
    return started


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise InputError(
                f"port {port} of {HOST} cannot be used ({error}); choose another: gradeloom ui --port N"
            ) from None


def _server_environment(port: int) -> dict[str, str]:
    """Ours without what looks like a secret, or configures another Prefect."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT") and not _secret_name(k)}
    return kept | _ENVIRONMENT | {
        "PREFECT_HOME": str(prefect_home()),
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_UI_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_UI_STATIC_DIRECTORY": str(prefect_home() / "ui"),
        "PREFECT__SERVER_FINAL": "1",
    }  # fmt: skip


def _secret_name(name: str) -> bool:
    return any(part in name.upper() for part in ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"))


def _wait_until_healthy(server: LocalServer, child: subprocess.Popen[bytes], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not server.healthy():
        if child.poll() is not None or time.monotonic() > deadline:
            why = "stopped" if child.poll() is not None else f"did not answer within {timeout:.0f} s"
            last = log_file().read_text(errors="replace").splitlines()[-_LAST_LINES:]
            raise GradeloomError(f"the Prefect server {why}; its last lines:\n" + "\n".join(last))
        time.sleep(0.2)


def stop(server: LocalServer, *, grace: float = 10.0) -> None:
    """Stop the server and every process it started, and wait until they are gone."""
    import psutil

    leader = server.process()
    if leader is not None:
        family = [leader, *leader.children(recursive=True)]
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for process in family:
                try:
                    process.send_signal(sign)
                except psutil.NoSuchProcess:
                    continue
            _, family = psutil.wait_procs(family, timeout=grace)
            if not family:
                break
    if running() is None or running() == server:
        _state_file().unlink(missing_ok=True)


def wait(server: LocalServer) -> None:
    """Return when the server has ended by itself."""
    process = server.process()
    if process is not None:
        process.wait()
