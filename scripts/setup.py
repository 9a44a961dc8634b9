"""Makes the virtual environment that `make` works in; needs nothing but Python 3.11 to 3.13 itself.

    python scripts/setup.py serve     what `make serve` needs
    python scripts/setup.py test      that, and what the tests and checks need

torch comes first and alone, because the plain requirement takes a CUDA build of several GB on any Linux machine:

    no NVIDIA GPU here     torch==2.13.0+cpu, from the configured index or PyTorch's CPU index
    an NVIDIA GPU          torch==2.13.0, the CUDA build of the default index
    macOS                  torch==2.13.0
    TORCH_INDEX=cpu, =cuda or =URL says it instead

Everything else is then installed under the constraint that torch stays as it is, and the build is looked at afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "turnkeep-setup.json"
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = {"serve": "engine,postgres", "test": "engine,postgres,dev"}
CPU_DISK_BYTES, CUDA_DISK_BYTES = 4 << 30, 10 << 30  # venv, pip's cache, the model and its conversion


class SetupFailed(Exception):
    """What went wrong and what to do, in sentences."""


@dataclass(frozen=True)
class TorchChoice:
    """Which build of torch, and the pip arguments to try one after the other."""

    build: str  # "CPU" or "CUDA" or "macOS"
    why: str
    attempts: tuple[tuple[str, ...], ...]


def choose_torch(system: str, has_gpu: bool, torch_index: str) -> TorchChoice:
    """`system` as platform.system() says it; `torch_index` is the variable TORCH_INDEX, "" where it is not set."""
    cpu, plain = f"torch=={TORCH}+cpu", f"torch=={TORCH}"
    if torch_index.startswith(("https://", "http://", "file://", "/")):
        build = "CPU" if torch_index.rstrip("/").endswith("cpu") else "CUDA"
        return TorchChoice(
            build,
            f"TORCH_INDEX is {torch_index}",
            ((cpu if build == "CPU" else plain, "--extra-index-url", torch_index),),
        )
    if torch_index not in ("", "cpu", "cuda"):
        raise SetupFailed(
            f"TORCH_INDEX is {torch_index!r}. Set it to cpu, cuda or the URL of a package index, or leave it out."
        )
    if system == "Darwin":
        return TorchChoice("macOS", "macOS has one build", ((plain,),))
    if torch_index == "cuda" or (has_gpu and not torch_index):
        return TorchChoice("CUDA", "TORCH_INDEX is cuda" if torch_index else "nvidia-smi sees a GPU", ((plain,),))
    why = "TORCH_INDEX is cpu" if torch_index else "no NVIDIA GPU is here"
    return TorchChoice("CPU", why, ((cpu,), (cpu, "--extra-index-url", CPU_INDEX)))


def advice(output: str) -> str:
    """What to do about pip's last lines."""
    text = output.lower()
    if "no space left" in text:
        return "The disk is full: free some GB and run make again (`make clean` removes the environment)."
    if any(
        sign in text
        for sign in ("name resolution", "connection", "timed out", "network is unreachable", "ssl", "proxy")
    ):
        return (
            "The package index was not reached: check the network, a proxy (HTTPS_PROXY), or name a mirror "
            "(PIP_INDEX_URL=... make ...), and run make again; what was fetched is kept."
        )
    if "no matching distribution" in text and f"torch=={TORCH}" in text:
        return (
            f"The index has no such build of torch for Python {platform.python_version()} on {platform.machine()}: run "
            "make again with PYTHON=python3.11, or with TORCH_INDEX=URL of an index that has it (the README says more)."
        )
    if "no matching distribution" in text:
        return "The package index has no such version: a mirror may be old (PIP_INDEX_URL names another)."
    if "permission denied" in text:
        return f"{VENV} belongs to another user: run make as that user, or remove it."
    return "Run make again; if it stays so, `make clean` and once more, or report these lines."


def main(profile: str) -> None:
    """Raises SetupFailed."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SetupFailed(
            f"This is Python {platform.python_version()}; Turnkeep needs 3.11, 3.12 or 3.13. Install one and run "
            "make again, or name it: make PYTHON=/path/to/python3.11 ..."
        )
    torch_index = os.environ.get("TORCH_INDEX", "").strip()
    choice = choose_torch(platform.system(), _has_gpu(), torch_index)
    key = _key(choice)
    if _done(key, profile):
        return
    started = time.monotonic()
    _check_disk(CUDA_DISK_BYTES if choice.build == "CUDA" else CPU_DISK_BYTES)
    say(f"Setting up {VENV.name} with Python {platform.python_version()}; this takes some minutes, once.")
    _make_venv()
    _pip("--upgrade", "pip")  # the one that Python brings may be years old, and takes thrice as long to resolve
    say(f"torch {TORCH}, the {choice.build} build, because {choice.why} (TORCH_INDEX=cpu|cuda|URL says otherwise)")
    constraint = _install_torch(choice)
    say("Turnkeep and what it needs")
    _pip("--editable", f"{ROOT}[{EXTRAS[profile]}]", "--constraint", str(constraint))
    _verify_torch(choice)
    STAMP.write_text(json.dumps({"key": key, "extras": EXTRAS[profile]}))
    say(f"The environment is ready, after {time.monotonic() - started:.0f} s.")


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def _has_gpu() -> bool:
    """Whether nvidia-smi is there and lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    done = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and "GPU" in done.stdout


