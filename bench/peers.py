"""Other gateways, from pip, in a virtual environment of their own. Each stands in front of an OpenAI-shaped upstream.

One that cannot be installed or started is named with the reason and measured no further.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

KEY = "sk-bench-peer-key"
INSTALL_S = 1200


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    requirement: str
    module: str  # what the requirement installs
    command: Callable[[Path, Path, str, int], Sequence[str]]  # venv's bin, folder, upstream, port
    ready: str  # in its output


def _litellm(bin: Path, folder: Path, upstream: str, port: int) -> Sequence[str]:
    model = {"model": "openai/echo", "api_base": f"{upstream}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": "echo", "litellm_params": model}],
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"telemetry": False, "num_retries": 0},
    }
    (folder / "litellm.json").write_text(json.dumps(config))  # YAML takes JSON
    return [
        str(bin / "litellm"), "--config", str(folder / "litellm.json"), "--host", "127.0.0.1", "--port", str(port),
        "--num_workers", "1", "--telemetry", "False",
    ]  # fmt: skip


def _vllm_router(bin: Path, folder: Path, upstream: str, port: int) -> Sequence[str]:
    return [
        str(bin / "vllm-router"), "--worker-urls", upstream, "--host", "127.0.0.1", "--port", str(port),
        "--policy", "consistent_hash", "--prometheus-port", str(free_port()),
    ]  # fmt: skip


def _smg(bin: Path, folder: Path, upstream: str, port: int) -> Sequence[str]:
    return [
        str(bin / "python"), "-m", "smg", "launch", "--worker-urls", upstream, "--host", "127.0.0.1",
        "--port", str(port), "--policy", "consistent_hashing", "--prometheus-port", str(free_port()),
    ]  # fmt: skip


PEERS = (
    # 1.107.0 was a compromised release
    Peer("litellm", "litellm[proxy]!=1.107.0", "litellm", _litellm, "Uvicorn running|Application startup complete"),
    Peer("vllm-router", "vllm-router", "vllm_router", _vllm_router, "."),
    Peer("smg", "smg", "smg", _smg, "."),
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def installed(folder: Path, peer: Peer) -> str | None:
    """Install `peer` into its environment in `folder`, unless it is there; why it could not be, or None.

    Without its dependencies' own dependence on torch: whatever asks for torch is not installed.
    """
    bin = folder / peer.name / "bin"
    if (bin / ".installed").exists():
        return None
    subprocess.run([sys.executable, "-m", "venv", str(bin.parent)], check=True)
    constraints = folder / "no-torch.txt"
    constraints.write_text("torch<0\n")
    command = [str(bin / "pip"), "install", "-q", "-c", str(constraints), peer.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"pip did not end within {INSTALL_S} s"
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return "pip: " + " ".join(errors)[:400]
    (bin / ".installed").touch()
    return None


def version(folder: Path, peer: Peer) -> str:
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    name = peer.requirement.partition("[")[0].partition("!")[0]
    done = subprocess.run(
        [str(folder / peer.name / "bin" / "python"), "-c", code, name], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