def _key(choice: TorchChoice) -> str:
    """Changes with all that the environment is made from."""
    parts = [(ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes(), repr(choice).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _done(key: str, profile: str) -> bool:
    try:
        stamp = json.loads(STAMP.read_text())
        whole = stamp["key"] == key and set(EXTRAS[profile].split(",")) <= set(stamp["extras"].split(","))
    except (OSError, ValueError, KeyError):
        return False
    return whole and _runs(PYTHON)


def _runs(python: Path) -> bool:
    """Whether it starts and is of a version that we take."""
    check = "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
    try:
        return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _check_disk(needed: int) -> None:
    free = shutil.disk_usage(ROOT).free
    if free < needed and not PYTHON.exists():
        raise SetupFailed(
            f"{ROOT} has {free / 1e9:.1f} GB free and the environment needs about {needed / 1e9:.0f} GB. Free some, or "
            "put the checkout on a larger disk."
        )


def _make_venv() -> None:
    if _runs(PYTHON):
        return
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        output = done.stdout + done.stderr
        if "ensurepip" in output:
            raise SetupFailed(
                f"{sys.executable} cannot make virtual environments. On Debian and Ubuntu: apt install "
                f"python{sys.version_info[0]}.{sys.version_info[1]}-venv. Then run make again."
            )
        raise SetupFailed(f"{output[-2000:]}\nThe virtual environment could not be made. {advice(output)}")


def _install_torch(choice: TorchChoice) -> Path:
    """Install torch by the first attempt that works; returns a constraint file that holds it where it is."""
    for number, attempt in enumerate(choice.attempts, 1):
        try:
            _pip(*attempt)
            break
        except SetupFailed as failure:
            if number == len(choice.attempts) or "no matching distribution" not in str(failure).lower():
                raise
            say(f"not there; trying {choice.attempts[number][-1]}")
    constraint = VENV / "torch-constraint.txt"
    constraint.write_text(f"torch=={_torch_of_venv()[0]}\n")
    return constraint


def _torch_of_venv() -> tuple[str, str]:
    """Version and CUDA version ("" for none) of the torch that is installed."""
    code = "import torch; print(torch.__version__, torch.version.cuda or '')"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupFailed(f"{done.stderr[-2000:]}\ntorch was installed but does not start. {advice(done.stderr)}")
    version, _, cuda = done.stdout.strip().partition(" ")
    return version, cuda


def _verify_torch(choice: TorchChoice) -> None:
    version, cuda = _torch_of_venv()
    if choice.build == "CPU" and cuda:
        raise SetupFailed(
            f"torch {version} with CUDA {cuda} is installed where the CPU build was wanted. Run `make clean`, then "
            f"make again; TORCH_INDEX={CPU_INDEX} names the index of CPU builds."
        )
    if choice.build == "CUDA" and not cuda:
        raise SetupFailed(
            f"torch {version} has no CUDA, where the CUDA build was wanted. Run `make clean`, then make again with "
            "TORCH_INDEX=URL of an index of CUDA builds, or with TORCH_INDEX=cpu if the GPU is not for Turnkeep."
        )
    say(f"torch {version}: {'CUDA ' + cuda if cuda else 'no CUDA'}, as it should be")


def _pip(*arguments: str) -> None:
    """pip install, one line of progress for each package. Raises SetupFailed with pip's last lines."""
    command = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        *arguments,
    ]
    tail: deque[str] = deque(maxlen=30)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line)
            _show(line.strip())
        code = process.wait()
    _end_of_progress()
    if code:
        output = "".join(tail)
        raise SetupFailed(f"{output}\npip could not install {_what(arguments)}. {advice(output)}")


def _what(arguments: tuple[str, ...]) -> str:
    return next(argument for argument in arguments if not argument.startswith("-"))


_shown_at = 0.0


def _show(line: str) -> None:
    """On a terminal one line that changes; elsewhere the large downloads and one line in ten seconds."""
    global _shown_at
    if not line.startswith(("Collecting", "Downloading", "Installing", "Building", "Processing")):
        return
    if sys.stdout.isatty():
        print(f"\r\033[K    {line[:100]}", end="", flush=True)
    elif "MB)" in line or "GB)" in line or time.monotonic() - _shown_at > 10 or line.startswith("Installing"):
        print(f"    {line[:100]}", flush=True)
        _shown_at = time.monotonic()


def _end_of_progress() -> None:
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "serve")
    except SetupFailed as failure:
        sys.exit(f"\n{failure}")
    except KeyboardInterrupt:
        sys.exit("\nStopped. Run make again: it goes on where it was.")
